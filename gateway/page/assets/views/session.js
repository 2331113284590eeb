// One session: its facts, its conversation, its group, the tree of its turns, and the tokens of a turn, beside those of
// another session.
import { html, useEffect, useMemo, useRef } from "../dom.js";
import { useGet } from "../api.js";
import { figure, moment, number } from "../format.js";
import { Ago, Badge, Card, ErrorNote, Loading, Stat, Table } from "../parts.js";
import { go, link } from "../router.js";
import { useHeading } from "../shell.js";
import { Conversation } from "./conversation.js";
import { Group } from "./group.js";
import { SCALES } from "./scales.js";
import { outputStart, Tokens } from "./tokens.js";
import { mainRow, rowsOf } from "./turn_rows.js";
import { splitReason, verdictTone, verdictWords } from "./verdicts.js";
import { visible, visibleJson } from "./visible.js";

const TURNS_AT_ONCE = 200;

export default function Session({ route, me }) {
  const [id, turnId] = route.path;
  const { query } = route;
  useHeading(`Session ${visible(id)}`);
  const { data, error, reload } = useGet(`/sessions/${encodeURIComponent(id)}`);
  const rows = useMemo(() => rowsOf(data?.turns ?? []), [data]);
  const tokens = useRef(null);
  const looked = query.view === "tokens" && data !== null ? `${turnId} ${query.with}` : "";
  useEffect(() => {
    if (!looked) return undefined;
    const frame = requestAnimationFrame(() => tokens.current?.scrollIntoView()); // the shell has scrolled up by then
    return () => cancelAnimationFrame(frame);
  }, [looked]);
  if (error) return html`<${ErrorNote} error=${error} again=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const named = rows.find((each) => each.turn.turn_id === turnId);
  const row = named?.row ?? mainRow(rows);
  const first = rows.find((each) => each.row === row && each.turn.output_len) ?? rows[0];
  const turn = (named ?? first)?.turn;
  const move = (change) => go("sessions", [id, turn.turn_id], { ...query, view: "", ...change });
  return html`
    ${turnId && !named && html`<p class="refusal" role="alert">This session has no turn ${visible(turnId)}. Its first one is shown.</p>`}
    <${Facts} session=${data} used=${new Set(rows.map((each) => each.row)).size} />
    <${Conversation} key=${row} session=${data} rows=${rows} row=${row} me=${me} onRow=${(other) => go("sessions", [id, other], { ...query, view: "", start: "" })} />
    ${turn && html`<div ref=${tokens}><${Card} title="Tokens" tools=${html`<${Colours} value=${query.colour ?? "logprob"} onChange=${(colour) => move({ colour })} />`}>
      <div class=${query.with ? "beside" : ""}>
        <${Side} session=${data} turn=${turn} query=${query} onStart=${(start) => move({ start })} />
        ${query.with && html`<${Other} id=${query.with} query=${query} move=${move} />`}
      </div>
    <//></div>`}
    <${Tree} session=${data} rows=${rows} chosen=${turn?.turn_id} query=${query} />
    ${data.group_id && html`<${Group} session=${data} me=${me} compared=${query.with} onCompare=${(other) => move({ with: other, view: other && "tokens" })} />`}
  `;
}

function Facts({ session, used }) {
  const { verdict } = session;
  const taught = verdict.code === "trained";
  return html`
    <section class="card" aria-label="Verdict">
      <p class="lead"><${Badge} tone=${verdictTone(verdict.code)}>${verdictWords(verdict.code)}<//> <span>${visible(session.why ?? verdict.detail)}</span></p>
      ${taught && html`<p><a href=${link("lineage", [String(verdict.version)])}>Version ${verdict.version}, which learned from it in step ${number(verdict.step)}</a></p>`}
    </section>
    <dl class="stats">
      <${Stat} label="Reward" value=${figure(session.reward)} note=${rewardNote(session)} />
      <${Stat} label="Turns" value=${number(session.turns.length)} note=${used > 1 ? `in ${number(used)} rows` : ""} />
      <${Stat} label="Task" value=${visible(session.task_id ?? "–")} note=${session.user ? `user ${visible(session.user)}` : ""} />
      <${Stat} label="Opened" value=${html`<${Ago} at=${session.created_at} />`} note=${session.state === "finished" ? "finished" : `${session.state.replace("_", " for a ")}; expires ${moment(session.expires_at)}`} />
    </dl>
    ${Object.keys(session.metadata).length > 0 && html`<details class="card"><summary>Metadata</summary><pre>${visibleJson(session.metadata)}</pre></details>`}
  `;
}

function rewardNote({ rewards }) {
  if (!rewards.length) return "none yet";
  const each = rewards.slice(0, 4).map((reward) => `${figure(reward.value)} ${visible(reward.source ?? reward.key)}${reward.late ? ", late" : ""}`);
  return rewards.length > 4 ? `${each.join(" + ")} + ${rewards.length - 4} more` : each.join(" + ");
}

// Each turn with the row that it belongs to: a turn that does not extend its parent begins another one.
function Tree({ session, rows, chosen, query }) {
  const first = Math.max(0, Number(query.turns) || 0);
  const columns = [
    { title: "Turn", cell: (each) => html`<a href=${link("sessions", [session.session_id, each.turn.turn_id], { ...query, start: "" })} aria-current=${each.turn.turn_id === chosen ? "true" : undefined}>${number(each.at + 1)}</a>` },
    { title: "Follows", wide: true, cell: (each) => html`<${Follows} each=${each} />` },
    { title: "Context", numeric: true, cell: (each) => number(each.turn.context_len) },
    { title: "Sampled", numeric: true, cell: (each) => number(each.turn.output_len) },
    { title: "Ended by", cell: (each) => each.turn.finish_reason },
    { title: "Versions", numeric: true, cell: (each) => [...new Set(each.turn.versions.map((span) => span.version))].join(", ") },
    { title: "Reward", numeric: true, rare: true, cell: (each) => (each.turn.reward === null ? "" : figure(each.turn.reward)) },
    { title: "Verdict", cell: (each) => html`<${Badge} tone=${verdictTone(each.turn.verdict.code)}>${verdictWords(each.turn.verdict.code)}<//>` },
    { title: "Why not trained", wide: true, rare: true, cell: (each) => (each.turn.why && each.turn.why !== session.why ? visible(each.turn.why) : "") },
  ];
  const { drift } = session;
  const forks = Object.entries(drift.forks).map(([reason, times]) => [times, `fork${times === 1 ? "s" : ""} (${reason.replaceAll("_", " ")})`]);
  const ways = [[drift.extends, drift.extends === 1 ? "extends the one before" : "extend the one before"], [drift.rerendered, drift.rerendered === 1 ? "was rerendered" : "were rerendered"], ...forks];
  const said = ways.filter(([times]) => times > 0).map(([times, words]) => `${number(times)} ${words}`);
  const note = said.length ? `Of the turns, ${said.join(", ")}.` : null;
  const more = rows.length > TURNS_AT_ONCE;
  return html`<${Card} title="Turns" note=${note && visible(note)}>
    <${Table} columns=${columns} rows=${rows.slice(first, first + TURNS_AT_ONCE)} rowKey=${(each) => each.turn.turn_id} caption="Turns of the session" empty="No call has been answered yet." />
    ${more && html`<p class="buttons">
      <button disabled=${first === 0} onClick=${() => go("sessions", [session.session_id, chosen], { ...query, turns: Math.max(0, first - TURNS_AT_ONCE) })}>Earlier turns</button>
      <button disabled=${first + TURNS_AT_ONCE >= rows.length} onClick=${() => go("sessions", [session.session_id, chosen], { ...query, turns: first + TURNS_AT_ONCE })}>Later turns</button>
    </p>`}
  <//>`;
}

