// A push: what each server does in it, and the pushes before.
import { html } from "../dom.js";
import { duration, percent, sentence } from "../format.js";
import { Ago, Badge, Card, Table } from "../parts.js";

const PUSH_TONES = { pushing: "accent", serving: "good", failed: "bad", superseded: "" };
const SERVER_STEPS = ["waiting", "preparing", "prepared", "loading", "proved"];
const BAD = { refused: "bad", failed: "bad", unavailable: "warn" };

export function Push({ push, results }) {
  const proved = results.filter((each) => each.ok).length;
  const columns = [
    { title: "Server", cell: (each) => html`<strong>${each.server}</strong>` },
    { title: "State", cell: (each) => html`<${Steps} state=${each.state} />` },
    { title: "Serves", numeric: true, cell: (each) => each.version_served ?? "–" },
    { title: "Paused", numeric: true, cell: (each) => duration(each.paused_s) },
    { title: "Took", numeric: true, cell: (each) => duration(each.total_s) },
    { title: "Error", rare: true, wide: true, cell: (each) => each.error && html`<span class="error-text">${each.error}</span>` },
  ];
  const words = push.state === "pushing" ? `${proved} of ${results.length} servers have proved it.` : html`Ended <${Ago} at=${push.ended_at} />.`;
  return html`<${Card} title=${`Push of version ${push.version}`} tools=${html`<${Badge} tone=${PUSH_TONES[push.state]}>${push.state}<//>`}
    note=${html`${words} At least ${percent(push.capacity)} of the live servers could take calls.`}>
    ${push.error && html`<p class="refusal">${sentence(push.error)}</p>`}
    <${Table} columns=${columns} rows=${results} rowKey=${(each) => each.server} caption="The push on each server"
      empty="No server took part." />
  <//>`;
}

function Steps({ state }) {
  const at = SERVER_STEPS.indexOf(state);
  if (at < 0) return html`<${Badge} tone=${BAD[state]}>${state}<//>`;
  const tone = state === "proved" ? "good" : "accent";
  return html`<span class="life">
    <svg viewBox="0 0 64 8" aria-hidden="true">
      ${SERVER_STEPS.map((_, i) => html`<rect x=${13 * i} y="1" width="11" height="6" rx="3" class=${i <= at ? "reached" : "ahead"} data-tone=${tone} />`)}
    </svg>
    <${Badge} tone=${tone}>${state}<//>
  </span>`;
}

export function PushHistory({ pushes }) {
  const columns = [
    { title: "Version", cell: (each) => html`<strong>${each.version}</strong>` },
    { title: "End", cell: (each) => html`<${Badge} tone=${PUSH_TONES[each.state]}>${each.state}<//>` },
    { title: "Took", numeric: true, cell: (each) => duration(each.ended_at - each.started_at) },
    { title: "When", cell: (each) => html`<${Ago} at=${each.ended_at} />` },
    { title: "Error", rare: true, wide: true, cell: (each) => each.error && html`<span class="error-text">${each.error}</span>` },
  ];
  return html`<${Card} title="Last pushes">
    <${Table} columns=${columns} rows=${pushes.slice(0, 6)} rowKey=${(each) => each.id} caption="The last pushes, the newest first" empty="No push has ended yet." />
  <//>`;
}
