// A canary: its gates with their numbers, and the canaries before.
import { html } from "../dom.js";
import { count, figure, percent, sentence } from "../format.js";
import { Ago, Badge, Card } from "../parts.js";
import * as act from "./policy_actions.js";

const GATES = {
  kl: { title: "KL divergence from the served version", unit: "nats a token" },
  reward: { title: "Drop of the mean reward", unit: "" },
  errors: { title: "More failed calls", unit: "of the calls" },
  length: { title: "Answers' length, compared", unit: "times as long, or as short" },
};
const GATE_TONES = { holds: "good", broken: "bad", undecided: "accent", missing: "" };
const CANARY_TONES = { opening: "accent", open: "accent", promoted: "good", rolled_back: "bad", superseded: "" };

export function Canary({ canary, done }) {
  const { version, baseline, state, groups, min_groups: needed } = canary;
  const tools = html`<${Badge} tone=${CANARY_TONES[state]}>${state}<//>
    <button class="small" onClick=${() => act.endCanary({ canary, done })}>Roll back…</button>`;
  const on = count(canary.servers.length, "server");
  const answers = `It answers ${percent(canary.share)} of the new ${canary.sticky}s on ${on}, against version ${baseline}.`;
  const ended = `${groups} of ${needed} groups have ended (${canary.baseline_groups} of version ${baseline}).`;
  return html`<${Card} title=${`Canary of version ${version}`} tools=${tools}
    note=${html`${answers} ${ended} Began <${Ago} at=${canary.started_at} />.`}>
    <ul class="gates">${canary.gates.map((gate) => html`<${Gate} key=${gate.gate} ...${gate} />`)}</ul>
  <//>`;
}

// The interval that has the true value 19 times of 20, the value in it, and the bound.
function Gate({ gate, state, value, low, high, bound: allowed, count: made }) {
  const bound = gate === "length" ? 1 + allowed : allowed; // a factor: 1 is no change
  const { title, unit } = GATES[gate] ?? { title: gate, unit: "" };
  const given = [0, bound, value, low, high].filter((each) => Number.isFinite(each));
  const from = Math.min(...given);
  const until = Math.max(...given, from + 1e-9);
  const x = (each) => 4 + (192 * (each - from)) / ((until - from) * 1.08);
  const interval = low !== null && high !== null ? ` (between ${figure(low)} and ${figure(high)})` : "";
  const measured = value === null ? "nothing measured yet" : `${figure(value)}${interval}`;
  const words = `${measured}; at most ${figure(bound)} ${unit}`.trim();
  return html`<li>
    <div class="gate-head"><h3>${title}</h3><${Badge} tone=${GATE_TONES[state]}>${state}<//></div>
    <svg class="gate" data-state=${state} viewBox="0 0 200 22" preserveAspectRatio="none" aria-hidden="true">
      <rect class="track" x="0" y="9" width="200" height="4" rx="2" />
      ${interval && html`<rect class="interval" x=${x(low)} y="6" width=${Math.max(1, x(high) - x(low))} height="10" rx="3" />`}
      ${value !== null && html`<rect class="value" x=${x(value) - 1} y="4" width="2" height="14" rx="1" />`}
      <rect class="bound" x=${x(bound) - 0.75} y="0" width="1.5" height="22" />
    </svg>
    <p class="muted">${words}, of ${count(made, "group")}</p>
  </li>`;
}

export function CanaryHistory({ canaries }) {
  return html`<${Card} title="Last canaries">
    ${canaries.length
      ? html`<ul class="events">
          ${canaries.slice(0, 6).map(
            (each) => html`<li key=${each.id}>
              <p><strong>Version ${each.version}</strong> <${Badge} tone=${CANARY_TONES[each.state]}>${each.state.replace("_", " ")}<//> <span class="muted"><${Ago} at=${each.ended_at} /></span></p>
              ${each.reason && html`<p class="muted">${sentence(each.reason)}</p>`}
            </li>`,
          )}
        </ul>`
      : html`<p class="muted">No canary has ended yet.</p>`}
  <//>`;
}
