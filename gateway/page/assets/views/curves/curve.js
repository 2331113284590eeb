// One curve of several lines: the smoothed mean of each bucket, its least and most as a band, limits as dashed lines,
// and a vertical line wherever something happened to the run.
import uPlot from "../../vendor/uplot.js";
import { html, useEffect, useRef } from "../../dom.js";
import { figure, number } from "../../format.js";
import { visible } from "../visible.js";
import { rangeOf, smoothed, tickTexts, widthOf } from "./axes.js";
import { nameOf, unitOf } from "./metric_names.js";

const HEIGHT = 250;
const SHEET = new URL("../../vendor/uplot.css", import.meta.url).href;
const DASHES = [[], [8, 4], [2, 4], [12, 4, 2, 4]];
const COLOURS = ["--accent", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5", "--run-6", "--run-7"];
const MOST_BANDS = 3; // with more lines, their bands hide each other
const MARKS = { recovery: "--bad", promotion: "--good", restart: "--edge" };
const colours = new Map(); // of the theme that is shown

// `runs`: [{name, series: {steps, min, mean, max}}], the live run first. `limit`: {most, least, says} or null.
// `marks`: [{step, kind, says}], what happened after a step. `smooth`: the weight of a moving average, 0 for none.
// `onZoom(from, to)` follows a drag over the curve. `title` and `unit` stand for those of the metric.
export function Curve({ metric, title = nameOf(metric), unit = unitOf(metric), runs, limit, marks, smooth, onZoom }) {
  const box = useRef(null);
  const plot = useRef(null);
  const readout = useRef(null);
  const known = runs.filter((run) => run.series?.steps.length);
  useEffect(addSheet, []);
  useEffect(() => {
    if (!known.length) return undefined;
    const place = box.current; // the ref is empty before this effect ends
    const made = drawn(place, { runs: known, limit, marks, smooth, unit, onZoom, readout });
    plot.current = made;
    const size = new ResizeObserver(() => made.setSize({ width: place.clientWidth, height: HEIGHT }));
    size.observe(place);
    const theme = new MutationObserver(() => {
      colours.clear();
      made.redraw();
    });
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      size.disconnect();
      theme.disconnect();
      made.destroy();
    };
  }, [runs, limit, marks, smooth]);
  const canvas = () => plot.current?.ctx.canvas;
  const said = [...known.map((run) => says(runs.length > 1 ? run.name : metric, run)), ...marks.map((each) => `${each.says}.`)];
  return html`<section class="card curve" aria-label=${metric}>
    <div class="card-head">
      <h2>${visible(title)} ${title !== metric && !runs.some((run) => run.task) && html`<span class="muted metric-id">${visible(metric)}</span>`}</h2>
      <div class="card-tools">
        <button class="small quiet" disabled=${!known.length} onClick=${() => savePng(canvas(), metric)}>PNG<span class="hidden"> of ${metric}</span></button>
        <button class="small quiet" disabled=${!known.length} onClick=${() => saveCsv(metric, known)}>CSV<span class="hidden"> of ${metric}</span></button>
      </div>
    </div>
    ${known.length
      ? html`<div class="plot-box">
          <div class="plot" ref=${box} role="img" aria-label=${said.join(" ")}></div>
          <p class="note muted readout" aria-hidden="true" ref=${readout}></p>
        </div>`
      : html`<p class="muted">No step has this metric.</p>`}
    ${limit && html`<p class="note muted">Guard ${limit.guard}: ${limit.says}.</p>`}
    ${known.length > 0 && html`<ul class="keys">${known.map((run, i) => html`<li class="note muted" key=${run.name}>${runs.length > 1 && html`<span class="run-key" data-run=${i}></span>`}${visible(says(runs.length > 1 ? run.name : "", run))}</li>`)}</ul>`}
  </section>`;
}

function addSheet() {
  if ([...document.styleSheets].some((sheet) => sheet.href === SHEET)) return;
  document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href: SHEET }));
}

function says(name, { series }) {
  const { steps, min, mean, max } = series;
  const least = min.reduce((a, b) => Math.min(a, b), Infinity);
  const most = max.reduce((a, b) => Math.max(a, b), -Infinity);
  return `${name ? `${name}: ` : ""}steps ${number(steps[0])} to ${number(steps.at(-1))}, from ${figure(mean[0])} to ${figure(mean.at(-1))}, between ${figure(least)} and ${figure(most)}.`;
}

