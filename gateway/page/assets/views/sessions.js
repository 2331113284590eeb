// Sessions: search, and, with an id in the path, one session with its turns and tokens.
import { html, useEffect, useRef, useState } from "../dom.js";
import { get } from "../api.js";
import { count, figure, moment, number } from "../format.js";
import { Ago, Badge, Card, ErrorNote, Id, Table } from "../parts.js";
import { go, link } from "../router.js";
import { Gist } from "./gist.js";
import Session from "./session.js";
import { VERDICTS, verdictTone, verdictWords } from "./verdicts.js";
import { visible } from "./visible.js";

const ROWS = 100;
const MOST_REQUESTS = 40; // for one click; each looks at some thousand sessions
const FIELDS = [
  { name: "id", label: "Id contains" },
  { name: "task_id", label: "Task" },
  { name: "group_id", label: "Group" },
  { name: "user", label: "User" },
  { name: "verdict", label: "Verdict", options: VERDICTS },
  { name: "min_reward", label: "Reward from", type: "number" },
  { name: "max_reward", label: "Reward to", type: "number" },
  { name: "version", label: "Sampled by version", type: "number" },
  { name: "trained_version", label: "Trained into version", type: "number" },
];

export default function Sessions({ route, me }) {
  if (route.path.length) return html`<${Session} key=${route.path[0]} route=${route} me=${me} />`;
  return html`<${Filters} key=${JSON.stringify(route.query)} query=${route.query} /><${Found} query=${route.query} />`;
}

// Folded on a phone, unless something is searched.
function Filters({ query }) {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    go("sessions", [], Object.fromEntries(FIELDS.map(({ name }) => [name, String(given.get(name) ?? "").trim()])));
  };
  const used = Object.keys(known(query)).length;
  return html`<details class="card" open=${used > 0 || matchMedia("(min-width: 1001px)").matches}>
    <summary>Search${used ? `: ${count(used, "filter")}` : ""}</summary>
    <form class="filters" onSubmit=${submit} role="search" aria-label="Sessions">
      ${FIELDS.map((each) => html`<${Filter} key=${each.name} ...${each} value=${query[each.name] ?? ""} />`)}
      <p class="buttons">
        ${used > 0 && html`<a class="plain" href=${link("sessions")}>All sessions</a>`}
        <button type="submit" class="primary">Search</button>
      </p>
    </form>
  </details>`;
}

function Filter({ name, label, type = "text", options, value }) {
  const id = `filter-${name}`;
  return html`<p class="field">
    <label for=${id}>${label}</label>
    ${options
      ? html`<select id=${id} name=${name}>
          <option value="">any</option>
          ${options.map((each) => html`<option value=${each} selected=${each === value}>${verdictWords(each)}</option>`)}
        </select>`
      : html`<input id=${id} name=${name} type=${type} step=${type === "number" ? "any" : undefined} defaultValue=${value} maxlength="200" autocomplete="off" />`}
  </p>`;
}

// Reads pages until some rows are found. A page may be empty although more sessions follow.
function Found({ query }) {
  const [state, setState] = useState({ rows: [], cursor: "0", looked: 0, until: null, running: true, error: null });
  const stop = useRef(null);
  const search = async (from) => {
    stop.current?.abort();
    const stopped = new AbortController();
    stop.current = stopped;
    let { rows, cursor, looked, until } = from;
    const enough = rows.length + ROWS;
    try {
      for (let i = 0; i < MOST_REQUESTS && cursor !== null && rows.length < enough; i += 1) {
        const asked = new URLSearchParams({ ...known(query), order: "newest", limit: String(ROWS), cursor });
        const page = await get(`/sessions?${asked}`, { signal: stopped.signal });
        rows = [...rows, ...page.data];
        cursor = page.next_cursor;
        looked += page.looked_at;
        until = page.looked_until ?? until;
        setState({ rows, cursor, looked, until, running: true, error: null });
      }
      setState({ rows, cursor, looked, until, running: false, error: null });
    } catch (error) {
      if (error.name !== "AbortError") setState({ rows, cursor, looked, until, running: false, error });
    }
  };
  useEffect(() => {
    search({ rows: [], cursor: "0", looked: 0, until: null });
    return () => stop.current?.abort();
  }, [JSON.stringify(query)]);
  const { rows, cursor, looked, until, running, error } = state;
  return html`<${Card} title="Sessions" note=${says(state)}>
    ${error && html`<${ErrorNote} error=${error} again=${() => search(state)} />`}
    <${Table} columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.session_id} still=${true} caption="Sessions, the newest first"
      empty=${running ? "Searching…" : "No session matches."} />
    ${cursor !== null && !running && html`<p class="buttons"><button onClick=${() => search(state)}>${rows.length ? "More sessions" : "Look further"}</button></p>`}
  <//>`;
}

function says({ rows, cursor, looked, until, running }) {
  const found = `${count(rows.length, "session")} found, the newest first.`;
  const far = `Looked at ${number(looked)}${until ? `, back to ${moment(until)}` : ""}${cursor === null && !running ? ": all there are." : running ? "…" : "."}`;
  return `${found} ${far}`;
}

function known(query) {
  const names = new Set(FIELDS.map((each) => each.name));
  return Object.fromEntries(Object.entries(query).filter(([name, value]) => names.has(name) && value !== ""));
}

const COLUMNS = [
  { title: "Session", wide: true, cell: (row) => html`<${Gist} row=${row} />` },
  { title: "Verdict", size: "m", cell: (row) => html`<${Badge} tone=${verdictTone(row.verdict.code)}>${verdictWords(row.verdict.code)}<//>` },
  { title: "Reward", numeric: true, size: "s", cell: (row) => figure(row.reward) },
  { title: "Task", size: "l", cell: (row) => row.task_id && html`<a href=${link("sessions", [], { task_id: row.task_id })}><${Id} text=${visible(row.task_id)} /></a>` },
  { title: "Group", rare: true, spare: true, size: "l", cell: (row) => row.group_id && html`<a href=${link("sessions", [], { group_id: row.group_id })}><${Id} text=${visible(row.group_id)} /></a>` },
  { title: "User", rare: true, spare: true, size: "s", cell: (row) => row.user && html`<${Id} text=${visible(row.user)} />` },
  { title: "Length", size: "m", cell: (row) => row.turn_count > 0 && html`<span class="muted">${count(row.turn_count, "turn")}, ${count(row.output_len, "token")}</span>` },
  { title: "Version", numeric: true, rare: true, spare: true, size: "s", cell: (row) => versions(row.versions) },
  { title: "Opened", size: "m", cell: (row) => html`<${Ago} at=${row.created_at} />` },
];

function versions(range) {
  if (!range) return "";
  return range.first === range.last ? String(range.first) : `${range.first}–${range.last}`;
}
