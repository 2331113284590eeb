// The live picture of the deployment, by server-sent events. There is one stream while at least one component uses
// `useLive` and the page is visible; otherwise there is none, and the gateway computes nothing.
import { useEffect, useState } from "./dom.js";
import { readSession } from "./api.js";

const KEPT = 300; // pictures whose figures are remembered, for small curves and rates
const FIRST_RETRY_MS = 1000;
const LONGEST_RETRY_MS = 30000;

const users = new Set();
let source = null;
let timer = 0;
let retryMs = FIRST_RETRY_MS;
let ended = () => {};
let now = { picture: null, connection: "connecting", trouble: null, history: [] };

// {picture: {status, pipeline, page} | null, connection: "connecting" | "live" | "lost", trouble: text | null,
//  history: [{at, turns, context_tokens, output_tokens, reward, step}, …]}, the newest last; `at` in seconds.
export function useLive() {
  const [state, setState] = useState(now);
  useEffect(() => {
    users.add(setState);
    setState(now);
    arrange();
    return () => {
      users.delete(setState);
      arrange();
    };
  }, []);
  return state;
}

export function onEnded(listener) {
  ended = listener;
}

// Units a second over the last `seconds` of the history, or null.
export function rate(history, name, seconds = 30) {
  const last = history.at(-1);
  const first = history.find((each) => each.at >= (last?.at ?? 0) - seconds);
  if (!last || !first || last.at - first.at < 1 || last[name] < first[name]) return null;
  return (last[name] - first[name]) / (last.at - first.at);
}

function tell(change) {
  now = { ...now, ...change };
  for (const user of users) user(now);
}

function arrange() {
  const wanted = users.size > 0 && !document.hidden;
  if (wanted && source === null && !timer) open();
  if (!wanted) close();
}

function close() {
  clearTimeout(timer);
  timer = 0;
  source?.close();
  source = null;
}

function open() {
  timer = 0;
  source = new EventSource("/page/events");
  source.addEventListener("picture", (event) => {
    retryMs = FIRST_RETRY_MS;
    const picture = JSON.parse(event.data);
    tell({ picture, connection: "live", trouble: null, history: remembered(picture) });
  });
  source.addEventListener("trouble", (event) => tell({ connection: "live", trouble: JSON.parse(event.data).message }));
  source.addEventListener("end", lost);
  source.addEventListener("error", lost);
}

// The stream broke, or the gateway ended it: try again, unless nobody is signed in any more.
async function lost() {
  close();
  tell({ connection: "lost" });
  const session = await readSession().catch(() => null);
  if (session !== null && session.role === null) {
    ended();
  } else if (users.size > 0 && !document.hidden && source === null) {
    clearTimeout(timer);
    timer = setTimeout(open, retryMs);
    retryMs = Math.min(2 * retryMs, LONGEST_RETRY_MS);
  }
}

function remembered({ status }) {
  const metrics = status.trainer?.metrics ?? {};
  const figures = { at: Date.now() / 1000, ...status.traffic, reward: metrics.reward_mean, step: status.trainer?.step };
  const last = now.history.at(-1);
  const restarted = last && status.traffic && last.turns > status.traffic.turns;
  return [...(restarted ? [] : now.history), figures].slice(-KEPT);
}

document.addEventListener("visibilitychange", arrange);
