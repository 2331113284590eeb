// Components that views share.
import { Component, html, useEffect, useId, useState } from "./dom.js";
import { ago, moment, short } from "./format.js";

const ICONS = {
  pulse: ["M3 12h4l3-8 4 16 3-8h4"],
  layers: ["M12 3 3 8l9 5 9-5-9-5Z", "m3 12.500 9 5 9-5", "m3 17 9 5 9-5"],
  list: ["M8 6h13M8 12h13M8 18h13", "M3.500 6h.01M3.500 12h.01M3.500 18h.01"],
  branch: ["M6 3v12", "M18 9a9 9 0 0 1-9 9", "M18 9a3 3 0 1 0 0-6 3 3 0 0 0 0 6Z", "M6 21a3 3 0 1 0 0-6 3 3 0 0 0 0 6Z"],
  chart: ["M3 3v18h18", "m7 15 4-5 4 3 5-7"],
  sun: ["M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8Z", "M12 2v2m0 16v2M4.900 4.900l1.400 1.400m11.400 11.400 1.400 1.400M2 12h2m16 0h2M4.900 19.100l1.400-1.400M17.700 6.300l1.400-1.400"],
  moon: ["M20 14.500A8.500 8.500 0 0 1 9.500 4a8.500 8.500 0 1 0 10.500 10.500Z"],
  leave: ["M9 21H5a2 2 0 0 1-2-2V5a2 2 0 0 1 2-2h4", "m16 17 5-5-5-5", "M21 12H9"],
  warning: ["M12 3 2 20h20L12 3Z", "M12 10v4", "M12 17h.01"],
  check: ["m5 12.500 4.500 4.500L19 7.500"],
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">${(ICONS[name] ?? []).map((d) => html`<path d=${d} />`)}</svg>`;
}

// A part of a view with a heading. `tools`: buttons beside it; `note`: a line below it.
export function Card({ title, note, tools, children, wide = false }) {
  const id = useId();
  return html`<section class=${wide ? "card wide" : "card"} aria-labelledby=${id}>
    <div class="card-head">
      <h2 id=${id}>${title}</h2>
      ${tools && html`<div class="card-tools">${tools}</div>`}
    </div>
    ${note && html`<p class="muted note">${note}</p>`}
    ${children}
  </section>`;
}

// One figure with its name. `tone`: good, warn or bad.
export function Stat({ label, value, unit, note, tone, children }) {
  return html`<div class="stat" data-tone=${tone}>
    <dt>${label}</dt>
    <dd><span class="figure">${value}</span>${unit && html` <span class="unit">${unit}</span>`}</dd>
    ${note && html`<dd class="muted">${note}</dd>`}
    ${children && html`<dd class="extra">${children}</dd>`}
  </div>`;
}

// A word for a state. `tone`: good, warn, bad, accent, or none.
export function Badge({ tone = "", children }) {
  return html`<span class="badge" data-tone=${tone}>${children}</span>`;
}

// `columns`: [{title, cell: (row) => child, numeric, rare, wide, spare, size}]. A `rare` column is left out if all its cells are
// empty. On a phone each row becomes a block: the first two cells in one line, a `wide` one in a line of its own.
// A `spare` column is left out where there is little room. `still`: for long tables. Cells depend on their row alone, and columns have the width of their `size` (s, m, l).
export function Table({ columns: given, rows, rowKey, caption, empty = "Nothing here.", still = false }) {
  if (!rows.length) return html`<p class="muted">${empty}</p>`;
  const columns = given.filter((each) => !each.rare || rows.some((row) => each.cell(row)));
  return html`<table class=${still ? "table still" : "table"}>
    <caption class="hidden">${caption}</caption>
    <thead>
      <tr>${columns.map((each) => html`<th scope="col" class=${kind(each)}>${each.title}</th>`)}</tr>
    </thead>
    <tbody>${rows.map((row) => html`<${Row} key=${rowKey(row)} row=${row} columns=${columns} still=${still} />`)}</tbody>
  </table>`;
}

class Row extends Component {
  shouldComponentUpdate({ row, columns, still }) {
    return !still || row !== this.props.row || columns.length !== this.props.columns.length;
  }

  render({ row, columns }) {
    return html`<tr>${columns.map((each) => html`<td data-title=${each.title} class=${kind(each)}>${each.cell(row)}</td>`)}</tr>`;
  }
}

function kind(column) {
  return [column.numeric && "numeric", column.wide && "wide", column.spare && "spare", column.size && `size-${column.size}`].filter(Boolean).join(" ");
}

const tellers = new Set(); // of all times that are shown: one timer for them
let clock = 0;

// A time as `3 min ago`, with the date for those who point at it. It is drawn again only when its text changes.
export function Ago({ at }) {
  const [text, setText] = useState(() => ago(at));
  useEffect(() => {
    const tell = () => setText(ago(at));
    tell();
    tellers.add(tell);
    clock ||= setInterval(() => tellers.forEach((each) => each()), 5000);
    return () => {
      tellers.delete(tell);
      if (!tellers.size) clock = clearInterval(clock) ?? 0;
    };
  }, [at]);
  if (at === null || at === undefined) return html`<span class="muted">–</span>`;
  return html`<time datetime=${new Date(1000 * at).toISOString()} title=${moment(at)}>${text}</time>`;
}

// A long id, shortened; the whole one is read by screen readers, and by those who point at it. `text` is made visible.
export function Id({ text }) {
  const cut = short(text);
  return cut === text ? html`<span class="id">${text}</span>` : html`<span class="id" title=${text}><span aria-hidden="true">${cut}</span><span class="hidden">${text}</span></span>`;
}

// A share as a bar with its text. `value` of `most`.
export function Meter({ value, most, label, tone }) {
  const share = most > 0 ? Math.min(1, value / most) : 0;
  return html`<span class="meter" data-tone=${tone}>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
      <rect class="track" width="100" height="6" /><rect class="bar" width=${100 * share} height="6" />
    </svg>
    <span>${label}</span>
  </span>`;
}

// A small curve without axes: the texts beside it say what it shows.
export function Sparkline({ values, label }) {
  const known = values.filter((each) => Number.isFinite(each));
  if (known.length < 2) return null;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = known.map((each, i) => `${((100 * i) / (known.length - 1)).toFixed(2)},${(26 - (24 * (each - low)) / span).toFixed(2)}`);
  return html`<svg class="spark" viewBox="0 0 100 28" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polyline points=${points.join(" ")} />
  </svg>`;
}

export function Loading() {
  return html`<p class="muted loading">One moment…</p>`;
}

export function ErrorNote({ error, again }) {
  return html`<div class="refusal" role="alert">
    <p>${error.message}</p>
    ${again && html`<button class="plain" onClick=${again}>Try again</button>`}
  </div>`;
}
