// What happened to a run: the training was set back, a version was promoted, the trainer restarted.
import { useMemo } from "../../dom.js";
import { useGet } from "../../api.js";
import { number } from "../../format.js";

const PROMOTED = /^\/admin\/policies\/(\d+)\/promote$/;
const MOST_ACTIONS = 200;
const MOST_PROMOTIONS = 32; // the newest; the trainer bounds the others

// [{step, kind: "recovery" | "promotion" | "restart", says, why, at}], by step: it happened after this step.
export function useEvents(data) {
  const last = data?.last ?? null;
  const policies = useGet("/admin/policies", last);
  const canaries = useGet("/admin/policies/canaries", last);
  const actions = useGet(`/admin/actions?limit=${MOST_ACTIONS}`, last);
  const promoted = useMemo(() => promotions(policies.data, canaries.data, actions.data), [policies.data, canaries.data, actions.data]);
  const key = JSON.stringify([data?.recoveries, data?.restarts, promoted]);
  return useMemo(() => [...recoveries(data), ...restarts(data), ...promoted].sort((one, other) => one.step - other.step), [key]);
}

function recoveries(data) {
  return (data?.recoveries ?? []).map(({ step, restored, version, reason, at }) => ({
    step,
    kind: "recovery",
    says: `Set back after step ${number(step)} to version ${number(restored)}, which goes on as version ${number(version)}`,
    why: reason,
    at,
  }));
}

function restarts(data) {
  return (data?.restarts ?? []).map((step) => ({ step, kind: "restart", says: `The trainer restarted after step ${number(step)}` }));
}

// By a canary's gates, or by an operator.
function promotions(policies, canaries, actions) {
  const steps = new Map((policies?.data ?? []).map((each) => [each.version, each.step]));
  const found = new Map();
  const add = (version, at, by) => {
    const step = steps.get(version);
    if (Number.isFinite(step)) found.set(version, { step, kind: "promotion", says: `Version ${number(version)} of step ${number(step)} was promoted by ${by}`, at });
  };
  for (const each of canaries?.data ?? []) if (each.state === "promoted") add(each.version, each.ended_at, "its canary");
  for (const each of actions?.data ?? []) {
    const named = PROMOTED.exec(each.path);
    if (named && each.status < 300) add(Number(named[1]), each.at, "an operator");
  }
  return [...found.values()].sort((one, other) => one.step - other.step).slice(-MOST_PROMOTIONS);
}
