// Lineage: a version, the steps that made it and the turns that taught it; from there to rewards and groups, and back.
import { html, useEffect, useState } from "../dom.js";
import { get, useGet } from "../api.js";
import { count, figure, number } from "../format.js";
import { Ago, Badge, Card, ErrorNote, Id, Loading, Stat, Table } from "../parts.js";
import { go, link } from "../router.js";
import { useHeading } from "../shell.js";
import { groupNote, Members, useGroup } from "./group.js";
import { visible } from "./visible.js";

const TURNS = 100;

export default function Lineage({ route, me }) {
  const [first, second] = route.path;
  if (first === "groups" && second) return html`<${GroupView} key=${second} id=${second} me=${me} />`;
  if (/^\d+$/.test(first ?? "")) return html`<${VersionView} key=${first} version=${Number(first)} />`;
  return html`<${Versions} /><${Jump} />`;
}

function Versions() {
  const { data, error, reload } = useGet("/admin/policies");
  if (error) return html`<${ErrorNote} error=${error} again=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const rows = [...data.data].sort((a, b) => b.version - a.version);
  const columns = [
    { title: "Version", cell: (each) => html`<a href=${link("lineage", [String(each.version)])}>Version ${each.version}</a>` },
    { title: "State", cell: (each) => html`<${Badge} tone=${each.state === "serving" ? "good" : ""}>${each.state}<//>` },
    { title: "Step", numeric: true, cell: (each) => number(each.step) },
    { title: "Published", cell: (each) => html`<${Ago} at=${each.created_at} />` },
  ];
  return html`<${Card} title="Versions" note="Choose a version to see what taught it.">
    <${Table} columns=${columns} rows=${rows} rowKey=${(each) => each.version} caption="Versions, the newest first" empty="No version has been published yet." />
  <//>`;
}

// From a session, a group or a version's number to its lineage.
function Jump() {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    const text = String(given.get("text")).trim();
    if (text) go(...{ version: ["lineage", [text]], group: ["lineage", ["groups", text]], session: ["sessions", [text]] }[given.get("kind")]);
  };
  return html`<${Card} title="Find the way from a reward" note="A group's rewards make the advantages of its sessions; a step with these advantages makes a version.">
    <form class="filters" onSubmit=${submit}>
      <p class="field"><label for="jump-kind">What you know</label>
        <select id="jump-kind" name="kind"><option value="group">a group</option><option value="session">a session</option><option value="version">a version</option></select></p>
      <p class="field"><label for="jump-text">Its id or number</label><input id="jump-text" name="text" maxlength="200" required autocomplete="off" /></p>
      <p class="buttons"><button type="submit" class="primary">Show</button></p>
    </form>
  <//>`;
}

