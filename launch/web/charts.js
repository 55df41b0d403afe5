"use strict";
// Charts by uPlot (uPlot.LICENSE) of the metrics of one run, or of several. Text goes in as text, never as markup.

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== false) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [limit, scale, suffix] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return trimmed(value / scale, digits) + suffix;
  return size < 1e-4 ? value.toExponential(1).replace(".0e", "e") : trimmed(value, digits);
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(Math.max(digits, Math.abs(value) >= 1000 ? 4 : digits))));
}

function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${String(whole % 60).padStart(2, "0")} s` : ""}`;
  return `${Math.floor(whole / 3600)} h${whole % 3600 >= 60 ? ` ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min` : ""}`;
}

// 25 s, 1:15, 2:05:00
function clock(seconds) {
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${Number(seconds.toFixed(1))} s`;
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))}:${two(whole % 60)}`;
}

// -- which metrics make which chart ----------------------------------------------------------------------------------

// A line is [label, metric]; "*" in a metric stands for any part, which the label repeats.
const CHARTS = [
  { title: "Reward", page: "learning", lines: [["training", "reward/raw_mean"], ["trained on (kept groups)", "reward/mean"], ["held-out", "eval/reward"]] },
  { title: "Reward parts", page: "learning", lines: [["*", "reward/part/*/mean"]] },
  { title: "Reward by source", page: "learning", lines: [["*", "reward/source/*"]] },
  { title: "Held-out reward by set", page: "learning", lines: [["*", "eval/*/reward"]] },
  { title: "Held-out: one of k answers is right", page: "learning", isShare: true, lines: [["k = *", "eval/pass_at_*"]] },
  { title: "Finished groups", page: "learning", isShare: true, lines: [["answers that are right", "reward/pass_rate"], ["groups all right", "reward/all_right"], ["groups all wrong", "reward/all_wrong"]] },
  { title: "Loss", page: "learning", lines: [["loss", "train/loss"], ["value loss", "train/value_loss"]] },
  { title: "Entropy (nats per token)", page: "learning", lines: [["entropy", "train/entropy"]] },
  { title: "Gradient norm", page: "learning", fromZero: true, lines: [["norm", "train/grad_norm"], ["critic", "train/critic_grad_norm"]] },
  { title: "Pairs", page: "learning", isShare: true, lines: [["ranked rightly", "train/accuracy"], ["held-out", "eval/accuracy"]] },
  { title: "Margin of pairs", page: "learning", lines: [["training", "train/margin"], ["held-out", "eval/margin"]] },
  { title: "KL (nats per token)", page: "learning", lines: [["to the behaviour policy", "train/approx_kl"], ["to the reference", "train/kl"]] },
  { title: "Trainer against engine: |log-prob difference|", page: "learning", fromZero: true, lines: [["nats", "train/logprob_diff_abs_mean"]] },
  { title: "Share of clipped tokens", page: "learning", fromZero: true, isShare: true, lines: [["clipped", "train/clip_fraction"]] },
  { title: "Groups without spread of rewards", page: "learning", fromZero: true, lines: [["groups", "reward/zero_std_groups"]] },
  { title: "Learning rate", page: "learning", fromZero: true, lines: [["lr", "train/lr"], ["critic", "train/critic_lr"]] },
  { title: "Lag of the trained groups (versions)", page: "learning", fromZero: true, hasBound: true, lines: [["largest", "lag/max"], ["mean", "lag/mean"], ["smallest", "lag/min"]] },
  { title: "Tokens per second", page: "speed", fromZero: true, lines: [["generated", "rollout/tokens_per_s"], ["in training, with prompts", "train/tokens_per_s"]] },
  { title: "Seconds per step", page: "speed", fromZero: true, lines: [["training", "train/step_s"], ["publishing weights", "weights/publish_s"], ["adopting weights", "weights/adopt_s"]] },
  { title: "Requests in the engines", page: "speed", fromZero: true, lines: [["running", "rollout/running"], ["waiting", "rollout/waiting"]] },
  { title: "Groups in the buffer", page: "speed", fromZero: true, lines: [["under way", "buffer/under_way"], ["dispatched", "buffer/dispatched"], ["requeued", "buffer/requeued"], ["ready", "buffer/ready"], ["claimed", "buffer/claimed"]] },
  { title: "Slots of admission", page: "speed", fromZero: true, lines: [["slots used", "buffer/slots_used"], ["slots total", "buffer/slots_total"]] },
  { title: "Response length (tokens)", page: "speed", lines: [["mean", "batch/response_tokens_mean"], ["median", "batch/response_tokens_p50"], ["p90", "batch/response_tokens_p90"], ["longest", "batch/response_tokens_max"]] },
  { title: "Truncated samples", page: "speed", fromZero: true, isShare: true, lines: [["share", "batch/truncated_fraction"]] },
  { title: "Switching memory (seconds of a step)", page: "speed", fromZero: true, lines: [["in leases", "memory/switch_s"], ["no side computes", "memory/exposed_s"]] },
];
const OVERVIEW = ["Reward", "Loss", "Lag of the trained groups (versions)", "Tokens per second"];
const COMPARED = ["Reward", "Held-out reward by set", "Finished groups", "Loss", "Entropy (nats per token)", "Gradient norm", "Lag of the trained groups (versions)", "Tokens per second", "Seconds per step", "Response length (tokens)"];
const isGauge = (metric) => /^(rollout|buffer)\//.test(metric);

