// A conversation: the messages of one branch of a session's turns, some turns at a time. Long texts are folded.
import { html, useMemo, useState } from "../dom.js";
import { useGet } from "../api.js";
import { count, figure, number } from "../format.js";
import { Badge, Card, ErrorNote, Loading } from "../parts.js";
import { link } from "../router.js";
import { branchOf } from "./turn_rows.js";
import { visible, visibleLines } from "./visible.js";

const TURNS_AT_ONCE = 20;
const TOKENS_AT_ONCE = 100000; // of several turns; a single one may have more
const SHORT = { system: 280, tool: 700, prompt: 700 }; // characters that are shown before a text is opened
const SHORT_OTHERS = 1600;
const SHORT_LINES = 18;
const MOST_IMAGES = 12;
const SPEAKERS = { system: "System", user: "User", assistant: "Model", tool: "Tool", prompt: "Prompt" };

// `rows` are those of `rowsOf`; `row` is the one that is shown; `onRow(turnId)` chooses another by its first turn.
export function Conversation({ session, rows, row, me, onRow }) {
  const branch = useMemo(() => branchOf(rows, row), [rows, row]);
  const parts = useMemo(() => partsOf(branch), [branch]);
  const [shown, setShown] = useState(1);
  const last = Math.max(0, ...rows.map((each) => each.row));
  const tools = last > 0 && html`<${Rows} rows=${rows} row=${row} last=${last} onRow=${onRow} />`;
  return html`<${Card} title="Conversation" tools=${tools}>
    ${branch.length
      ? html`<ol class="conversation">${parts.slice(0, shown).map((part) => html`<${Part} key=${part[0].turn.turn_id} session=${session} part=${part} me=${me} />`)}</ol>`
      : html`<p class="muted">No call has been answered yet.</p>`}
    ${shown < parts.length && html`<p class="buttons"><button onClick=${() => setShown(shown + 1)}>Later messages</button></p>`}
  <//>`;
}

function Rows({ rows, row, last, onRow }) {
  const firsts = Array.from({ length: last + 1 }, (_, each) => rows.find((turn) => turn.row === each));
  return html`<label class="choice">Row
    <select aria-label="Row that is shown" onChange=${(event) => onRow(firsts[event.target.value].turn.turn_id)}>
      ${firsts.map((first, i) => html`<option value=${i} selected=${i === row}>${i + 1}, from turn ${first.at + 1}</option>`)}
    </select>
  </label>`;
}

function partsOf(branch) {
  const parts = [];
  let tokens = Infinity;
  for (const each of branch) {
    const own = each.turn.context_len + each.turn.output_len;
    tokens += own;
    if (tokens > TOKENS_AT_ONCE || parts.at(-1).length === TURNS_AT_ONCE) {
      parts.push([]);
      tokens = own;
    }
    parts.at(-1).push(each);
  }
  return parts;
}

function Part({ session, part, me }) {
  const asked = new URLSearchParams([["messages", "true"], ...part.map((each) => ["turn_id", each.turn.turn_id])]);
  const { data, error, reload } = useGet(`/sessions/${encodeURIComponent(session.session_id)}?${asked}`);
  if (error) return html`<li><${ErrorNote} error=${error} again=${reload} /></li>`;
  if (!data) return html`<li><${Loading} /></li>`;
  const read = new Map(data.turns.map((turn) => [turn.turn_id, turn]));
  return part.map(({ turn, at }) => html`<${Turn} key=${turn.turn_id} session=${session} turn=${read.get(turn.turn_id) ?? turn} at=${at} me=${me} />`);
}

function Turn({ session, turn, at, me }) {
  const messages = turn.messages ?? [];
  const answer = messages.length - 1;
  const versions = [...new Set(turn.versions.map((span) => span.version))];
  const about = [
    versions.length > 0 && `version ${versions.join(", ")}`,
    count(turn.output_len, "token"),
    turn.finish_reason !== "stop" && turn.finish_reason !== "tool_calls" && `ended by ${turn.finish_reason}`,
    turn.reward !== null && `reward ${figure(turn.reward)}`,
  ].filter(Boolean);
  return html`
    ${turn.messages_left_out > 0 && html`<li class="muted note">${count(turn.messages_left_out, "earlier message is", "earlier messages are")} not shown.</li>`}
    ${messages.map((message, i) => html`<li class="message" data-role=${message.role} key=${i}>
      <p class="speaker">
        <strong>${SPEAKERS[message.role]}</strong>
        ${i === answer && html`<span class="muted"><a href=${link("sessions", [session.session_id, turn.turn_id], { view: "tokens" })}>Turn ${number(at + 1)}</a>: ${visible(about.join(", "))}</span>`}
        ${i === answer && turn.side_call && html`<${Badge}>side call: ${visible(turn.side_call)}<//>`}
      </p>
      <${Said} message=${message} turn=${turn} me=${me} />
    </li>`)}
  `;
}

function Said({ message, turn, me }) {
  const { content, reasoning_content: thought, tool_calls: calls, images, left_out: cut } = message;
  const empty = !content && !thought && !calls.length && !images.length;
  return html`
    ${thought && html`<details class="thought"><summary>Thought, ${count(thought.split(/\s+/).length, "word")}</summary><${Text} text=${thought} most=${SHORT_OTHERS} /></details>`}
    ${content && html`<${Text} text=${content} most=${SHORT[message.role] ?? SHORT_OTHERS} />`}
    ${calls.map((call, i) => html`<div class="call" key=${i}><p>Calls <code>${visible(call.function.name)}</code></p><${Text} text=${argumentsOf(call)} most=${SHORT_OTHERS} code=${true} /></div>`)}
    ${images.slice(0, MOST_IMAGES).map((place) => html`<${Picture} key=${place} image=${turn.images[place]} me=${me} />`)}
    ${images.length > MOST_IMAGES && html`<p class="muted note">${count(images.length - MOST_IMAGES, "more image")}</p>`}
    ${cut > 0 && html`<p class="muted note">${count(cut, "character is", "characters are")} left out; the tokens have them all.</p>`}
    ${empty && html`<p class="muted">(nothing)</p>`}
  `;
}

// A text of which only the beginning is shown, if it is long.
function Text({ text, most, code = false }) {
  const [open, setOpen] = useState(false);
  const short = useMemo(() => beginning(text, most), [text, most]);
  const folded = short.length < text.length;
  return html`
    <p class=${code ? "text mono" : "text"}>${visibleLines(folded && !open ? short : text)}${folded && !open && "…"}</p>
    ${folded && html`<button class="small quiet" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>${open ? "Show less" : `Show all ${number(text.length)} characters`}</button>`}
  `;
}

function beginning(text, most) {
  const lines = text.split("\n", SHORT_LINES + 1).slice(0, SHORT_LINES).join("\n");
  const short = lines.slice(0, most);
  return text.length - short.length < most / 4 ? text : short; // so little more is not worth a button
}

function argumentsOf(call) {
  const given = call.function.arguments;
  try {
    return JSON.stringify(JSON.parse(given), null, 1);
  } catch {
    return given;
  }
}

// Only an admin's key reads images.
function Picture({ image, me }) {
  const size = `Image, ${number(image.width)} × ${number(image.height)}`;
  if (me.role !== "admin") return html`<p class="muted">${size}</p>`;
  return html`<img class="picture" src=${`/admin/images/${encodeURIComponent(image.sha256)}`} alt=${size} width=${image.width} height=${image.height} loading="lazy" />`;
}
