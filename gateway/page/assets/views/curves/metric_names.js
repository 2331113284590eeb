// What a metric is called in words, and its unit. docs/metrics.md says what each one is.
const NAMES = {
  reward_mean: ["Mean reward", "reward"],
  loss: ["Loss", ""],
  grad_norm: ["Norm of the gradient", ""],
  entropy: ["Entropy", "nats"],
  tokens_per_s: ["Training speed", "tokens/s"],
  rollouts: ["Sessions that ended", "sessions"],
  rows: ["Rows trained", "rows"],
  tokens: ["Tokens trained", "tokens"],
  "mismatch/kl": ["KL between engine and trainer", "nats"],
  "mismatch/kl_current": ["KL between engine and trainer, same version", "nats"],
  "mismatch/abs_logp": ["Difference of log-probabilities", "nats"],
  "mismatch/abs_logp_current": ["Difference of log-probabilities, same version", "nats"],
  "staleness/total_mean": ["Age of what is trained", "versions"],
  "staleness/total_max": ["Oldest that is trained", "versions"],
  "len/mean": ["Length of a row", "tokens"],
  "len/p90": ["Length of nine rows of ten", "tokens"],
  "kl/reference": ["KL to the reference", "nats"],
  "eval/reward": ["Reward of evaluations", "reward"],
  "seconds/uptime": ["Time since the trainer started", "s"],
};
const UNITS = { seconds: "s", adv: "reward", group: "groups", drift: "turns" };
const TASK = "reward/task/";

export function nameOf(metric) {
  if (metric.startsWith(TASK)) return `Reward of ${metric.slice(TASK.length)}`;
  return NAMES[metric]?.[0] ?? metric;
}

export function unitOf(metric) {
  if (metric.startsWith(TASK)) return "reward";
  return NAMES[metric]?.[1] ?? UNITS[metric.split("/")[0]] ?? "";
}

export function taskOf(metric) {
  return metric.startsWith(TASK) ? metric.slice(TASK.length) : null;
}
