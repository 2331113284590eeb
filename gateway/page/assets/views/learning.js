// Learning: the curves of the run, beside those of other runs whose metrics.jsonl is opened here.
import { html, useEffect, useMemo, useRef, useState } from "../dom.js";
import { useGet } from "../api.js";
import { bytes, count, number, percent } from "../format.js";
import { Ago, Card, ErrorNote } from "../parts.js";
import { go } from "../router.js";
import { Curve } from "./curve.js";
import { bucketed, readRun } from "./run_files.js";
import { visible } from "./visible.js";

const DEFAULTS = ["reward_mean", "loss", "grad_norm", "entropy", "mismatch/kl_current", "mismatch/abs_logp_current", "staleness/total_mean", "len/mean"];
const BUCKETS = 1000;
const MOST_METRICS = 32;
const MOST_FILES = 3;
const MOST_RECOVERIES = 8;
const AGAIN_MS = 10000;
const READ_ON_MS = 200;
const NONE = [];

export default function Learning({ route }) {
  const { query } = route;
  const metrics = useMemo(() => chosen(query.m), [query.m]);
  const from = whole(query.from);
  const to = whole(query.to);
  const { data, error, reload } = useCurves(metrics, from, to);
  const [files, setFiles] = useState([]);
  const others = useFiles(files, metrics, from, to);
  const move = (change) => go("learning", [], { ...query, ...change });
  const limits = useMemo(() => Object.fromEntries((data?.limits ?? []).map((each) => [each.metric, each])), [data]);
  const recoveries = data?.recoveries ?? NONE;
  const marks = useMemo(() => recoveries.map((each) => each.step), [recoveries]);
  const runs = useMemo(
    () => Object.fromEntries(metrics.map((name) => [name, [...(data ? [{ name: "this run", series: data.series[name] }] : []), ...others.runs.map((run) => ({ name: run.name, series: run.series[name] }))]])),
    [metrics, data, others.runs],
  );
  return html`
    ${error && html`<${ErrorNote} error=${error} again=${reload} />`}
    <${Range} key=${`${from}-${to}`} data=${data} from=${from} to=${to} move=${move} />
    <${Recoveries} recoveries=${recoveries} />
    <${Files} files=${files} others=${others} onChange=${setFiles} />
    <${Metrics} names=${data?.metrics ?? NONE} metrics=${metrics} move=${move} />
    <div class="curves">
      ${metrics.map((name) => html`<${Curve} key=${name} metric=${name} runs=${runs[name]} limit=${limits[name] ?? null} marks=${marks} onZoom=${(first, last) => move({ from: first, to: last })} />`)}
    </div>
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
function useCurves(metrics, from, to) {
  const [again, setAgain] = useState(0);
  const asked = new URLSearchParams({ metrics: metrics.join(","), buckets: String(BUCKETS) });
  if (from !== null) asked.set("from", from);
  if (to !== null) asked.set("to", to);
  const found = useGet(`/admin/learning?${asked}`, again);
  useEffect(() => {
    const wait = found.data && !found.data.complete ? READ_ON_MS : AGAIN_MS;
    const timer = setInterval(() => document.hidden || setAgain((value) => value + 1), wait);
    return () => clearInterval(timer);
  }, [found.data]);
  return found;
}

function Range({ data, from, to, move }) {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    move({ from: given.get("from"), to: given.get("to") });
  };
  const known = data && data.last !== null;
  const zoomed = from !== null || to !== null;
  return html`<${Card} title="Steps" note=${known ? `The run has steps ${number(data.first)} to ${number(data.last)}. Each point stands for ${count(data.bucket_steps, "step")}.${data.complete ? "" : " The trainer still reads its file."} Drag over a curve to see a part of it.` : "No step has been recorded yet."}>
    <form class="filters" onSubmit=${submit}>
      <p class="field"><label for="learning-from">From step</label><input id="learning-from" name="from" type="number" min="0" defaultValue=${from ?? ""} /></p>
      <p class="field"><label for="learning-to">To step</label><input id="learning-to" name="to" type="number" min="0" defaultValue=${to ?? ""} /></p>
      <p class="buttons">
        ${zoomed && html`<button type="button" onClick=${() => move({ from: "", to: "" })}>All steps</button>`}
        <button type="submit" class="primary">Show</button>
      </p>
    </form>
  <//>`;
}