// What is set above the charts, for all of them.
const settings = { smooth: 0.4, isLog: false, axis: "auto" };

// The metrics of a run by name: metric -> [{source, steps, walls, mean, low, high}].
function indexed(past) {
  const found = new Map();
  for (const [metric, source, axis, mean, low, high] of past.series) {
    if (!found.has(metric)) found.set(metric, []);
    found.get(metric).push({ source, steps: past.axes[axis][0], walls: past.axes[axis][1], mean, low, high });
  }
  return { name: past.name, changes: past.changes, bound: past.bound, metrics: found };
}

// The lines of a chart: of each run, of each metric that its spec names.
function linesOf(spec, runs) {
  const lines = [];
  for (const [place, run] of runs.entries())
    for (const [label, pattern] of spec.lines)
      for (const [metric, part] of matching(run.metrics, pattern))
        for (const series of shownOf(run.metrics.get(metric), spec.isWhole)) {
          const name = label.replace("*", part) + (spec.isWhole && series.source && run.metrics.get(metric).length > 1 ? ` ${series.source}` : "");
          lines.push({ ...series, label: runs.length > 1 ? `${run.name}: ${name}` : name, run: place, isGauge: isGauge(metric) });
        }
  return lines.filter((line) => line.mean.length && (!spec.lines[1] || line.mean.some((v) => v) || !isGauge(spec.lines[0][1]))).slice(0, 24);
}

function matching(metrics, pattern) {
  if (!pattern.includes("*")) return metrics.has(pattern) ? [[pattern, ""]] : [];
  const [head, tail] = pattern.split("*");
  const fits = (name) => name.length > head.length + tail.length && name.startsWith(head) && name.endsWith(tail);
  return [...metrics.keys()].filter(fits).map((name) => [name, name.slice(head.length, name.length - tail.length)]);
}

function shownOf(series, isWhole) {
  if (isWhole) return series.slice(0, 12);
  return [series.find((one) => one.source === "") ?? series[0]];
}

// -- one chart -------------------------------------------------------------------------------------------------------

const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const DASHES = [undefined, [6, 4], [2, 3], [8, 3, 2, 3]];

// Mean over a centred window, cut off at the ends; null stays null.
function smoothed(values, share) {
  const half = Math.round(share * share * values.length / 4);
  if (half < 1) return values;
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value !== null));
  }
  return values.map((value, i) => {
    const first = Math.max(0, i - half), last = Math.min(values.length, i + half + 1);
    return value === null ? null : (sums[last] - sums[first]) / (counts[last] - counts[first]);
  });
}

