// Now: what the deployment does at this moment, live.
import { html } from "../dom.js";
import { count, duration, figure, number, sentence } from "../format.js";
import { rate, useLive } from "../live.js";
import { Ago, Badge, Card, Icon, Id, Loading, Meter, Sparkline, Stat, Table } from "../parts.js";
import { link } from "../router.js";
import * as act from "./policy_actions.js";
import { SERVER_TONES, serverState } from "./servers.js";
import { verdictWords } from "./verdicts.js";
import { visible } from "./visible.js";

const MOST_GROUPS = 6;

export default function Now() {
  const { picture, trouble, history } = useLive();
  if (!picture) return trouble ? html`<p class="refusal" role="alert">${sentence(trouble)}</p>` : html`<${Loading} />`;
  const { status, pipeline } = picture;
  return html`
    ${trouble && html`<p class="refusal" role="alert">${sentence(trouble)} What follows is older.</p>`}
    <${Headline} trainer=${status.trainer} policy=${status.policy} warnings=${status.warnings} />
    <${Figures} status=${status} history=${history} />
    <div class="columns">
      <${Stages} pipeline=${pipeline} />
      <${Groups} pipeline=${pipeline} />
    </div>
    <${Fleet} servers=${status.rollout_servers} policy=${status.policy} />
    <${Queue} queue=${status.queue} />
  `;
}

const TRAINER_TONES = { training: "good", publishing: "good", waiting: "accent", paused: "warn" };

const ELSEWHERE = /; (of the sessions read, |\d+ groups? waits? for |the oldest has waited )[^;]*/g; // in the cards below
const RESUME = /^POST \/resume(, since )?/; // how the trainer names what ends its pause

// What the trainer does, with the button for what it waits for; and the warnings that say something else.
function Headline({ trainer, policy, warnings }) {
  const paused = trainer.state === "paused";
  const others = warnings.filter((each) => !(paused && each.startsWith("the trainer is paused")) && !(!trainer.last_seen && each === "no trainer has reported yet"));
  const done = () => {}; // the next picture shows it
  return html`<section class="card headline" aria-label="What the trainer does, and warnings">
    <div class="say" aria-live="polite">
      <${Badge} tone=${TRAINER_TONES[trainer.state]}>${visible(trainer.state ?? "no trainer")}<//>
      <p class="lead">${visible(lead(trainer))}</p>
      ${paused && html`<button class="primary small" onClick=${() => act.trainer({ what: "resume", done })}>Resume…</button>`}
    </div>
    ${policy.hold && html`<div class="say">
      <${Badge} tone="warn">held<//>
      <p>${visible(sentence(`the fleet keeps version ${policy.serving ?? "–"}: ${policy.hold.reason}`))}</p>
      <button class="small" onClick=${() => act.release({ newest: trainer.version, serving: policy.serving, done })}>Release…</button>
    </div>`}
    <ul class="warnings" aria-live="polite" aria-label="Warnings">
      ${others.length
        ? others.map((each) => html`<li key=${each} data-tone="warn"><${Icon} name="warning" /><span>${visible(sentence(each))}</span></li>`)
        : html`<li data-tone="good"><${Icon} name="check" /><span>${paused || policy.hold ? "No other warnings." : "No warnings."}</span></li>`}
    </ul>
  </section>`;
}

function lead({ state, waiting_for: waits, last_seen: seen }) {
  if (!seen) return "No trainer has reported yet: nothing is trained before one does.";
  if (state !== "paused") return waits ? sentence(`the trainer waits for ${waits.replace(ELSEWHERE, "")}`) : "The trainer is at work.";
  const why = (waits ?? "").replace(RESUME, "");
  return why ? sentence(`the training is paused, since ${why}`) : "The training is paused.";
}

function Figures({ status, history }) {
  const { policy, trainer } = status;
  const metrics = trainer.metrics ?? {};
  const perStep = [...new Map(history.map((each) => [each.step, each.reward])).values()];
  const tokens = rate(history, "output_tokens");
  const turns = rate(history, "turns");
  const behind = policy.target !== null && policy.serving !== policy.target;
  return html`<dl class="stats">
    <${Stat} label="Reward" value=${figure(metrics.reward_mean)} note=${`mean of step ${trainer.step ?? "–"}`}>
      <${Sparkline} values=${perStep} label="Rewards of the steps since this page opened" />
    <//>
    <${Stat} label="Version served" value=${policy.serving ?? "–"} tone=${behind ? "warn" : ""} note=${servedNote(policy, trainer)} />
    <${Stat} label="Staleness" value=${figure(metrics["staleness/total_mean"])} unit="versions"
      note=${`age of what was trained, at most ${figure(metrics["staleness/total_max"])}`} />
    <${Stat} label="Sampled here" value=${figure(tokens)} unit="tokens/s" note=${`${figure(turns)} turns/s through this gateway`}>
      <${Sparkline} values=${speeds(history)} label="Tokens a second since this page opened" />
    <//>
    <${Stat} label="Trained" value=${figure(metrics.tokens_per_s)} unit="tokens/s" note=${`${count(metrics.rollouts ?? 0, "session")} in the last step`} />
    <${Stat} label="Trainer" value=${`step ${number(trainer.step)}`} note=${trainer.last_seen ? html`reported <${Ago} at=${trainer.last_seen} />` : "has not reported"} />
  </dl>`;
}

