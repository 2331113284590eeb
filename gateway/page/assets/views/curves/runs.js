// Other runs beside this one: those that are kept in the trainer's folder, and files that are read in this browser.
import { html, useEffect, useMemo, useRef, useState } from "../../dom.js";
import { get, useGet } from "../../api.js";
import { bytes, number, percent } from "../../format.js";
import { Ago } from "../../parts.js";
import { visible } from "../visible.js";
import { bucketed, readRun } from "./run_files.js";

const MOST_RUNS = 3; // of files and kept runs together; a curve has four dashes
const MOST_LISTED = 20;
const MOST_READS = 100; // of one kept run: each reads on where the last one stopped
const NONE = [];

// The curves of the kept runs of these names: {names, listed, runs: [{name, series}], error}.
export function useKeptRuns(names, metrics, { from, to, buckets }) {
  const listed = useGet("/admin/learning/runs");
  const key = JSON.stringify([names.slice(0, MOST_RUNS), metrics, from, to]);
  const [read, setRead] = useState({ runs: NONE, error: null });
  useEffect(() => {
    if (!names.length) {
      setRead({ runs: NONE, error: null });
      return undefined;
    }
    const stopped = new AbortController();
    const one = async (name) => {
      const asked = new URLSearchParams({ metrics: metrics.join(","), buckets: String(buckets), run: name });
      if (from !== null) asked.set("from", from);
      if (to !== null) asked.set("to", to);
      let found = null;
      for (let i = 0; i < MOST_READS && !found?.complete; i += 1) found = await get(`/admin/learning?${asked}`, { signal: stopped.signal });
      return { name: visible(name), series: found.series };
    };
    Promise.all(names.slice(0, MOST_RUNS).map(one)).then(
      (runs) => setRead({ runs, error: null }),
      (error) => stopped.signal.aborted || setRead({ runs: NONE, error }),
    );
    return () => stopped.abort();
  }, [key]);
  return { ...read, names, listed };
}

// Reads the chosen files for the metrics that are shown: {runs: [{name, series}], progress, error}.
export function useFiles(files, metrics, { from, to, buckets }) {
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
    () => read.columns.map((run) => ({ name: run.name, series: Object.fromEntries(Object.entries(run.columns).map(([name, column]) => [name, bucketed(column, from, to, buckets)])) })),
    [read.columns, from, to, buckets],
  );
  return { ...read, runs };
}

export function Runs({ files, others, kept, onFiles, onKept }) {
  const shown = files.length + kept.names.length;
  return html`<details class="card" open=${shown > 0}>
    <summary>Other runs: ${shown ? `${number(shown)} shown` : "none shown"}</summary>
    <${Kept} kept=${kept} full=${shown >= MOST_RUNS} first=${1} onKept=${onKept} />
    <${Files} files=${files} others=${others} first=${1 + kept.runs.length} most=${MOST_RUNS - kept.names.length} onChange=${onFiles} />
  </details>`;
}

function Kept({ kept, full, first, onKept }) {
  const [all, setAll] = useState(false);
  const { names, listed } = kept;
  const rows = listed.data?.data ?? NONE;
  const toggle = (name) => onKept(names.includes(name) ? names.filter((each) => each !== name) : [...names, name]);
  const gone = names.filter((name) => listed.data && !rows.some((each) => each.name === name)).map((name) => ({ name, gone: true }));
  return html`
    <h3>Kept beside this run</h3>
    ${(kept.error ?? listed.error) && html`<p class="refusal" role="alert">${visible((kept.error ?? listed.error).message)}</p>`}
    ${rows.length + gone.length > 0
      ? html`<ul class="kept-runs">
          ${[...gone, ...(all ? rows : rows.slice(0, MOST_LISTED))].map((each) => html`<li key=${each.name}>
            <label><input type="checkbox" checked=${names.includes(each.name)} disabled=${full && !names.includes(each.name)} onChange=${() => toggle(each.name)} />
              ${names.includes(each.name) && html`<span class="run-key" data-run=${first + names.indexOf(each.name)}></span>`}
              <span>${visible(each.name)}</span></label>
            <span class="muted note">${each.gone ? "is not kept any more" : html`${bytes(each.size_bytes)}, <${Ago} at=${each.changed_at} />`}</span>
          </li>`)}
        </ul>`
      : html`<p class="muted note">The trainer finds no other metrics.jsonl in the folder of its own.</p>`}
    ${rows.length > MOST_LISTED && !all && html`<p><button class="small" onClick=${() => setAll(true)}>Show all ${number(rows.length)}</button></p>`}
  `;
}

function Files({ files, others, first, most, onChange }) {
  const input = useRef(null);
  const add = () => {
    onChange([...files, ...input.current.files].slice(0, most));
    input.current.value = "";
  };
  return html`
    <h3>From files</h3>
    <p class="muted note">The metrics.jsonl of other runs. They are read in this browser, and sent nowhere.</p>
    <p class="field">
      <label for="learning-files">Files (at most ${MOST_RUNS})</label>
      <input id="learning-files" ref=${input} type="file" accept=".jsonl,application/jsonl,application/x-ndjson" multiple disabled=${files.length >= most} onChange=${add} />
    </p>
    ${others.error && html`<p class="refusal" role="alert">${visible(others.error.message)}</p>`}
    ${others.progress && html`<p class="muted" role="status">Reading ${visible(others.progress.name)}: ${percent(others.progress.share)}</p>`}
    ${files.length > 0 && html`<ul class="choices">
      ${files.map((file, i) => html`<li key=${i}><span class="run-key" data-run=${first + i}></span>${visible(file.name)}, ${bytes(file.size)} <button class="small" onClick=${() => onChange(files.filter((each) => each !== file))}>Remove<span class="hidden"> ${visible(file.name)}</span></button></li>`)}
    </ul>`}
  `;
}