class Chart {
  constructor(spec, getRuns) {
    this.spec = spec;
    this.getRuns = getRuns;
    this.box = el("div", { class: "plot" });
    this.node = el("figure", { class: "chart", "aria-label": spec.title }, el("figcaption", {}, el("b", {}, spec.title)), this.box);
    this.isSeen = false;
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  // Draw what is new; the stretch that was zoomed into stays.
  draw() {
    if (!this.isSeen || !this.box.clientWidth) return;
    const table = this.table();
    const key = JSON.stringify([table.series.map((s) => [s.label, s.dash]), table.isTime, settings.isLog && table.hasLog, settings.smooth > 0, themed("bg")]);
    const zoom = this.plot && this.isZoomed && this.key === key ? { ...this.plot.scales.x } : null;
    if (this.plot && this.key === key) {
      this.marks = table.marks;
      this.plot.setData(table.data, !zoom);
      if (zoom) this.plot.setScale("x", { min: zoom.min, max: zoom.max });
      return;
    }
    this.plot?.destroy();
    this.key = key;
    this.marks = table.marks;
    this.isZoomed = false;
    this.plot = new uPlot(this.options(table), table.data, this.box);
  }

  table() {
    const { spec } = this, runs = this.getRuns(), lines = linesOf(spec, runs);
    const isTime = settings.axis === "auto" ? lines.some((line) => line.isGauge) : settings.axis === "time";
    const hasLog = lines.some((line) => line.mean.some((v) => v > 0));
    const cut = (values) => (settings.isLog && hasLog ? values.map((v) => (v > 0 ? v : null)) : values);
    const parts = [], series = [], bands = [];
    for (const [i, line] of lines.entries()) {
      const isMany = runs.length > 1;
      const look = { label: line.label, stroke: themed(COLOURS[(isMany ? line.run : i) % COLOURS.length]), dash: isMany ? DASHES[spec.lines.length > 1 ? lines.filter((l) => l.run === line.run).indexOf(line) % DASHES.length : 0] : undefined };
      const x = isTime ? line.walls : line.steps, raw = cut(line.mean);
      const isSmooth = settings.smooth > 0 && raw.length >= 20;
      parts.push([x, isSmooth ? smoothed(raw, settings.smooth) : raw]);
      series.push({ ...look, width: 1.7, spanGaps: true, points: { show: raw.length <= 30, size: 5, fill: look.stroke }, value: (_, v) => this.said(v) });
      if (isSmooth) {
        parts.push([x, raw]);
        series.push({ ...look, class: "raw", width: 1, alpha: 0.28, spanGaps: true, points: { show: false } });
      }
      if (line.low && !isMany) {
        parts.push([x, cut(line.low)], [x, cut(line.high)]);
        series.push(...[0, 1].map(() => ({ ...look, class: "raw", width: 0, spanGaps: true, points: { show: false } })));
        bands.push({ series: [series.length, series.length - 1], fill: `${look.stroke}22` });
      }
    }
    if (spec.hasBound && !isTime && runs.length === 1 && runs[0].bound.length) {
      parts.push([runs[0].bound.map((p) => p[0]), runs[0].bound.map((p) => p[1])]);
      series.push({ label: "bound", stroke: themed("c5"), dash: [5, 4], width: 1.5, spanGaps: true, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), value: (_, v) => this.said(v) });
    }
    const marks = runs.length === 1 ? runs[0].changes.filter((c) => c.isDone && (isTime || c.step >= 0)).map((c) => [isTime ? c.after : c.step, String(c.number)]) : [];
    return { data: parts.length ? joined(parts) : [[]], series, bands, isTime, hasLog, marks };
  }

  said(value) {
    return value === null || value === undefined ? "-" : this.spec.isShare ? `${short(value * 100)} %` : short(value, 4);
  }

  options({ series, bands, isTime, hasLog }) {
    const soft = themed("soft"), grid = { stroke: themed("grid"), width: 1 };
    const axis = { stroke: soft, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
    const isLog = settings.isLog && hasLog;
    const range = isLog ? undefined : (_, low, high) => {
      if (low === null || (low === 0 && high === 0)) return [0, 1];
      return this.spec.fromZero ? uPlot.rangeNum(Math.min(0, low), Math.max(high, 1e-12), { min: { pad: low < 0 ? 0.1 : 0, soft: 0, mode: 1 }, max: { pad: 0.1, mode: 2 } }) : uPlot.rangeNum(low, high, 0.1, true);
    };
    return {
      width: this.box.clientWidth, height: 210, bands,
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, ...(range ? { range } : {}) } },
      cursor: { sync: { key: isTime ? "time" : "step" }, drag: { x: true, y: false }, points: { size: 6 } },
      legend: { live: true },
      axes: [
        { ...axis, size: 26, space: isTime ? 64 : 56, values: (_, ticks) => ticks.map((v) => (v === null ? "" : isTime ? clock(v) : short(v, 6))) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((v) => (v === null ? "" : this.said(v))) },
      ],
      series: [{ label: isTime ? "after" : "step", value: (_, v) => (v === null || v === undefined ? "-" : isTime ? duration(v) : short(v, 7)) }, ...series],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setSelect: [(plot) => { this.isZoomed = plot.select.width > 0; }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => { this.isZoomed = false; })],
        setSeries: [(plot, i, change) => {
          if (!i || change.show === undefined) return;
          for (let j = i + 1; j < plot.series.length && plot.series[j].class === "raw"; j += 1) if (plot.series[j].show !== change.show) plot.setSeries(j, { show: change.show });
        }],
      },
    };
  }

  // Vertical lines where something was changed, with the number of the change.
  drawMarks(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = themed("accent");
    ctx.setLineDash([3 * ratio, 2 * ratio]);
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    const labels = [];
    for (const [x, number] of this.marks) {
      const at = plot.valToPos(x, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      if (labels.length && at - labels.at(-1).at < 12 * ratio) labels.at(-1).last = number; // neighbours share a label
      else labels.push({ at, first: number, last: number });
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    for (const { at, first, last } of labels) ctx.fillText(first === last ? first : `${first}-${last}`, at + 3 * ratio, bbox.top + 10 * ratio);
    ctx.restore();
  }

  resize() {
    if (!this.plot) this.draw();
    else if (this.box.clientWidth && this.box.clientWidth !== this.plot.width) this.plot.setSize({ width: this.box.clientWidth, height: 210 });
  }
}

// uPlot's own join needs each x once; several readings at one x keep the last.
function joined(parts) {
  return uPlot.join(parts.map(([x, y]) => {
    const last = new Map();
    x.forEach((at, i) => last.set(at, y[i]));
    const sorted = [...last.keys()].sort((a, b) => a - b);
    return [sorted, sorted.map((at) => last.get(at) ?? null)];
  }));
}

// Charts in a box, each drawn when it first comes into view.
class ChartBox {
  constructor(node, getRuns) {
    this.node = node;
    this.getRuns = getRuns;
    this.charts = new Map();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((e) => e.isIntersecting)) {
        const chart = [...this.charts.values()].find((c) => c.node === entry.target);
        if (chart && !chart.isSeen) { chart.isSeen = true; chart.draw(); }
      }
    }, { rootMargin: "400px" });
  }

  // Specs of charts that have anything to show.
  show(specs, empty) {
    const runs = this.getRuns(), shown = specs.filter((spec) => linesOf(spec, runs).length);
    for (const spec of shown)
      if (!this.charts.has(spec.title)) {
        const chart = new Chart(spec, this.getRuns);
        this.charts.set(spec.title, chart);
        this.observer.observe(chart.node);
      }
    const nodes = shown.map((spec) => this.charts.get(spec.title).node);
    if (nodes.length !== this.node.children.length || nodes.some((node, i) => node !== this.node.children[i]))
      this.node.replaceChildren(...(nodes.length ? nodes : [el("p", { class: "empty" }, empty)]));
    this.redraw();
  }

  redraw() {
    for (const chart of this.charts.values()) if (chart.node.isConnected) chart.draw();
  }
}