// How the served version compares with the one that every server is to serve, and with what the trainer has made.
function servedNote({ serving, target }, { version }) {
  if (target !== null && serving !== target) return `version ${target} is being loaded`;
  if (version !== null && version !== undefined && serving !== null && version > serving) return `the trainer has made version ${version}`;
  return serving === null ? "no server has proved one yet" : "the trainer's newest";
}

// Tokens a second between pictures, evened over a few of them.
function speeds(history) {
  const over = 5;
  return history.slice(over).map((each, i) => {
    const before = history[i];
    return each.at > before.at ? (each.output_tokens - before.output_tokens) / (each.at - before.at) : NaN;
  });
}

const STAGES = [
  ["open", "session:open", "Agents are at work"],
  ["waiting_reward", "session:waiting_reward", "Wait for a reward"],
  ["group_incomplete", "session:group_incomplete", "Wait for their group"],
  ["ready", "session:ready", "Ready to be trained"],
];

function Stages({ pipeline }) {
  const { verdicts, notes } = pipeline;
  const before = STAGES.map(([code, name, title]) => ({ code, title, value: verdicts[name] ?? 0 }));
  const known = new Set(STAGES.map(([, name]) => name));
  const ended = Object.entries(verdicts)
    .filter(([name, value]) => name.startsWith("session:") && !known.has(name) && value > 0)
    .map(([name, value]) => ({ code: name.slice(8), title: verdictWords(name.slice(8)), value }))
    .sort((one, other) => other.value - one.value);
  return html`<${Card} title="Sessions">
    <${Bars} rows=${before} />
    <h3>With a verdict</h3>
    ${ended.length ? html`<${Bars} rows=${ended} />` : html`<p class="muted">None so far.</p>`}
    ${notes.length > 0 && html`<ul class="sentences">${notes.map((each) => html`<li class="note muted" key=${each.slice(0, 24)}>${visible(sentence(each))}</li>`)}</ul>`}
  <//>`;
}

// Each as a share of all of them.
function Bars({ rows }) {
  const all = rows.reduce((sum, each) => sum + each.value, 0);
  return html`<ul class="bars">
    ${rows.map(
      ({ code, title, value }) => html`<li key=${code}>
        <span>${title}</span><${Meter} value=${value} most=${all} label=${number(value)} tone=${code === "trained" ? "good" : ""} />
      </li>`,
    )}
  </ul>`;
}

function Fleet({ servers, policy }) {
  const columns = [
    { title: "Server", cell: (each) => html`<strong>${each.id}</strong>` },
    { title: "State", cell: (each) => html`<${Badge} tone=${SERVER_TONES[each.state]}>${serverState(each)}<//>` },
    {
      title: "Version",
      numeric: true,
      cell: (each) => html`<span class=${each.version < policy.target ? "behind" : ""}>${each.version ?? "–"}</span>`,
    },
    { title: "Calls now", numeric: true, cell: (each) => number(each.in_flight) },
    { title: "Seen", cell: (each) => html`<${Ago} at=${each.last_seen} />` },
    { title: "Error", rare: true, wide: true, cell: (each) => each.error && html`<span class="error-text">${each.error}</span>` },
  ];
  const able = servers.filter((each) => each.state === "ready").length;
  return html`<${Card} title="Fleet" note=${`${able} of ${count(servers.length, "server")} can take calls.`}
    tools=${html`<a href=${link("policies")}>Versions and actions</a>`}>
    <${Table} columns=${columns} rows=${servers} rowKey=${(each) => each.id} caption="Rollout servers" empty="No rollout server has registered." />
  <//>`;
}

function Groups({ pipeline }) {
  const { groups, groups_waiting: waiting } = pipeline;
  const now = Date.now() / 1000;
  return html`<${Card} title="Groups that wait" note=${waiting > MOST_GROUPS ? `The ${MOST_GROUPS} of ${number(waiting)} that wait longest.` : null}>
    ${groups.length
      ? html`<ul class="groups">
          ${groups.slice(0, MOST_GROUPS).map(
            (each) => html`<li key=${each.group_id}>
              <${Meter} value=${each.ended} most=${each.size} label=${`${each.ended} of ${each.size}`} />
              <span><a href=${link("lineage", ["groups", each.group_id])}><${Id} text=${visible(each.group_id)} /></a> <span class="muted">${missing(each)}${each.since ? `, since ${duration(now - each.since)}` : ""}</span></span>
            </li>`,
          )}
        </ul>`
      : html`<p class="muted">No group waits for members.</p>`}
  <//>`;
}

// What the members do that a group waits for.
function missing({ open, waiting_reward: unrewarded, not_opened: unopened }) {
  const parts = [[open, "at work"], [unrewarded, unrewarded === 1 ? "waits for a reward" : "wait for a reward"], [unopened, "not opened"]];
  return parts.filter(([value]) => value > 0).map(([value, words]) => `${number(value)} ${words}`).join(", ");
}

function Queue({ queue }) {
  const mib = (bytes) => `${number(bytes / 2 ** 20)} MiB`;
  const bounded = queue.max_bytes > 0;
  return html`<${Card} title="Redis">
    <dl class="facts">
      <div><dt>Memory</dt><dd>${bounded
        ? html`<${Meter} value=${queue.used_bytes} most=${queue.max_bytes} label=${`${mib(queue.used_bytes)} of ${mib(queue.max_bytes)}`} />`
        : `${mib(queue.used_bytes ?? 0)}, without a bound`}</dd></div>
      <div><dt>Records that the trainer has not finished with</dt><dd>${number(queue.stream_length)}</dd></div>
      <div><dt>Sessions kept</dt><dd>${number(queue.sessions)}</dd></div>
    </dl>
  <//>`;
}
