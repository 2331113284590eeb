// What an operator can do about versions, servers and the trainer: each action asks first, in a sentence.
import { post, remove } from "../api.js";
import { ask } from "../dialogs.js";
import { count } from "../format.js";

const path = (version) => `/admin/policies/${encodeURIComponent(version)}`;
const server = (id) => `/admin/rollout_servers/${encodeURIComponent(id)}`;

// What the answer to a push says.
function pushed({ version, state }) {
  if (state === "held") return `Version ${version} is registered; the fleet is held.`;
  if (state === "canary") return `Version ${version} waits for its canary.`;
  return state === "serving" ? `Version ${version} is served.` : `The push of version ${version} has begun.`;
}

export function promote({ version, held, canary, servers, done }) {
  const ends = [held && "the hold", canary && `the canary of version ${canary.version}`].filter(Boolean);
  ask({
    title: `Promote version ${version}?`,
    sentence: `${count(servers, "server loads", "servers load")} version ${version}, a few at a time, while the others
      answer calls.${ends.length ? ` This ends ${ends.join(" and ")}.` : ""}`,
    action: `Promote ${version}`,
    run: async () => pushed(await post(`${path(version)}/promote?wait=false`).finally(done)),
  });
}

export function rollBack({ version, serving, done }) {
  ask({
    title: `Roll back to version ${version}?`,
    sentence: `Every server loads version ${version} again, in place of version ${serving}. Versions above it answer
      calls until the push ends, and none after it.`,
    action: `Roll back to ${version}`,
    danger: true,
    fields: [
      {
        name: "hold",
        type: "checkbox",
        value: true,
        label: "Hold the fleet",
        help: "Otherwise the trainer's next version is pushed, and undoes this.",
      },
    ],
    run: async ({ hold }) => pushed(await post("/admin/policies/rollback?wait=false", { to: version, hold }).finally(done)),
  });
}

export function hold({ serving, done }) {
  ask({
    title: "Hold the fleet?",
    sentence: `The fleet keeps version ${serving ?? "–"}. New versions are registered, and not pushed, until you release
      it. A push that is under way goes on.`,
    action: "Hold",
    fields: [{ name: "reason", label: "Reason", value: "held by an operator", required: true }],
    run: async ({ reason }) => {
      await post("/admin/policies/hold", { reason }).finally(done);
      return "The fleet is held.";
    },
  });
}

export function release({ newest, serving, done }) {
  ask({
    title: "Release the fleet?",
    sentence:
      newest > serving
        ? `The hold ends, and the newest version that no canary has rolled back is pushed: ${newest} at most.`
        : `The hold ends. The fleet serves the newest version already; later ones are pushed by themselves.`,
    action: "Release",
    run: async () => {
      await post("/admin/policies/release?wait=false").finally(done);
      return "The hold has ended.";
    },
  });
}

export function beginCanary({ version, serving, done }) {
  ask({
    title: `Begin a canary of version ${version}?`,
    sentence: `Some servers load version ${version}, and answer a share of the new groups. Its gates then promote it,
      or roll it back to version ${serving}.`,
    action: "Begin the canary",
    fields: [
      { name: "share", label: "Share of the new groups", type: "number", value: 0.1, min: 0.01, step: 0.01, required: true },
      {
        name: "sticky",
        label: "Never divided",
        type: "select",
        value: "group",
        options: [{ value: "group", label: "a group" }, { value: "session", label: "a session" }],
      },
    ],
    run: async ({ share, sticky }) => {
      await post(`${path(version)}/canary`, { share, sticky }).finally(done);
      return `The canary of version ${version} opens once its servers have loaded it.`;
    },
  });
}

export function endCanary({ canary, done }) {
  ask({
    title: `Roll the canary of version ${canary.version} back?`,
    sentence: `Its ${count(canary.servers.length, "server loads", "servers load")} version ${canary.baseline} again, and
      version ${canary.version} counts as failed. The fleet is held${canary.automatic ? " unless every version begins as a canary" : ""}.`,
    action: "Roll it back",
    danger: true,
    run: async () => {
      await remove(`${path(canary.version)}/canary`).finally(done);
      return `The canary of version ${canary.version} is rolled back.`;
    },
  });
}

export function pin({ version, live, done }) {
  ask({
    title: `Pin version ${version}?`,
    sentence: `Some of the ${count(live, "live server")} keep version ${version} for calls that name it. They take no
      part in pushes, and get no other calls.`,
    action: "Pin",
    fields: [{ name: "servers", label: "How many servers", type: "number", value: 1, min: 1, step: 1, required: true }],
    run: async ({ servers }) => {
      await post(`${path(version)}/pin`, { servers }).finally(done);
      return `Version ${version} is pinned.`;
    },
  });
}

export function unpin({ version, done }) {
  ask({
    title: `Unpin version ${version}?`,
    sentence: `Its servers follow the fleet again: they load the served version, and take all calls.`,
    action: "Unpin",
    run: async () => {
      await remove(`${path(version)}/pin`).finally(done);
      return `Version ${version} is not pinned any more.`;
    },
  });
}

export function drain({ id, inFlight, others, done }) {
  ask({
    title: `Drain ${id}?`,
    sentence: `${id} gets no new calls, and no pushes. ${
      inFlight ? `The ${count(inFlight, "answer")} that it samples now ${inFlight === 1 ? "goes" : "go"} on. ` : ""
    }${others ? `${count(others, "other server takes", "other servers take")} the calls.` : "No other server can take calls: they will wait, and then fail with a 503."}`,
    action: "Drain",
    danger: true,
    run: async () => {
      await post(`${server(id)}/drain`).finally(done);
      return `${id} gets no new calls.`;
    },
  });
}

export function resume({ id, done }) {
  ask({
    title: `Resume ${id}?`,
    sentence: `${id} takes calls again, as soon as it serves a version that may answer them.`,
    action: "Resume",
    run: async () => {
      await post(`${server(id)}/resume`).finally(done);
      return `${id} takes calls again.`;
    },
  });
}

const TRAINER = {
  pause: ["Pause the training?", "The training pauses before its next step. Agents go on, and their sessions wait in Redis.", "Pause", "The training pauses before its next step."],
  resume: ["Resume the training?", "The training goes on with what waits for it, also if a guard has paused it.", "Resume", "The training goes on."],
  checkpoint: [
    "Write a checkpoint?",
    "The trainer writes a checkpoint after the running step. The answer comes when it is durable, which may take a minute.",
    "Write it",
    "The checkpoint is durable.",
  ],
};

export function trainer({ what, done }) {
  const [title, sentence, action, said] = TRAINER[what];
  ask({
    title,
    sentence,
    action,
    danger: what === "pause",
    run: async () => {
      await post(`/admin/trainer/${what}`).finally(done);
      return said;
    },
  });
}
