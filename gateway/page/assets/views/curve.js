// One curve of several runs: the mean of each bucket as a line, its least and most as a band, limits as dashed lines,
// and a vertical line wherever the training was set back.
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "../dom.js";
import { figure, number } from "../format.js";

const HEIGHT = 240;
const SHEET = new URL("../vendor/uplot.css", import.meta.url).href;
const DASHES = [[], [8, 4], [2, 4], [12, 4, 2, 4]];
const COLOURS = ["--accent", "--run-1", "--run-2", "--run-3"];

// `runs`: [{name, series: {steps, min, mean, max}}], the live run first. `limit`: {most, least, says} or null.
// `marks`: the steps after which the training was set back. `onZoom(from, to)` follows a drag over the curve.
export function Curve({ metric, runs, limit, marks, onZoom }) {
  const box = useRef(null);
  const plot = useRef(null);
  const known = runs.filter((run) => run.series?.steps.length);
  useEffect(addSheet, []);
  useEffect(() => {
    if (!known.length) return undefined;
    const place = box.current; // the ref is empty before this effect ends
    const made = drawn(place, known, limit, marks, onZoom);
    plot.current = made;
    const size = new ResizeObserver(() => made.setSize({ width: place.clientWidth, height: HEIGHT }));
    size.observe(place);
    const theme = new MutationObserver(() => made.redraw());
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      size.disconnect();
      theme.disconnect();
      made.destroy();
    };
  }, [runs, limit, marks]);
  const canvas = () => plot.current?.ctx.canvas;
  return html`<section class="card curve" aria-label=${metric}>
    <div class="card-head">
      <h2>${metric}</h2>
      <div class="card-tools">
        <button class="small" disabled=${!known.length} onClick=${() => savePng(canvas(), metric)}>PNG<span class="hidden"> of ${metric}</span></button>
        <button class="small" disabled=${!known.length} onClick=${() => saveCsv(metric, known)}>CSV<span class="hidden"> of ${metric}</span></button>
      </div>
    </div>
    ${limit && html`<p class="note muted">Guard ${limit.guard}: ${limit.says}.</p>`}
    ${known.length
      ? html`<div class="plot" ref=${box} role="img" aria-label=${[...known.map((run) => says(metric, run)), ...marks.map((step) => `Set back after step ${number(step)}.`)].join(" ")}></div>`
      : html`<p class="muted">No step has this metric.</p>`}
    ${known.map((run, i) => html`<p class="note muted" key=${run.name}>${runs.length > 1 && html`<span class="run-key" data-run=${i}></span>`}${says(runs.length > 1 ? run.name : "", run)}</p>`)}
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
  const probe = document.createElement("span");
  probe.style.color = part === 100 ? `var(${name})` : `color-mix(in srgb, var(${name}) ${part}%, transparent)`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function drawn(box, runs, limit, marks, onZoom) {
  const tables = runs.map(({ series }) => [series.steps, series.mean, series.min, series.max]);
  const data = uPlot.join(tables);
  const series = [{}];
  const bands = [];
  runs.forEach((run, i) => {
    const line = COLOURS[i % COLOURS.length];
    const plain = { stroke: () => "transparent", points: { show: false }, spanGaps: true };
    series.push({ label: run.name, stroke: () => colour(line), width: 2, dash: DASHES[i % DASHES.length], points: { show: run.series.steps.length < 3 }, spanGaps: true }, plain, plain);
    bands.push({ series: [3 * i + 3, 3 * i + 2], fill: () => colour(line, 16) });
  });
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
  const options = {
    width: Math.max(200, box.clientWidth),
    height: HEIGHT,
    series,
    bands,
    legend: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, values: (_, ticks) => ticks.map((each) => (Number.isInteger(each) ? number(each) : "")) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(figure) }],
    cursor: { drag: { x: true, y: false, setScale: false } },
    hooks: {
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

function drawLimits(plot, limit) {
  const { top, left, width, height } = plot.bbox;
  for (const value of [limit?.most, limit?.least]) {
    if (value === null || value === undefined) continue;
    const y = plot.valToPos(value, "y", true);
    if (y >= top && y <= top + height) drawDashed(plot.ctx, "--bad", [left, y], [left + width, y]);
  }
}

// The new weights begin between this step and the next one.
function drawMarks(plot, marks) {
  const { top, left, width, height } = plot.bbox;
  for (const step of marks) {
    const x = plot.valToPos(step + 0.5, "x", true);
    if (x >= left && x <= left + width) drawDashed(plot.ctx, "--warn", [x, top], [x, top + height]);
  }
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