function Recoveries({ recoveries }) {
  if (!recoveries.length) return null;
  return html`<${Card} title="Set back" note="Where a vertical line crosses the curves, the training went back to the weights of an older version.">
    <ul>
      ${recoveries.slice(-MOST_RECOVERIES).reverse().map((each) => html`<li key=${each.version}>After step ${number(each.step)} to version ${number(each.restored)}, which goes on as version ${number(each.version)} (<${Ago} at=${each.at} />): ${visible(each.reason)}</li>`)}
    </ul>
  <//>`;
}

function Metrics({ names, metrics, move }) {
  const shown = new Set(metrics);
  const all = [...new Set([...metrics, ...names.filter((name) => !["step", "version", "time"].includes(name))])].sort();
  const toggle = (name) => {
    const next = shown.has(name) ? metrics.filter((each) => each !== name) : [...metrics, name];
    move({ m: next.slice(0, MOST_METRICS).join(",") });
  };
  return html`<details class="card">
    <summary>Metrics: ${number(metrics.length)} of ${number(all.length)} shown</summary>
    <fieldset class="choices">
      <legend class="hidden">Metrics that are shown</legend>
      ${all.map((name) => html`<label key=${name}><input type="checkbox" checked=${shown.has(name)} onChange=${() => toggle(name)} />${visible(name)}</label>`)}
    </fieldset>
  </details>`;
}

// Reads the chosen files for the metrics that are shown: {runs: [{name, series}], progress, error}.
function useFiles(files, metrics, from, to) {
  const [read, setRead] = useState({ columns: NONE, progress: null, error: null });
  useEffect(() => {
    if (!files.length) {
      setRead({ columns: NONE, progress: null, error: null });
      return undefined;
    }
    const stopped = new AbortController();
    const all = async () => {
      const columns = [];
      for (const file of files) {
        const progress = (share) => setRead((former) => ({ ...former, progress: { name: file.name, share } }));
        columns.push({ name: visible(file.name), columns: await readRun(file, metrics, { progress, signal: stopped.signal }) });
      }
      setRead({ columns, progress: null, error: null });
    };
    all().catch((error) => {
      if (!stopped.signal.aborted) setRead((former) => ({ ...former, progress: null, error }));
    });
    return () => stopped.abort();
  }, [files, metrics]);
  const runs = useMemo(
    () => read.columns.map((run) => ({ name: run.name, series: Object.fromEntries(Object.entries(run.columns).map(([name, column]) => [name, bucketed(column, from, to, BUCKETS)])) })),
    [read.columns, from, to],
  );
  return { ...read, runs };
}

function Files({ files, others, onChange }) {
  const input = useRef(null);
  const add = () => {
    onChange([...files, ...input.current.files].slice(0, MOST_FILES));
    input.current.value = "";
  };
  return html`<${Card} title="Other runs" note="Compare with the metrics.jsonl of other runs. The files are read in this browser, and sent nowhere.">
    <p class="field">
      <label for="learning-files">Files (at most ${MOST_FILES})</label>
      <input id="learning-files" ref=${input} type="file" accept=".jsonl,application/jsonl,application/x-ndjson" multiple disabled=${files.length >= MOST_FILES} onChange=${add} />
    </p>
    ${others.error && html`<p class="refusal" role="alert">${visible(others.error.message)}</p>`}
    ${others.progress && html`<p class="muted" role="status">Reading ${visible(others.progress.name)}: ${percent(others.progress.share)}</p>`}
    ${files.length > 0 && html`<ul class="choices">
      ${files.map((file, i) => html`<li key=${i}><span class="run-key" data-run=${i + 1}></span>${visible(file.name)}, ${bytes(file.size)} <button class="small" onClick=${() => onChange(files.filter((each) => each !== file))}>Remove<span class="hidden"> ${visible(file.name)}</span></button></li>`)}
    </ul>`}
  <//>`;
}
