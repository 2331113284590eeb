// Policies: the life of each version, and what an operator can do about it.
import { html, useCallback, useState } from "../dom.js";
import { useGet } from "../api.js";
import { bytes, count, figure, number, sentence } from "../format.js";
import { useLive } from "../live.js";
import { Ago, Badge, Card, ErrorNote, Loading, Table } from "../parts.js";
import * as act from "./policy_actions.js";
import { Canary, CanaryHistory } from "./canary.js";
import { Push, PushHistory } from "./push.js";
import { SERVER_TONES, serverState } from "./servers.js";

const SHOWN = 10;
const EVERY_S = 5;

export default function Policies() {
  const { picture, history } = useLive();
  const [acted, setActed] = useState(0);
  const done = useCallback(() => setActed((number) => number + 1), []);
  const plan = picture?.status.policy ?? null;
  const busy = plan?.push?.state === "pushing" || plan?.canary;
  // When to read again: after an action, when the plan changes, and every few seconds (a version that is registered
  // while the fleet is held changes no plan); with every picture while a push or a canary is under way.
  const at = history.at(-1)?.at ?? 0;
  const again = `${acted} ${JSON.stringify(plan)} ${busy ? at : Math.floor(at / EVERY_S)}`;
  const versions = useGet("/admin/policies", again);
  const pushes = useGet("/admin/policies/pushes", again);
  const canaries = useGet("/admin/policies/canaries", again);
  const pushed = plan?.push?.version;
  const registered = versions.data?.data.some((each) => each.version === pushed);
  const push = useGet(registered ? `/admin/policies/${pushed}` : null, again);
  const failed = versions.error ?? pushes.error ?? canaries.error;
  if (failed && !versions.data) return html`<${ErrorNote} error=${failed} again=${versions.reload} />`;
  if (!plan || !versions.data) return html`<${Loading} />`;
  const canary = canaries.data?.data.find((each) => each.state === "open" || each.state === "opening");
  const servers = picture.status.rollout_servers;
  const known = versions.data.data;
  const shared = { plan, canary, servers, done, newest: known.at(-1)?.version ?? null };
  return html`
    <div class="columns">
      <${Serving} ...${shared} />
      <${Trainer} trainer=${picture.status.trainer} done=${done} />
    </div>
    ${canary && html`<${Canary} canary=${canary} done=${done} />`}
    ${plan.push && html`<${Push} push=${plan.push} results=${push.data?.results ?? []} />`}
    <${Versions} versions=${known} reserved=${versions.data.reserved} ...${shared} />
    <${Servers} ...${shared} />
    <div class="columns">
      <${PushHistory} pushes=${pushes.data?.data ?? []} />
      <${CanaryHistory} canaries=${(canaries.data?.data ?? []).filter((each) => each !== canary)} />
    </div>
  `;
}

function Serving({ plan, newest, done }) {
  const { serving, target, hold } = plan;
  const tools = hold
    ? html`<button class="primary small" onClick=${() => act.release({ newest, serving, done })}>Release…</button>`
    : html`<button class="small" onClick=${() => act.hold({ serving, done })}>Hold…</button>`;
  return html`<${Card} title="Served" tools=${tools}>
    <dl class="facts big">
      <div><dt>Version that the fleet serves</dt><dd>${serving ?? "–"}</dd></div>
      <div><dt>Version that every server is to serve</dt><dd>${target ?? "–"}</dd></div>
      <div><dt>Versions that may answer calls</dt><dd>${plan.admissible?.join(", ") || "–"}</dd></div>
    </dl>
    ${hold
      ? html`<p class="held"><${Badge} tone="warn">held<//> <span>${sentence(hold.reason)} <span class="muted">since <${Ago} at=${hold.since} /></span></span></p>`
      : html`<p class="muted">New versions are pushed by themselves.</p>`}
  <//>`;
}

const TRAINER_TONES = { training: "good", publishing: "good", waiting: "accent", paused: "warn" };

function Trainer({ trainer, done }) {
  const { state, step, version, waiting_for: waits, last_seen: seen } = trainer;
  const button = (what, label) => html`<button class="small" disabled=${!seen} onClick=${() => act.trainer({ what, done })}>${label}</button>`;
  const tools = html`${state === "paused" ? button("resume", "Resume…") : button("pause", "Pause…")} ${button("checkpoint", "Checkpoint…")}`;
  return html`<${Card} title="Trainer" tools=${tools}>
    <dl class="facts big">
      <div><dt>State</dt><dd><${Badge} tone=${TRAINER_TONES[state]}>${state ?? "no trainer"}<//></dd></div>
      <div><dt>Step</dt><dd>${number(step)}</dd></div>
      <div><dt>Version that it has made</dt><dd>${version ?? "–"}</dd></div>
    </dl>
    <p class="muted">${waits ? sentence(`it waits for ${waits}`) : "It waits for nothing."} ${seen && html`Reported <${Ago} at=${seen} />.`}</p>
  <//>`;
}

const LIFE = ["reserved", "published", "pushing", "serving", "retired"];
const STATES = {
  reserved: { step: 0, tone: "", text: "reserved by the trainer" },
  published: { step: 1, tone: "accent", text: "published" },
  pushing: { step: 2, tone: "accent", text: "pushing" },
  canary: { step: 2, tone: "accent", text: "canary" },
  serving: { step: 3, tone: "good", text: "serving" },
  answers: { step: 3, tone: "", text: "replaced, may answer calls" },
  retired: { step: 4, tone: "", text: "retired" },
  failed: { step: 2, tone: "bad", text: "failed" },
};

