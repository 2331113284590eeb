// Learning: the curves of the run, beside those of other runs, with what happened to it.
import { html, useEffect, useMemo, useRef, useState } from "../dom.js";
import { useGet } from "../api.js";
import { count, number } from "../format.js";
import { Ago, Card, ErrorNote, Loading } from "../parts.js";
import { go } from "../router.js";
import { Curve } from "./curves/curve.js";
import { nameOf, taskOf } from "./curves/metric_names.js";
import { Runs, useFiles, useKeptRuns } from "./curves/runs.js";
import { useEvents } from "./curves/events.js";
import { visible } from "./visible.js";

const DEFAULTS = ["reward_mean", "loss", "grad_norm", "entropy", "mismatch/kl_current", "mismatch/abs_logp_current", "staleness/total_mean", "len/mean"];
const BUCKETS = 1000;
const MOST_METRICS = 32;
const MOST_TASKS = 8; // curves in one picture
const MOST_EVENTS = 12;
const AGAIN_MS = 10000;
const READ_ON_MS = 200;
const NONE = [];
const SMOOTH = [{ value: "0", label: "none" }, { value: "", label: "a little" }, { value: "0.9", label: "strong" }, { value: "0.98", label: "very strong" }];
const A_LITTLE = 0.6;

export default function Learning({ route }) {
  const { query } = route;
  const metrics = useMemo(() => chosen(query.m), [query.m]);
  const from = whole(query.from);
  const to = whole(query.to);
  const smooth = SMOOTH.some((each) => each.value && each.value === query.smooth) ? Number(query.smooth) : A_LITTLE;
  const window = useMemo(() => ({ from, to, buckets: BUCKETS }), [from, to]);
  const { data, error, reload } = useCurves(metrics, window);
  const named = query.m ? "" : (data?.tasks ?? NONE).slice(-MOST_TASKS).sort().join(","); // sorted: each keeps its colour
  const tasks = useMemo(() => named.split(",").filter(Boolean), [named]);
  const ofTasks = useCurves(tasks.length > 1 ? tasks : null, window);
  const [files, setFiles] = useState([]);
  const others = useFiles(files, metrics, window);
  const kept = useKeptRuns((query.runs ?? "").split("\n").filter(Boolean), metrics, window);
  const events = useEvents(data);
  const move = (change) => go("learning", [], { ...query, ...change });
  const limits = useMemo(() => Object.fromEntries((data?.limits ?? []).map((each) => [each.metric, each])), [data]);
  const runs = useMemo(() => {
    const all = [...kept.runs, ...others.runs];
    return Object.fromEntries(metrics.map((name) => [name, [...(data ? [{ name: "this run", series: data.series[name] }] : []), ...all.map((run) => ({ name: run.name, series: run.series[name] }))]]));
  }, [metrics, data, others.runs, kept.runs]);
  const taskRuns = useMemo(() => tasks.map((name) => ({ name: taskOf(name), task: true, series: ofTasks.data?.series[name] })), [tasks, ofTasks.data]);
  const shared = { marks: events, smooth, onZoom: (first, last) => move({ from: first, to: last }) };
  return html`
    ${error && html`<${ErrorNote} error=${error} again=${reload} />`}
    <${Bar} data=${data} query=${query} zoomed=${from !== null || to !== null} move=${move} />
    ${!data && !error && html`<${Loading} />`}
    <div class="curves">
      ${metrics.slice(0, 1).map((name) => html`<${Curve} key=${name} metric=${name} runs=${runs[name]} limit=${limits[name] ?? null} ...${shared} />`)}
      ${taskRuns.length > 1 && html`<${Curve} key="tasks" metric="reward/task" title="Reward of each task" unit="reward" runs=${taskRuns} limit=${null} ...${shared} />`}
      ${metrics.slice(1).map((name) => html`<${Curve} key=${name} metric=${name} runs=${runs[name]} limit=${limits[name] ?? null} ...${shared} />`)}
    </div>
    <${Events} events=${events} />
    <${Metrics} names=${data?.metrics ?? NONE} tasks=${data?.tasks ?? NONE} metrics=${metrics} move=${move} />
    <${Steps} key=${`${from}-${to}`} data=${data} from=${from} to=${to} move=${move} />
    <${Runs} files=${files} others=${others} kept=${kept} onFiles=${setFiles} onKept=${(names) => move({ runs: names.join("\n") })} />
  `;
}

