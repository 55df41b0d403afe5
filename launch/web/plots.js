// Plots as inline SVG. Knows numbers and one palette by class; text goes in as text, never as markup.
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 560, HEIGHT = 210, LEFT = 54, RIGHT = 14, TOP = 14, BOTTOM = 30;
const MARK_ROOM = 13, SMOOTH_FROM = 60;

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  return filled(node, attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(NS, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== false) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function short(value, digits = 3) {
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

export function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

const scale = (low, high, start, end) => Object.assign((v) => start + ((v - low) / (high - low)) * (end - start), { low, high });

function ticks(low, high, num) {
  const power = 10 ** Math.floor(Math.log10((high - low) / num));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= ((high - low) / num) * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i += 1) found.push(i * step);
  return found.length ? found : [low];
}

function timeAxis(lastSeconds) {
  if (lastSeconds <= 300) return [1, "seconds since the start"];
  return lastSeconds <= 7200 ? [60, "minutes since the start"] : [3600, "hours since the start"];
}

// One chart: lines of [x, mean, lowest, highest]; x is a step, or wall seconds.
export function lineChart(chart, startWall, changes) {
  const isTime = chart.x === "time";
  const all = chart.lines.flatMap((line) => line.points);
  const last = Math.max(...all.map((p) => p[0]));
  const [unit, label] = isTime ? timeAxis(last - startWall) : [1, "step"];
  const place = isTime ? (x) => (x - startWall) / unit : (x) => x;
  const xs = all.map((p) => place(p[0]));
  const x = spread(Math.min(...xs), Math.max(...xs), LEFT, WIDTH - RIGHT);
  const y = yScale(all, chart.fromZero);
  const yText = chart.isShare ? (v) => `${Math.round(v * 100)} %` : (v) => short(v);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": spoken(chart, yText) });
  drawGrid(picture, x, y, label, yText);
  drawMarks(picture, x, changes.map((c) => ({ ...c, at: isTime ? place(c.wall_s) : c.step })).filter((c) => isTime || c.step >= 0));
  for (const line of chart.lines) drawLine(picture, line, (p) => x(place(p[0])), y);
  const figure = el("figure", { class: "chart" }, caption(chart), picture);
  const unitName = label.split(" ")[0];
  const xText = (v) => (isTime ? `${short(place(v))} ${unitName}` : `step ${Math.round(v)}`);
  hover(figure, picture, chart.lines, (p) => x(place(p[0])), y, xText, yText);
  return figure;
}

const spread = (low, high, start, end) => scale(low, high > low ? high : low + 1, start, end);

function yScale(points, fromZero) {
  let low = Math.min(...points.map((p) => p[2])), high = Math.max(...points.map((p) => p[3]));
  if (fromZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return scale(fromZero && low === 0 ? 0 : low - margin, high + margin, HEIGHT - BOTTOM, TOP);
}

function drawGrid(picture, x, y, label, yText) {
  for (const tick of ticks(y.low, y.high, 5)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    picture.append(text(LEFT - 6, y(tick) + 3.5, yText(tick), "end"));
  }
  for (const tick of ticks(x.low, x.high, 6)) picture.append(text(x(tick), HEIGHT - BOTTOM + 14, short(tick, 6)));
  picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  picture.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, label));
}