// Where a version is in its life, by the plan and by its record.
function stateOf(record, { plan, canary }) {
  const { version } = record;
  if (canary?.version === version) return "canary";
  if (plan.push?.state === "pushing" && plan.push.version === version && plan.serving !== version) return "pushing";
  if (plan.serving === version) return "serving";
  if (record.state === "failed") return "failed";
  if (plan.admissible?.includes(version)) return "answers";
  return STATES[record.state] ? record.state : "published";
}

function Life({ name }) {
  const { step, tone, text } = STATES[name];
  return html`<span class="life">
    <svg viewBox="0 0 64 8" aria-hidden="true">
      ${LIFE.map((_, i) => html`<rect x=${13 * i} y="1" width="11" height="6" rx="3" class=${i <= step ? "reached" : "ahead"} data-tone=${tone} />`)}
    </svg>
    <${Badge} tone=${tone}>${text}<//>
  </span>`;
}

function Versions({ versions, reserved, plan, canary, servers, newest, done }) {
  const [all, setAll] = useState(false);
  const at = { plan, canary };
  const ahead = reserved !== null && reserved !== undefined && (newest === null || reserved > newest);
  const rows = [...versions].reverse();
  if (ahead) rows.unshift({ version: reserved, state: "reserved" });
  const shown = all ? rows : rows.slice(0, SHOWN);
  const columns = [
    { title: "Version", cell: (each) => html`<strong>${each.version}</strong>` },
    { title: "Life", cell: (each) => html`<${Life} name=${each.state === "reserved" ? "reserved" : stateOf(each, at)} />` },
    { title: "Step", numeric: true, cell: (each) => number(each.step) },
    { title: "Made", cell: (each) => html`<${Ago} at=${each.created_at} />` },
    { title: "Size", numeric: true, cell: (each) => bytes(each.size_bytes) },
    { title: "Files", wide: true, cell: (each) => html`<span class="place">${each.location ?? (each.state === "reserved" ? "" : "the engines' first weights")}</span>` },
    { title: "Actions", wide: true, cell: (each) => html`<${Actions} record=${each} ...${{ plan, canary, servers, done }} />` },
  ];
  return html`<${Card} title="Versions" note=${count(rows.length, "version")}>
    <${Table} columns=${columns} rows=${shown} rowKey=${(each) => each.version} caption="Versions, the newest first" empty="No version is registered." />
    ${rows.length > shown.length && html`<button class="plain" onClick=${() => setAll(true)}>Show all ${number(rows.length)}</button>`}
  <//>`;
}

function Actions({ record, plan, canary, servers, done }) {
  const { version, state } = record;
  if (state === "reserved") return null;
  const { serving } = plan;
  const live = servers.filter((each) => each.state === "ready" || each.state === "loading").length;
  const pinned = plan.pins?.some((each) => each.version === version);
  const named = (label) => `${label} version ${version}`;
  const button = (label, run) => html`<button class="small" aria-label=${named(label)} onClick=${run}>${label}…</button>`;
  const older = serving !== null && version < serving;
  return html`<span class="actions">
    ${version !== serving && !older && button("Promote", () => act.promote({ version, held: plan.hold, canary, servers: live, done }))}
    ${older && button("Roll back to", () => act.rollBack({ version, serving, done }))}
    ${!older && version !== serving && !canary && live > 1 && button("Canary of", () => act.beginCanary({ version, serving, done }))}
    ${pinned ? button("Unpin", () => act.unpin({ version, done })) : live > 1 && button("Pin", () => act.pin({ version, live, done }))}
  </span>`;
}

function Servers({ plan, servers, canary, done }) {
  const able = (each) => each.state === "ready";
  const pinned = new Map((plan.pins ?? []).map((each) => [each.server, each.version]));
  const columns = [
    { title: "Server", cell: (each) => html`<strong>${each.id}</strong>` },
    {
      title: "State",
      cell: (each) => html`<span class="badges"><${Badge} tone=${SERVER_TONES[each.state]}>${serverState(each)}<//>
        ${pinned.has(each.id) && html`<${Badge} tone="accent">pinned to ${pinned.get(each.id)}<//>`}
        ${canary?.servers.includes(each.id) && html`<${Badge} tone="accent">canary<//>`}</span>`,
    },
    { title: "Version", numeric: true, cell: (each) => each.version ?? "–" },
    { title: "Calls", numeric: true, cell: (each) => figure(each.in_flight) },
    { title: "Error", rare: true, wide: true, cell: (each) => each.error && html`<span class="error-text">${each.error}</span>` },
    {
      title: "Actions",
      wide: true,
      cell: (each) => {
        const { id } = each;
        const others = servers.filter((other) => other !== each && able(other)).length;
        return each.state === "draining"
          ? html`<button class="small" aria-label=${`Resume ${id}`} onClick=${() => act.resume({ id, done })}>Resume…</button>`
          : html`<button class="small" aria-label=${`Drain ${id}`} onClick=${() => act.drain({ id, inFlight: each.in_flight, others, done })}>Drain…</button>`;
      },
    },
  ];
  return html`<${Card} title="Servers">
    <${Table} columns=${columns} rows=${servers} rowKey=${(each) => each.id} caption="Rollout servers" empty="No rollout server has registered." />
  <//>`;
}