function chosen(text) {
  const names = (text ?? "").split(",").filter(Boolean).slice(0, MOST_METRICS);
  return names.length ? names : DEFAULTS;
}

function whole(text) {
  return /^\d{1,15}$/.test(text ?? "") ? Number(text) : null;
}

// Reads again after some seconds while the page is seen, and at once while the trainer has not read its whole file.
// What has not changed stays the same object, so that nothing is drawn anew.
function useCurves(metrics, { from, to, buckets }) {
  const [again, setAgain] = useState(0);
  const asked = new URLSearchParams({ metrics: (metrics ?? NONE).join(","), buckets: String(buckets) });
  if (from !== null) asked.set("from", from);
  if (to !== null) asked.set("to", to);
  const found = useGet(metrics === null ? null : `/admin/learning?${asked}`, again);
  const former = useRef(null);
  const text = useMemo(() => JSON.stringify(found.data), [found.data]);
  if (former.current?.text !== text) former.current = { text, data: found.data };
  useEffect(() => {
    const wait = found.data && !found.data.complete ? READ_ON_MS : AGAIN_MS;
    const timer = setInterval(() => document.hidden || setAgain((value) => value + 1), wait);
    return () => clearInterval(timer);
  }, [found.data]);
  return { ...found, data: former.current.data };
}

// What is chosen most, above the curves.
function Bar({ data, query, zoomed, move }) {
  const known = data && data.last !== null;
  const steps = known ? `Steps ${number(data.first)} to ${number(data.last)}; a point stands for ${count(data.bucket_steps, "step")}.${data.complete ? "" : " The trainer still reads its file."}` : data ? "No step has been recorded yet." : "";
  return html`<div class="bar-of-choices">
    <label class="choice">Smoothing
      <select onChange=${(event) => move({ smooth: event.target.value })}>
        ${SMOOTH.map(({ value, label }) => html`<option value=${value} selected=${value === (query.smooth ?? "")}>${label}</option>`)}
      </select>
    </label>
    ${zoomed && html`<button class="small" onClick=${() => move({ from: "", to: "" })}>All steps</button>`}
    <span class="muted note">${steps} Drag over a curve to see a part of it.</span>
  </div>`;
}

function Events({ events }) {
  if (!events.length) return null;
  const last = events.slice(-MOST_EVENTS).reverse();
  return html`<${Card} title="What happened" note="The vertical lines in the curves, the newest first.">
    <ul class="events">
      ${last.map((each) => html`<li key=${`${each.kind}-${each.step}-${each.says}`}><span class="sign" data-kind=${each.kind} aria-hidden="true"></span> ${each.says}${each.at ? html` (<${Ago} at=${each.at} />)` : ""}${each.why ? `: ${visible(each.why)}` : "."}</li>`)}
    </ul>
  <//>`;
}

function Steps({ data, from, to, move }) {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    move({ from: given.get("from"), to: given.get("to") });
  };
  return html`<details class="card">
    <summary>Steps: ${from === null && to === null ? "all" : `${from ?? "the first"} to ${to ?? "the last"}`}</summary>
    <form class="filters" onSubmit=${submit}>
      <p class="field"><label for="learning-from">From step</label><input id="learning-from" name="from" type="number" min="0" defaultValue=${from ?? ""} /></p>
      <p class="field"><label for="learning-to">To step</label><input id="learning-to" name="to" type="number" min="0" max=${data?.last === null ? undefined : Number.MAX_SAFE_INTEGER} defaultValue=${to ?? ""} /></p>
      <p class="buttons"><button type="submit" class="primary">Show</button></p>
    </form>
  </details>`;
}

function Metrics({ names, tasks, metrics, move }) {
  const shown = new Set(metrics);
  const all = [...new Set([...metrics, ...names, ...tasks])].filter((name) => !["step", "version", "time"].includes(name)).sort();
  const toggle = (name) => {
    const next = shown.has(name) ? metrics.filter((each) => each !== name) : [...metrics, name];
    move({ m: next.slice(0, MOST_METRICS).join(",") });
  };
  return html`<details class="card">
    <summary>Metrics: ${number(metrics.length)} of ${number(all.length)} shown</summary>
    <fieldset class="choices">
      <legend class="hidden">Metrics that are shown</legend>
      ${all.map((name) => html`<label key=${name} title=${nameOf(name)}><input type="checkbox" checked=${shown.has(name)} onChange=${() => toggle(name)} />${visible(name)}</label>`)}
    </fieldset>
  </details>`;
}
