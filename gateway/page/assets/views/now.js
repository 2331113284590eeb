// Now: what the deployment does at this moment, live.
import { html } from "../dom.js";
import { count, duration, figure, number, sentence } from "../format.js";
import { rate, useLive } from "../live.js";
import { Ago, Badge, Card, Icon, Loading, Meter, Sparkline, Stat, Table } from "../parts.js";
import { link } from "../router.js";
import { SERVER_TONES, serverState } from "./servers.js";

const MOST_GROUPS = 6;

export default function Now() {
  const { picture, trouble, history } = useLive();
  if (!picture) return trouble ? html`<p class="refusal" role="alert">${sentence(trouble)}</p>` : html`<${Loading} />`;
  const { status, pipeline } = picture;
  return html`
    ${trouble && html`<p class="refusal" role="alert">${sentence(trouble)} What follows is older.</p>`}
    <${Headline} trainer=${status.trainer} warnings=${status.warnings} />
    <${Figures} status=${status} history=${history} />
    <div class="columns">
      <${Sentences} pipeline=${pipeline} />
      <${Stages} pipeline=${pipeline} />
    </div>
    <${Fleet} servers=${status.rollout_servers} policy=${status.policy} />
    <div class="columns">
      <${Groups} pipeline=${pipeline} />
      <${Queue} queue=${status.queue} />
    </div>
  `;
}

const TRAINER_TONES = { training: "good", publishing: "good", waiting: "accent", paused: "warn" };

function Headline({ trainer, warnings }) {
  const waits = trainer.waiting_for ? `The trainer waits for ${trainer.waiting_for}` : "The trainer is at work";
  const words = trainer.last_seen ? waits : "No trainer has reported yet: nothing is trained before one does";
  return html`<section class="card headline" aria-label="What is waited for, and warnings">
    <div class="say" aria-live="polite">
      <${Badge} tone=${TRAINER_TONES[trainer.state]}>${trainer.state ?? "no trainer"}<//>
      <p class="lead">${sentence(words)}</p>
    </div>
    <ul class="warnings" aria-live="polite" aria-label="Warnings">
      ${warnings.length
        ? warnings.map((each) => html`<li key=${each} data-tone="warn"><${Icon} name="warning" /><span>${sentence(each)}</span></li>`)
        : html`<li data-tone="good"><${Icon} name="check" /><span>No warnings.</span></li>`}
    </ul>
  </section>`;
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
    <${Stat} label="Version served" value=${policy.serving ?? "–"} tone=${behind ? "warn" : ""}
      note=${`target ${policy.target ?? "–"}, trainer at ${trainer.version ?? "–"}`} />
    <${Stat} label="Staleness" value=${figure(metrics["staleness/total_mean"])} unit="versions"
      note=${`at most ${figure(metrics["staleness/total_max"])} in the last step`} />
    <${Stat} label="Sampled here" value=${figure(tokens)} unit="tokens/s" note=${`${figure(turns)} turns/s through this gateway`}>
      <${Sparkline} values=${speeds(history)} label="Tokens a second since this page opened" />
    <//>
    <${Stat} label="Trained" value=${figure(metrics.tokens_per_s)} unit="tokens/s" note=${`${number(metrics.rollouts)} rollouts in the last step`} />
    <${Stat} label="Trainer" value=${`step ${number(trainer.step)}`} note=${html`reported <${Ago} at=${trainer.last_seen} />`} />
  </dl>`;
}

// Tokens a second between pictures, evened over a few of them.
function speeds(history) {
  const over = 5;
  return history.slice(over).map((each, i) => {
    const before = history[i];
    return each.at > before.at ? (each.output_tokens - before.output_tokens) / (each.at - before.at) : NaN;
  });
}

function Sentences({ pipeline }) {
  return html`<${Card} title="What is waited for">
    <ul class="sentences">${pipeline.sentences.map((each) => html`<li key=${each.slice(0, 24)}>${sentence(each)}</li>`)}</ul>
  <//>`;
}

const STAGES = [
  ["open", "session:open", "Open: their agents go on"],
  ["waiting_reward", "session:waiting_reward", "Wait for a reward"],
  ["group_incomplete", "session:group_incomplete", "Wait for their group"],
  ["ready", "session:ready", "Ready to be trained"],
];

function Stages({ pipeline }) {
  const { verdicts } = pipeline;
  const before = STAGES.map(([code, name, title]) => ({ code, title, value: verdicts[name] ?? 0 }));
  const known = new Set(STAGES.map(([, name]) => name));
  const ended = Object.entries(verdicts)
    .filter(([name, value]) => name.startsWith("session:") && !known.has(name) && value > 0)
    .map(([name, value]) => ({ code: name.slice(8), title: name.slice(8).replaceAll("_", " "), value }))
    .sort((one, other) => other.value - one.value);
  return html`<${Card} title="Sessions">
    <${Bars} rows=${before} />
    <h3>With a verdict</h3>
    ${ended.length ? html`<${Bars} rows=${ended} />` : html`<p class="muted">None so far.</p>`}
  <//>`;
}

function Bars({ rows }) {
  const most = Math.max(1, ...rows.map((each) => each.value));
  return html`<ul class="bars">
    ${rows.map(
      ({ code, title, value }) => html`<li key=${code}>
        <span>${title}</span><${Meter} value=${value} most=${most} label=${number(value)} tone=${code === "trained" ? "good" : ""} />
      </li>`,
    )}
  </ul>`;
}

function Fleet({ servers, policy }) {
  const most = Math.max(1, ...servers.map((each) => each.in_flight));
  const columns = [
    { title: "Server", cell: (each) => html`<strong>${each.id}</strong>` },
    { title: "State", cell: (each) => html`<${Badge} tone=${SERVER_TONES[each.state]}>${serverState(each)}<//>` },
    {
      title: "Version",
      numeric: true,
      cell: (each) => html`<span class=${each.version < policy.target ? "behind" : ""}>${each.version ?? "–"}</span>`,
    },
    { title: "Calls", cell: (each) => html`<${Meter} value=${each.in_flight} most=${most} label=${number(each.in_flight)} />` },
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
              <span><strong>${each.group_id}</strong> <span class="muted">${each.waiting_for}${each.since ? `, since ${duration(now - each.since)}` : ""}</span></span>
            </li>`,
          )}
        </ul>`
      : html`<p class="muted">No group waits for members.</p>`}
  <//>`;
}

function Queue({ queue }) {
  const mib = (bytes) => `${number(bytes / 2 ** 20)} MiB`;
  const bounded = queue.max_bytes > 0;
  return html`<${Card} title="Redis">
    <dl class="facts">
      <div><dt>Memory</dt><dd>${bounded
        ? html`<${Meter} value=${queue.used_bytes} most=${queue.max_bytes} label=${`${mib(queue.used_bytes)} of ${mib(queue.max_bytes)}`} />`
        : `${mib(queue.used_bytes ?? 0)}, without a bound`}</dd></div>
      <div><dt>Records in the stream</dt><dd>${number(queue.stream_length)}</dd></div>
      <div><dt>Sessions kept</dt><dd>${number(queue.sessions)}</dd></div>
      <div><dt>Records that could not be read</dt><dd class=${queue.dead_letters ? "error-text" : ""}>${number(queue.dead_letters)}</dd></div>
    </dl>
  <//>`;
}