function GroupView({ id, me }) {
  useHeading(`Group ${visible(id)}`);
  const group = useGroup(id, me);
  if (!group) return html`<${Loading} />`;
  if (!group.members.length) return html`<p class="refusal" role="alert">No session of a group with this name is known. <a href=${link("lineage")}>Lineage</a></p>`;
  const rewards = group.members.filter((each) => each.reward !== null);
  const most = Math.max(1e-9, ...rewards.map((each) => Math.abs(each.reward - (group.mean ?? 0))));
  const versions = [...new Set(group.members.map((each) => each.version).filter((each) => each !== null && each !== undefined))].sort((a, b) => a - b);
  return html`
    <dl class="stats">
      <${Stat} label="Mean reward" value=${figure(group.mean)} note=${group.task_id ? `task ${visible(group.task_id)}` : ""} />
      <${Stat} label="Standard deviation" value=${figure(group.std)} />
      <${Stat} label="Taught" value=${versions.length ? versions.map((each, i) => html`${i > 0 && ", "}<a href=${link("lineage", [String(each)])}>version ${each}</a>`) : "nothing yet"} />
    </dl>
    ${rewards.length > 1 && group.mean !== null && html`<${Card} title="From rewards to advantages" note="Each bar is a reward less the mean of the group; the trainer's advantage, once the group is trained, is beside it.">
      <ul class="advantages">
        ${rewards.map((each) => html`<li key=${each.session_id}>
          <a class="mono" href=${link("sessions", [each.session_id])}><${Id} text=${visible(each.session_id)} /></a>
          <${Bar} value=${(each.reward - group.mean) / most} />
          <span class="numeric">${figure(each.reward)} − ${figure(group.mean)} = ${figure(each.reward - group.mean)}${each.advantage === null ? "" : `, advantage ${figure(each.advantage)}`}</span>
        </li>`)}
      </ul>
    <//>`}
    <${Card} title="Members" note=${groupNote(group)}><${Members} group=${group} /><//>
  `;
}

function Bar({ value }) {
  const width = Math.max(0.5, Math.abs(value) * 50);
  return html`<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
    <line x1="50" x2="50" y1="0" y2="10" />
    <rect class=${value < 0 ? "less" : "more"} x=${value < 0 ? 50 - width : 50} y="1" width=${width} height="8" />
  </svg>`;
}

function VersionView({ version }) {
  useHeading(`Version ${version}`);
  const [pages, setPages] = useState({ data: [], steps: [], cursor: "", running: true, error: null });
  const read = async (from, signal) => {
    setPages({ ...from, running: true, error: null });
    try {
      const asked = new URLSearchParams({ limit: String(TURNS), ...(from.cursor ? { cursor: from.cursor } : {}) });
      const page = await get(`/admin/policies/${version}/lineage?${asked}`, { signal });
      setPages({ data: [...from.data, ...page.data], steps: page.steps, cursor: page.next_cursor, running: false, error: null });
    } catch (error) {
      if (error.name !== "AbortError") setPages({ ...from, running: false, error });
    }
  };
  useEffect(() => {
    const stopped = new AbortController();
    read({ data: [], steps: [], cursor: "" }, stopped.signal);
    return () => stopped.abort();
  }, [version]);
  const { data, steps, cursor, running, error } = pages;
  const groups = [...new Set(data.map((each) => each.group_id).filter(Boolean))];
  const columns = [
    { title: "Session", wide: true, cell: (each) => html`<a class="mono" href=${link("sessions", [each.session_id, each.turn_id], { colour: "advantage" })}><${Id} text=${visible(each.session_id)} /></a>` },
    { title: "Step", numeric: true, cell: (each) => number(each.step) },
    { title: "Reward", numeric: true, cell: (each) => figure(each.reward) },
    { title: "Advantage", numeric: true, cell: (each) => figure(each.advantage_mean) },
    { title: "Tokens", numeric: true, cell: (each) => number(each.tokens) },
    { title: "Group", rare: true, cell: (each) => each.group_id && html`<a href=${link("lineage", ["groups", each.group_id])}><${Id} text=${visible(each.group_id)} /></a>` },
  ];
  return html`
    ${error && html`<${ErrorNote} error=${error} again=${() => read(pages)} />`}
    <${Card} title="Steps" note="The steps that made this version of the one before." tools=${html`<a href=${link("sessions", [], { version: String(version) })}>Sessions that it sampled</a>`}>
      <${Table} columns=${STEP_COLUMNS} rows=${steps} rowKey=${(each) => each.step} caption="Steps"
        empty=${running ? "One moment…" : "No durable step is known that made this version: it may be the first, or its step is not in a checkpoint yet."} />
    <//>
    <${Card} title="What taught it" note=${`${count(data.length, "turn")} of ${count(groups.length, "group")} shown.`}>
      <${Table} columns=${columns} rows=${data} rowKey=${(each) => each.turn_id} caption="Turns that taught the version" empty=${running ? "One moment…" : "No turn is known."} />
      ${cursor && !running && html`<p class="buttons"><button onClick=${() => read(pages)}>More turns</button></p>`}
    <//>
  `;
}

const STEP_COLUMNS = [
  { title: "Step", cell: (each) => `Step ${number(each.step)}` },
  { title: "Made", cell: (each) => html`<a href=${link("lineage", [String(each.version)])}>version ${each.version}</a>` },
  { title: "Sessions", numeric: true, cell: (each) => number(each.sessions) },
  { title: "Turns", numeric: true, cell: (each) => number(each.turns) },
  { title: "Tokens", numeric: true, cell: (each) => number(each.tokens) },
];
