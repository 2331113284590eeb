// What tokens are coloured by. Each scale puts a token into a class of its legend, by a colour that people with any
// colour vision tell apart (blue and orange), and by an underline. The numbers are shown beside the text as well.
//
// {id, title, note, classes: [{mark, label}], of: (token) => index of a class, or -1 for none}
import { figure, number } from "../format.js";

export const SCALES = [
  { id: "logprob", title: "Log-probability" },
  { id: "version", title: "Version" },
  { id: "mask", title: "Context or sampled" },
  { id: "advantage", title: "Advantage" },
  { id: "ratio", title: "Ratio of trainer to engine" },
  { id: "verdict", title: "Trained or not" },
];

const PROBABILITIES = [0.99, 0.9, 0.5, 0.2, 0.05, 0.01];
const RATIOS = [0.5, 0.8, 0.98, 1.02, 1.25, 2];

export function scaleOf(id, tokens) {
  return { logprob, version, mask, advantage, ratio, verdict }[id]?.(tokens) ?? logprob();
}

function logprob() {
  const labels = ["99 % and more", "90 to 99 %", "50 to 90 %", "20 to 50 %", "5 to 20 %", "1 to 5 %", "less than 1 %"];
  return {
    note: "How probable the token was when it was sampled.",
    classes: labels.map((label, i) => ({ mark: `seq-${i}`, label })),
    of: (token) => (token.logprob === null ? -1 : stepsBelow(Math.exp(token.logprob), PROBABILITIES)),
  };
}

function version(tokens) {
  const versions = [...new Set(tokens.map((each) => each.version).filter((each) => each !== null))].sort((a, b) => a - b);
  return {
    note: "The policy version that sampled the token.",
    classes: versions.map((each, i) => ({ mark: `cat-${i % 6}`, label: `version ${each}` })),
    of: (token) => (token.version === null ? -1 : versions.indexOf(token.version)),
  };
}

function mask() {
  return {
    note: "Only sampled tokens can be trained.",
    classes: [{ mark: "cat-0", label: "sampled by the model" }, { mark: "plain", label: "context: written by the agent or the template" }],
    of: (token) => (token.sampled ? 0 : 1),
  };
}

function advantage(tokens) {
  const most = Math.max(...tokens.map((each) => Math.abs(each.advantage ?? 0)), 1e-9);
  const part = (share) => figure(share * most);
  return {
    note: "Positive: the step made the token more probable. Negative: less.",
    classes: [
      { mark: "neg-2", label: `${part(-0.5)} and less` },
      { mark: "neg-1", label: `${part(-0.5)} to 0` },
      { mark: "plain", label: "0" },
      { mark: "pos-1", label: `0 to ${part(0.5)}` },
      { mark: "pos-2", label: `${part(0.5)} and more` },
    ],
    of: ({ advantage: value }) => {
      if (value === null) return -1;
      const share = value / most;
      return share <= -0.5 ? 0 : share < 0 ? 1 : share === 0 ? 2 : share < 0.5 ? 3 : 4;
    },
  };
}

function ratio() {
  const labels = ["under 0.5", "0.5 to 0.8", "0.8 to 0.98", "0.98 to 1.02", "1.02 to 1.25", "1.25 to 2", "2 and more"];
  const marks = ["neg-3", "neg-2", "neg-1", "plain", "pos-1", "pos-2", "pos-3"];
  return {
    note: "The probability under the weights before the step, divided by the engine's.",
    classes: labels.map((label, i) => ({ mark: marks[i], label })),
    of: ({ ratio: value }) => (value === null ? -1 : RATIOS.filter((each) => value >= each).length),
  };
}

function verdict(tokens) {
  const reasons = [...new Set(tokens.filter((each) => each.sampled && each.why).map((each) => each.why))];
  return {
    note: "Why a token changed no weight.",
    classes: [
      { mark: "pos-2", label: "trained" },
      { mark: "plain", label: "context, which is never trained" },
      ...reasons.map((label, i) => ({ mark: `neg-${1 + (i % 3)}`, label })),
    ],
    of: (token) => (!token.sampled ? 1 : token.why ? 2 + reasons.indexOf(token.why) : 0),
  };
}

function stepsBelow(value, bounds) {
  const found = bounds.findIndex((each) => value >= each);
  return found < 0 ? bounds.length : found;
}

// The numbers of one token, as pairs of name and text.
export function numbersOf(token) {
  const pairs = [["Token", `${number(token.at)} of the turn, id ${token.id}`]];
  if (!token.sampled) return [...pairs, ["Context", token.why]];
  pairs.push(["Log-probability", `${figure(token.logprob)} (${figure(100 * Math.exp(token.logprob))} %)`]);
  pairs.push(["Version", token.version ?? "–"]);
  if (token.advantage !== null) pairs.push(["Advantage", figure(token.advantage)]);
  if (token.ratio !== null) pairs.push(["Ratio", figure(token.ratio)]);
  pairs.push(["Trained", token.why ?? "yes"]);
  return pairs;
}
