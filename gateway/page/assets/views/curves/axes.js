// What the axes of a curve show: the range of its values, and texts of ticks that tell them apart.
const PAD = 0.06; // of the range, above and below
const MOST_DECIMALS = 4;
const LARGE = 1e6;

// The range for values from `low` to `high`. A constant gets one around itself, and 0 one from 0 to 1. A range whose
// values are all of one sign begins at 0 if that is near.
export function rangeOf(low, high) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 4, low + Math.abs(low) / 4];
  const pad = PAD * (high - low);
  const near = (edge) => Math.abs(edge) < (high - low) / 2;
  return [low >= 0 && near(low) ? 0 : low - pad, high <= 0 && near(high) ? 0 : high + pad];
}

// One text for each tick, all with the decimals that tell neighbours apart. Small and large ones have an exponent.
export function tickTexts(ticks) {
  const known = ticks.filter((each) => Number.isFinite(each));
  const most = Math.max(...known.map(Math.abs), 0);
  const gap = known.length > 1 ? Math.abs(known[1] - known[0]) : most || 1;
  const decimals = decimalsOf(gap);
  const exponent = most > 0 ? Math.floor(Math.log10(most) + 1e-9) : 0;
  if (most >= LARGE || decimals > MOST_DECIMALS) return ticks.map((each) => withExponent(each, exponent, gap));
  return ticks.map((each) => grouped(clean(each, gap), Math.min(decimals, MOST_DECIMALS)));
}

// So many decimals tell multiples of a gap apart: 2 for 0.25, 1 for 0.2.
function decimalsOf(gap) {
  const least = Math.max(0, -Math.floor(Math.log10(gap) + 1e-9));
  const exact = (digits) => Math.abs(gap * 10 ** digits - Math.round(gap * 10 ** digits)) < 1e-6 * gap * 10 ** digits;
  return exact(least) || !exact(least + 1) ? least : least + 1;
}

// How wide the axis of these texts is, in pixels: the texts have a font of 12 pixels.
export function widthOf(texts) {
  return 22 + 8 * Math.max(2, ...(texts ?? []).map((each) => each.length));
}

function withExponent(value, exponent, gap) {
  if (clean(value, gap) === 0) return "0";
  const decimals = Math.min(6, decimalsOf(gap / 10 ** exponent));
  return `${(value / 10 ** exponent).toFixed(decimals)}e${exponent < 0 ? "−" : ""}${Math.abs(exponent)}`.replace("-", "−");
}

// Sums of steps are not exact: -1e-17 is a 0.
function clean(value, gap) {
  return Math.abs(value) < gap / 1000 ? 0 : value;
}

function grouped(value, decimals) {
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).replace("-", "−");
}

// A moving average that weighs each earlier value `weight` times the one after it, without a pull to the first ones.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    sum = weight * sum + value;
    total = weight * total + 1;
    return sum / total;
  });
}
