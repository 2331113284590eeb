// The codes of verdicts, and how they look.
export const VERDICTS = [
  "open", "waiting_reward", "group_incomplete", "ready", "trained", "stale", "skipped_for_newer", "too_long",
  "zero_advantage", "truncated", "failed", "abandoned", "expired", "orphan_retry", "aborted", "not_for_training",
  "invalid", "deleted",
];
const WAITING = new Set(["open", "waiting_reward", "group_incomplete", "ready"]);
const PLAIN = new Set(["zero_advantage", "not_for_training", "orphan_retry", "deleted", "abandoned"]);

export function verdictTone(code) {
  if (code === "trained") return "good";
  if (WAITING.has(code)) return "accent";
  return PLAIN.has(code) ? "" : "warn";
}

export function verdictWords(code) {
  return code === "waiting_reward" ? "waits for a reward" : code.replaceAll("_", " ");
}

// Why a turn begins another row, in words. The codes are those of `relation` and `reason` of a turn.
const SPLITS = {
  template_rewrites_history: "the chat template renders the earlier messages differently",
  sampled_again: "the call is the same as an earlier one, as in best of n",
  history_edited: "the call begins as an earlier one does, and then differs",
  tools_changed: "the call continues a turn with another list of tools",
  main_line: "the call is the first with tools; those before it were the harness's own",
  sub_agent: "the call has another system prompt or other tools than the main line",
  compaction: "the call replaces the history by something shorter",
  new_conversation: "the call has none of the earlier messages",
  retried: "the call repeats an earlier attempt",
};

export function splitReason(turn) {
  if (turn.relation === "root" || turn.relation === "extends") return "";
  return SPLITS[turn.reason] ?? turn.reason ?? "";
}
