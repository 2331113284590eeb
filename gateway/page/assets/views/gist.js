// The first cell of a session in the list: its question and its answer, read once the row is seen, and its id.
import { html, useEffect, useRef, useState } from "../dom.js";
import { get } from "../api.js";
import { Id } from "../parts.js";
import { link } from "../router.js";
import { visible } from "./visible.js";

const CHARACTERS = 180;
const AT_ONCE = 3; // requests; each reads one session
const KEPT = 500;

const known = new Map(); // session id and its number of turns -> {question, answer}
const waiting = [];
let running = 0;

export function Gist({ row }) {
  const box = useRef(null);
  const key = `${row.session_id} ${row.turn_count}`;
  const [gist, setGist] = useState(known.get(key) ?? null);
  useEffect(() => {
    if (!row.turn_count || known.has(key)) return undefined;
    let wanted = true;
    const seen = new IntersectionObserver((entries) => {
      if (!entries.some((each) => each.isIntersecting)) return;
      seen.disconnect();
      ask(row.session_id, key, () => wanted, setGist);
    });
    seen.observe(box.current);
    return () => {
      wanted = false;
      seen.disconnect();
    };
  }, [key]);
  const id = html`<${Id} text=${visible(row.session_id)} />`;
  const place = link("sessions", [row.session_id]);
  return html`<div class="gist" ref=${box}>
    ${gist?.question && html`<p class="question" title="Question"><a href=${place} tabindex="-1">${visible(gist.question)}</a></p>`}
    ${gist?.answer && html`<p class="answer" title="Answer">${visible(gist.answer)}</p>`}
    <a class="mono" href=${place}>${id}</a>
  </div>`;
}

function ask(id, key, wanted, tell) {
  waiting.push({ id, key, wanted, tell });
  serve();
}

// The rows that were seen last come first: those before may be out of sight by now.
async function serve() {
  while (running < AT_ONCE && waiting.length) {
    const next = waiting.pop();
    if (!next.wanted()) continue;
    running += 1;
    const asked = new URLSearchParams({ messages: "true", ends: "true", text_limit: String(CHARACTERS) });
    get(`/sessions/${encodeURIComponent(next.id)}?${asked}`)
      .then((session) => {
        const gist = gistOf(session.turns);
        known.set(next.key, gist);
        if (known.size > KEPT) known.delete(known.keys().next().value);
        if (next.wanted()) next.tell(gist);
      })
      .catch(() => {}) // the row has its id all the same
      .finally(() => {
        running -= 1;
        serve();
      });
  }
}

function gistOf(turns) {
  const asked = turns[0]?.messages ?? [];
  const first = asked.find((each) => each.role === "user") ?? asked.find((each) => each.role === "prompt");
  const last = turns.at(-1)?.messages?.at(-1);
  const called = last?.tool_calls.map((each) => `calls ${each.function.name}`).join(", ");
  return { question: whole(first?.content), answer: whole(last?.content || called || last?.reasoning_content) };
}

// In one line.
function whole(text) {
  return (text ?? "").replace(/\s+/g, " ").trim();
}
