// Numbers, times and sizes as texts.
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const NOTHING = "–";

export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (digits === 0) return grouped.format(value);
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Three significant digits, whatever the size: 0.0123, 1.23, 12.3, 1,230; 2.87e−8 for what is tiny.
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9) return value.toExponential(2).replaceAll("-", "−").replace("e+", "e");
  if (Math.abs(value) >= 100) return grouped.format(value);
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? NOTHING : `${number(100 * share, digits)} %`;
}

// One unit: 40 s, 4 min, 3 h, 2 days.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NOTHING;
  const s = Math.max(0, seconds);
  if (s < 10 && s % 1) return `${s.toFixed(1)} s`;
  if (s < 100) return `${s.toFixed(0)} s`;
  if (s < 6000) return `${(s / 60).toFixed(0)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(0)} h`;
  return `${(s / 86400).toFixed(0)} days`;
}

export function ago(at, now = Date.now() / 1000) {
  return at === null || at === undefined ? NOTHING : `${duration(Math.max(0, Math.round(now - at)))} ago`;
}

export function moment(at) {
  return at === null || at === undefined ? NOTHING : new Date(1000 * at).toLocaleString();
}

export function bytes(size) {
  if (size === null || size === undefined) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = size;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export function count(value, one, many = `${one}s`) {
  return `${grouped.format(value)} ${value === 1 ? one : many}`;
}

// A sentence of the gateway's, which begins with a small letter and has no full stop.
export function sentence(text) {
  const whole = String(text).trim();
  return whole ? whole[0].toUpperCase() + whole.slice(1) + (/[.!?]$/.test(whole) ? "" : ".") : "";
}

// The beginning and the end of a long id.
export function short(id) {
  const all = [...String(id)];
  return all.length <= 18 ? String(id) : `${all.slice(0, 9).join("")}…${all.slice(-5).join("")}`;
}