function Follows({ each }) {
  const { turn, row, parent } = each;
  const split = splitReason(turn);
  return html`<span class="follows">
    <span class=${`lane lane-${Math.min(row, 5)}`} aria-hidden="true"></span>
    Row ${row + 1} <${Badge} tone=${split ? "warn" : ""}>${turn.relation}<//>
    ${parent !== null && turn.relation !== "extends" && html` after turn ${parent + 1}`}
    ${split && html`<span class="muted">${visible(split)}</span>`}
    ${turn.side_call && html`<span class="muted">side call: ${visible(turn.side_call)}</span>`}
    ${turn.lineage && html`<span class="muted">thread ${visible(turn.lineage)}</span>`}
  </span>`;
}

function Colours({ value, onChange }) {
  return html`<label class="choice">Colour by
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${SCALES.map((each) => html`<option value=${each.id} selected=${each.id === value}>${each.title}</option>`)}
    </select>
  </label>`;
}

function Side({ session, turn, query, onStart, title }) {
  const asked = query.start === undefined || query.start === "" ? outputStart(turn) : Number(query.start) || 0;
  const last = turn.context_len + turn.output_len - 1;
  return html`<div>
    ${title}
    <${Tokens} sessionId=${session.session_id} turn=${turn} colour=${query.colour ?? "logprob"} start=${Math.max(0, Math.min(asked, last))} onStart=${onStart}
      label=${`turn ${session.turns.indexOf(turn) + 1} of session ${visible(session.session_id)}`} />
  </div>`;
}

// The other member of the group, with a turn of its own.
function Other({ id, query, move }) {
  const { data, error, reload } = useGet(`/sessions/${encodeURIComponent(id)}`);
  if (error) return html`<${ErrorNote} error=${error} again=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const turn = data.turns.find((each) => each.turn_id === query.with_turn) ?? data.turns.find((each) => each.output_len) ?? data.turns[0];
  const title = html`<p class="other-head">
    <a href=${link("sessions", [id])}>${visible(id)}</a> <${Badge} tone=${verdictTone(data.verdict.code)}>${verdictWords(data.verdict.code)}<//> reward ${figure(data.reward)}
    <label class="choice">Turn
      <select onChange=${(event) => move({ with_turn: event.target.value, with_start: "" })}>
        ${data.turns.map((each, i) => html`<option value=${each.turn_id} selected=${each === turn}>${i + 1}</option>`)}
      </select>
    </label>
    <button class="small" onClick=${() => move({ with: "", with_turn: "", with_start: "" })}>Close</button>
  </p>`;
  if (!turn) return html`<div>${title}<p class="muted">No call of this session has been answered.</p></div>`;
  return html`<${Side} session=${data} turn=${turn} query=${{ ...query, start: query.with_start }} onStart=${(start) => move({ with_start: start })} title=${title} />`;
}