function text(x, y, words, anchor = "middle", css = "tick") {
  return svg("text", { class: css, x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, words);
}

function drawMarks(picture, x, marks) {
  const clusters = [];
  for (const mark of marks.filter((m) => m.result === "done" && m.at >= x.low && m.at <= x.high).sort((a, b) => a.at - b.at)) {
    const last = clusters.at(-1);
    if (last && x(mark.at) - x(last[0].at) < MARK_ROOM) last.push(mark);
    else clusters.push([mark]);
  }
  for (const cluster of clusters) {
    const [left, right] = [x(cluster[0].at), x(cluster.at(-1).at)];
    const name = cluster.length === 1 ? `${cluster[0].number}` : `${cluster[0].number}-${cluster.at(-1).number}`;
    const group = svg("g", {}, svg("title", {}, cluster.map((c) => `${c.number}: ${c.what}${c.who ? ` by ${c.who}` : ""}`).join("\n")));
    group.append(svg("rect", { class: "target", x: left - 6, y: 0, width: right - left + 12, height: HEIGHT - BOTTOM }));
    for (const at of new Set(cluster.map((c) => x(c.at).toFixed(1)))) group.append(svg("line", { class: "change", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    group.append(text((left + right) / 2, TOP - 3, name, "middle", "tick changetext"));
    picture.append(group);
  }
}

function drawLine(picture, line, px, y) {
  const css = `c${line.colour}`;
  if (line.points.some((p) => p[3] > p[2])) {
    const up = line.points.map((p) => `${px(p).toFixed(1)},${y(p[3]).toFixed(1)}`);
    const down = line.points.map((p) => `${px(p).toFixed(1)},${y(p[2]).toFixed(1)}`).reverse();
    picture.append(svg("polygon", { class: `band ${css}`, points: [...up, ...down].join(" ") }));
  }
  const isSmoothed = line.noisy && line.points.length >= SMOOTH_FROM;
  const path = (points, more) => svg("polyline", { class: `${css}${more}`, points: points.map((p) => `${px(p).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") });
  if (isSmoothed) picture.append(path(line.points, " faint"));
  picture.append(path(isSmoothed ? movingMean(line.points) : line.points, line.dashed ? " dashed" : ""));
  if (line.dots || line.points.length === 1)
    for (const p of line.points.slice(-60)) picture.append(svg("circle", { class: css, cx: px(p), cy: y(p[1]), r: 3 }));
}

function movingMean(points) {
  const half = Math.max(2, Math.floor(points.length / 24));
  const sums = [0];
  for (const p of points) sums.push(sums.at(-1) + p[1]);
  return points.map((p, i) => {
    const [first, last] = [Math.max(0, i - half), Math.min(points.length - 1, i + half)];
    return [p[0], (sums[last + 1] - sums[first]) / (last + 1 - first)];
  });
}

function caption(chart) {
  const keys = chart.lines.length > 1 ? chart.lines.map((line) => el("span", { class: `key c${line.colour}` }, line.name)) : [];
  return el("figcaption", {}, el("b", {}, chart.title), el("span", { class: "keys" }, ...keys));
}

function spoken(chart, yText) {
  const facts = chart.lines.map((l) => `${l.name} from ${yText(l.points[0][1])} to ${yText(l.points.at(-1)[1])}`);
  return `${chart.title}: ${facts.join("; ")}`;
}

function hover(figure, picture, lines, px, y, xText, yText) {
  const rule = svg("line", { class: "hover", y1: TOP, y2: HEIGHT - BOTTOM });
  const dots = lines.map((line) => svg("circle", { class: `c${line.colour}`, r: 3.5 }));
  const tip = el("div", { class: "tip" });
  const show = (isShown) => {
    tip.hidden = !isShown;
    for (const node of [rule, ...dots]) node.style.display = isShown ? "" : "none";
  };
  picture.append(rule, ...dots);
  figure.append(tip);
  show(false);
  picture.addEventListener("pointerleave", () => show(false));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const ratio = WIDTH / box.width;
    const at = (event.clientX - box.left) * ratio;
    const near = (points) => points.reduce((a, b) => (Math.abs(px(b) - at) < Math.abs(px(a) - at) ? b : a));
    const found = lines.map((line) => near(line.points));
    const closest = near(found);
    show(true);
    const words = [xText(closest[0])];
    found.forEach((point, i) => {
      const isNear = Math.abs(px(point) - px(closest)) < 40;
      dots[i].style.display = isNear ? "" : "none";
      dots[i].setAttribute("cx", px(point));
      dots[i].setAttribute("cy", y(point[1]));
      if (isNear) words.push(`${lines.length > 1 ? `${lines[i].name} ` : ""}${yText(point[1])}`);
    });
    tip.textContent = words.join("\n");
    rule.setAttribute("x1", px(closest));
    rule.setAttribute("x2", px(closest));
    placeTip(figure, tip, box, px(closest) / ratio);
  });
}

function placeTip(figure, tip, box, x) {
  const outer = figure.getBoundingClientRect();
  const left = box.left - outer.left + x;
  const isRight = left + tip.offsetWidth + 18 < figure.clientWidth;
  tip.style.left = `${isRight ? left + 12 : Math.max(4, left - tip.offsetWidth - 12)}px`;
  tip.style.top = `${box.top - outer.top + 14}px`;
}

// One actor's time: a strip of stacked shares over wall time; all strips share one axis.
export function timeStrip(strip, kinds, startWall, endWall, hasAxis) {
  const width = 1200, height = hasAxis ? 78 : 56, bottom = hasAxis ? 26 : 4, high = height - bottom;
  const [unit, label] = timeAxis(endWall - startWall);
  const x = spread(0, (endWall - startWall) / unit, 0, width);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${strip.actor}: shares of its time` });
  picture.append(svg("rect", { class: "k-none", x: 0, y: 0, width, height: high }));
  for (const [at, ...shares] of strip.bins) {
    const left = Math.max(0, x((at - startWall) / unit));
    const right = Math.min(width, x((at + strip.width_s - startWall) / unit));
    let top = high;
    shares.forEach((share, i) => {
      if (share <= 0) return;
      top -= share * high;
      picture.append(svg("rect", { class: `k-${kinds[i]}`, x: left.toFixed(2), y: top.toFixed(2), width: Math.max(0.5, right - left).toFixed(2), height: (share * high).toFixed(2) }));
    });
  }
  if (hasAxis) {
    for (const tick of ticks(x.low, x.high, 8)) picture.append(text(Math.min(width - 8, Math.max(8, x(tick))), high + 13, short(tick, 6)));
    picture.append(text(width / 2, height - 1, label));
  }
  const figure = el("figure", { class: "chart strip" }, el("figcaption", {}, el("b", {}, strip.actor)), picture);
  stripHover(figure, picture, strip, kinds, width, (v) => x((v - startWall) / unit), (v) => `${short((v - startWall) / unit)} ${label.split(" ")[0]}`);
  return figure;
}

function stripHover(figure, picture, strip, kinds, width, px, xText) {
  const tip = el("div", { class: "tip" });
  tip.hidden = true;
  figure.append(tip);
  picture.addEventListener("pointerleave", () => { tip.hidden = true; });
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) * width) / box.width;
    const bin = strip.bins.findLast((b) => px(b[0]) <= at);
    tip.hidden = !bin;
    if (!bin) return;
    const shares = kinds.map((kind, i) => [bin[i + 1], kind]).filter(([share]) => share >= 0.005).sort((a, b) => b[0] - a[0]);
    tip.textContent = [xText(bin[0]), ...shares.map(([share, kind]) => `${kind} ${Math.round(share * 100)} %`)].join("\n");
    placeTip(figure, tip, box, event.clientX - box.left);
  });
}