function colour(name, part = 100) {
  const key = `${name} ${part}`;
  if (!colours.has(key)) {
    const probe = document.createElement("span");
    probe.style.color = part === 100 ? `var(${name})` : `color-mix(in srgb, var(${name}) ${part}%, transparent)`;
    document.body.append(probe);
    colours.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(key);
}

function drawn(box, { runs, limit, marks, smooth, unit, onZoom, readout }) {
  const lines = runs.map(({ name, series }) => ({ name, ...series, line: smoothed(series.mean, smooth) }));
  const data = uPlot.join(lines.map(({ steps, line, min, max, mean }) => [steps, line, min, max, mean]));
  const series = [{}];
  const bands = [];
  const banded = lines.length <= MOST_BANDS;
  lines.forEach((run, i) => {
    const hue = COLOURS[i % COLOURS.length];
    const plain = { stroke: () => "transparent", points: { show: false }, spanGaps: true, auto: banded };
    const faint = { ...plain, stroke: () => (smooth && banded ? colour(hue, 35) : "transparent"), width: 1, auto: true };
    series.push({ label: run.name, stroke: () => colour(hue), width: 2, dash: DASHES[(i >> 1) % DASHES.length], points: { show: run.steps.length < 3 }, spanGaps: true }, plain, plain, faint);
    if (banded) bands.push({ series: [4 * i + 3, 4 * i + 2], fill: () => colour(hue, 14) });
  });
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 0 };
  const options = {
    width: Math.max(120, box.clientWidth),
    height: HEIGHT,
    padding: [14, 14, 0, 0],
    series,
    bands,
    legend: { show: false },
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (_, low, high) => rangeOf(low, high) } },
    axes: [
      { ...axis, label: "step", size: 32, space: 64, values: (_, ticks) => ticks.map((each) => (Number.isInteger(each) ? number(each) : "")) },
      { ...axis, label: unit || undefined, size: (_, texts) => widthOf(texts), values: (_, ticks) => tickTexts(ticks) },
    ],
    cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false } },
    hooks: {
      setCursor: [(plot) => readAt(plot, lines, readout.current)],
      setSelect: [
        (plot) => {
          const from = Math.floor(plot.posToVal(plot.select.left, "x"));
          const to = Math.ceil(plot.posToVal(plot.select.left + plot.select.width, "x"));
          if (plot.select.width > 4 && to > from) onZoom(Math.max(0, from), to);
        },
      ],
      draw: [(plot) => drawLimits(plot, limit), (plot) => drawMarks(plot, marks)],
    },
  };
  return new uPlot(options, data, box);
}

// The values under the pointer.
function readAt(plot, lines, box) {
  const at = plot.cursor.idx;
  if (!box) return;
  if (at === null || at === undefined) {
    box.textContent = "";
    return;
  }
  const values = lines.map((run, i) => [run.name, plot.data[4 * i + 1][at]]).filter(([, value]) => Number.isFinite(value));
  const named = values.map(([name, value]) => (lines.length > 1 ? `${visible(name)} ${figure(value)}` : figure(value)));
  box.textContent = `Step ${number(plot.data[0][at])}: ${named.join(", ") || "no value"}`;
}

function drawLimits(plot, limit) {
  const { top, left, width, height } = plot.bbox;
  for (const value of [limit?.most, limit?.least]) {
    if (value === null || value === undefined) continue;
    const y = plot.valToPos(value, "y", true);
    if (y >= top && y <= top + height) drawDashed(plot.ctx, "--bad", [left, y], [left + width, y]);
  }
}

// It happened between this step and the next one.
function drawMarks(plot, marks) {
  const { top, left, width, height } = plot.bbox;
  for (const { step, kind } of marks) {
    const x = plot.valToPos(step + 0.5, "x", true);
    if (x < left || x > left + width) continue;
    drawDashed(plot.ctx, MARKS[kind], [x, top], [x, top + height]);
    drawSign(plot.ctx, kind, x, top);
  }
}

// A triangle back for a set back, up for a promotion, a square for a restart: also without colours.
function drawSign(ctx, kind, x, y) {
  const size = 5 * devicePixelRatio;
  const corners = { recovery: [[-1, 0], [1, -1], [1, 1]], promotion: [[-1, 1], [1, 1], [0, -1]], restart: [[-0.7, -0.7], [0.7, -0.7], [0.7, 0.7], [-0.7, 0.7]] }[kind];
  ctx.save();
  ctx.fillStyle = colour(MARKS[kind]);
  ctx.beginPath();
  corners.forEach(([dx, dy], i) => ctx[i ? "lineTo" : "moveTo"](x + size * dx, y - size + size * dy));
  ctx.fill();
  ctx.restore();
}

function drawDashed(ctx, name, from, to) {
  ctx.save();
  ctx.strokeStyle = colour(name);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
  ctx.restore();
}

function savePng(canvas, metric) {
  const whole = document.createElement("canvas");
  Object.assign(whole, { width: canvas.width, height: canvas.height });
  const context = whole.getContext("2d");
  context.fillStyle = colour("--surface");
  context.fillRect(0, 0, whole.width, whole.height);
  context.drawImage(canvas, 0, 0);
  whole.toBlob((blob) => save(blob, `${fileName(metric)}.png`), "image/png");
}

function saveCsv(metric, runs) {
  const quoted = (text) => `"${String(text).replaceAll('"', '""').replace(/^[=+@\t\r-]/, "'$&")}"`;
  const lines = ["run,step,min,mean,max"];
  for (const { name, series } of runs) {
    series.steps.forEach((step, i) => lines.push([quoted(name), step, series.min[i], series.mean[i], series.max[i]].join(",")));
  }
  save(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }), `${fileName(metric)}.csv`);
}

function fileName(metric) {
  return metric.replace(/[^A-Za-z0-9_.-]+/g, "_");
}

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const anchor = document.createElement("a");
  Object.assign(anchor, { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