// Every metric as a chart of its own, by name.
function specsOfAll(runs, words) {
  const names = [...new Set(runs.flatMap((run) => [...run.metrics.keys()]))].sort();
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return names.filter((name) => wanted.every((word) => name.toLowerCase().includes(word))).map((name) => ({ title: name, page: "metrics", isWhole: true, lines: [["", name]].map(([, metric]) => [metric, metric]) }));
}

// -- lanes: what each actor did when ---------------------------------------------------------------------------------

// Each lane is of stretches with the shares of the time in them (bins); by GPU where actors have one.
function drawLanes(node, lanes, kinds, left, right) {
  const said = el("p", { class: "keys lanesaid" }, "\u00a0"), rows = [];
  let device = "";
  for (const lane of [...lanes].sort((a, b) => (a.devices ? 0 : 1) - (b.devices ? 0 : 1) || a.devices.localeCompare(b.devices))) {
    if (lane.devices !== device) rows.push(el("p", { class: "nodename" }, lane.devices || "without a GPU"));
    device = lane.devices;
    const canvas = el("canvas", { class: "lane", role: "img", "aria-label": `${lane.actor}: what it did when` });
    rows.push(el("div", { class: "lanerow" }, el("span", { class: "who" }, lane.actor), canvas));
    const paint = () => paintLane(canvas, lane, kinds, left, right);
    new ResizeObserver(paint).observe(canvas);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      said.textContent = `${lane.actor} ${laneWords(lane, kinds, left + ((event.clientX - box.left) / box.width) * (right - left))}`;
    });
  }
  const ends = el("div", { class: "lanerow ends" }, el("span", {}), el("span", { class: "span" }, el("span", {}, duration(left)), el("span", {}, duration(right))));
  node.replaceChildren(...rows, ends, said);
}

function paintLane(canvas, lane, kinds, left, right) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth * ratio, height = canvas.clientHeight * ratio;
  if (!width) return;
  [canvas.width, canvas.height] = [width, height];
  const ctx = canvas.getContext("2d"), at = (seconds) => ((seconds - left) / (right - left)) * width;
  const colour = (kind) => themed(kinds.includes(kind) ? kind : "other");
  ctx.fillStyle = themed("grid");
  ctx.fillRect(0, 0, width, height);
  for (const [start, end, ...shares] of lane.bins) {
    let top = height;
    shares.forEach((share, i) => {
      if (share <= 0) return;
      top -= share * height;
      ctx.fillStyle = colour(kinds[i]);
      ctx.fillRect(at(start), top, Math.max(ratio, at(end) - at(start)) + 0.6, share * height + 0.6);
    });
  }
}

function laneWords(lane, kinds, seconds) {
  const bin = lane.bins.findLast((b) => b[0] <= seconds);
  if (!bin) return "";
  const shares = kinds.map((kind, i) => [bin[i + 2], kind]).filter(([share]) => share >= 0.005).sort((a, b) => b[0] - a[0]);
  return `after ${duration(Math.max(0, bin[0]))}: ${shares.map(([share, kind]) => `${kind} ${Math.round(share * 100)} %`).join(", ")}`;
}
