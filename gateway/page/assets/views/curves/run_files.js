// Another run's metrics.jsonl, read in the browser: nothing of it is sent anywhere.
export const MOST_BYTES = 512 * 2 ** 20;
const PART_BYTES = 4 * 2 ** 20;

// Resolves to {metric: {steps, values}}. A step that comes again replaces the former one and all after it.
// `progress(share)` is called in between; `signal` ends the reading.
export async function readRun(file, metrics, { progress = () => {}, signal } = {}) {
  if (file.size > MOST_BYTES) throw new Error(`The file has more than ${MOST_BYTES / 2 ** 20} MiB.`);
  const columns = Object.fromEntries(metrics.map((name) => [name, { steps: [], values: [] }]));
  const decoder = new TextDecoder();
  let rest = "";
  let lines = 0;
  for (let at = 0; at < file.size; at += PART_BYTES) {
    const part = await file.slice(at, at + PART_BYTES).arrayBuffer();
    signal?.throwIfAborted();
    const texts = (rest + decoder.decode(part, { stream: at + PART_BYTES < file.size })).split("\n");
    rest = texts.pop();
    for (const text of texts) lines += add(columns, text);
    if (rest.length > PART_BYTES) throw new Error("The file is not made of lines of JSON.");
    progress(Math.min(1, (at + PART_BYTES) / file.size));
  }
  lines += add(columns, rest);
  if (!lines) throw new Error("The file has no line with a step.");
  return columns;
}

function add(columns, text) {
  let line;
  try {
    line = JSON.parse(text);
  } catch {
    return 0; // half a line
  }
  if (!Number.isFinite(line?.step)) return 0;
  for (const [name, { steps, values }] of Object.entries(columns)) {
    const value = Object.hasOwn(line, name) ? line[name] : null;
    if (!Number.isFinite(value)) continue;
    while (steps.length && steps.at(-1) >= line.step) {
      steps.pop();
      values.pop();
    }
    steps.push(line.step);
    values.push(value);
  }
  return 1;
}

// The same buckets as the gateway's: {steps, min, mean, max}.
export function bucketed({ steps, values }, from, to, buckets) {
  const low = Math.max(from ?? -Infinity, steps[0] ?? 0);
  const high = Math.min(to ?? Infinity, steps.at(-1) ?? 0);
  const width = Math.max(1, Math.ceil((high - low + 1) / buckets));
  const found = { steps: [], min: [], mean: [], max: [] };
  let count = 0;
  steps.forEach((step, i) => {
    if (step < low || step > high) return;
    const first = low + Math.floor((step - low) / width) * width;
    const value = values[i];
    const last = found.steps.length - 1;
    if (found.steps[last] !== first) {
      count = 1;
      found.steps.push(first);
      for (const name of ["min", "mean", "max"]) found[name].push(value);
      return;
    }
    count += 1;
    found.min[last] = Math.min(found.min[last], value);
    found.max[last] = Math.max(found.max[last], value);
    found.mean[last] += (value - found.mean[last]) / count;
  });
  return found;
}
