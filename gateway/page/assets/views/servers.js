// What views say of a rollout server's state.
export const SERVER_TONES = {
  ready: "good",
  loading: "accent",
  starting: "accent",
  draining: "warn",
  dead: "bad",
  unknown: "bad",
};

export function serverState({ state, breaker }) {
  if (state === "draining") return "drained";
  return breaker && breaker !== "closed" && state === "ready" ? `ready, breaker ${breaker}` : state;
}
