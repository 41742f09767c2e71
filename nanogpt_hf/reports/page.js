"use strict";
// Draws the curves and selects the samples. The data is the JSON element; text is inserted as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const BOX = { left: 64, right: 930, top: 10, bottom: 380 };

// The menu: the losses, rewards and pass rates together, a metric of all layers or of all sources together, and every other metric alone.
const families = new Map([["reward", []], ["loss", []]]);
const FAMILY = { "train/loss": "loss", "train/cross_entropy": "loss", "val/loss": "loss", "train/reward": "reward", "val/reward": "reward" };
data.groups.forEach((group) => Object.keys(group.metrics).forEach((name) => {
  const family = FAMILY[name] ?? (name.startsWith("val/pass@") ? "reward" : name).replace(/^layers\/[^/]+\//, "layers/*/").replace(/^((?:val|train)\/\w+)\/.+/, "$1/*");
  if (!families.has(family)) families.set(family, []);
  families.get(family).push({ name, group, values: group.metrics[name], shown: true });
}));
["reward", "loss"].filter((name) => !families.get(name).length).forEach((name) => families.delete(name));
let cursor = null; // the step whose values are shown

const format = {
  value: (v) => v === 0 || (Math.abs(v) >= 0.01 && Math.abs(v) < 1e4) ? String(+v.toPrecision(4)) : v.toExponential(2),
  step: (v) => v.toLocaleString("en"),
  tokens: (v) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(v),
  seconds: (v) => v < 120 ? `${+v.toPrecision(3)} s` : v < 7200 ? `${+(v / 60).toPrecision(3)} min` : `${+(v / 3600).toPrecision(3)} h`,
};

function smoothed(values, span) {
  const decay = 1 - 1 / Math.max(1, span);
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = decay * total + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return total / weight;
  });
}

function ticks(low, high, log) {
  if (log && high / low >= 8) {
    const values = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
      for (const m of high / low > 1000 ? [1] : [1, 2, 5])
        if (m * 10 ** p >= low && m * 10 ** p <= high) values.push(m * 10 ** p);
    return values;
  }
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => +((first + i) * step).toPrecision(12));
}

function scale(low, high, from, to, log) {
  const f = log ? Math.log : (v) => v, span = f(high) - f(low) || 1;
  return (v) => from + ((f(v) - f(low)) / span) * (to - from);
}

function add(parent, kind, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function color(series, all) {
  const index = all.indexOf(series);
  return all.length <= 6 ? `var(--c${index})` : `hsl(205 75% ${75 - (50 * index) / (all.length - 1)}%)`; // deeper layers are darker
}

const axis = (group) => group[get("axis").value];
const positive = (v, log) => v !== null && (!log || v > 0);

function draw() {
  const all = families.get(get("metric").value), shown = all.filter((series) => series.shown), svg = get("chart");
  const by = get("axis").value, logX = get("log-x").checked, logY = get("log-y").checked;
  svg.replaceChildren();
  const lines = shown.map((series) => {
    const long = series.values.length > 40;
    const span = long ? (get("smoothing").value / 100) ** 2 * series.values.length * 0.64 : 1;
    return { series, long: long && span > 1, xs: axis(series.group), ys: smoothed(series.values, span) };
  });
  const end = Math.max(...lines.flatMap(({ xs }) => xs.slice(-1)), 0);
  const late = get("start").checked || logX ? -Infinity : end / 40; // the first losses would flatten all others
  const xs = [], ys = [];
  lines.forEach((line) => line.xs.forEach((x, i) => {
    if (positive(x, logX)) xs.push(x);
    const seen = line.xs.length <= 3 || x >= late;
    if (positive(line.ys[i], logY) && seen) ys.push(line.ys[i]);
  }));
  const range = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  draw.unscale = () => cursor;
  if (!ys.length) return void add(svg, "text", { x: 480, y: 200, "text-anchor": "middle" }, "nothing to draw");
  let [low, high] = range(ys);
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = logY ? [low / 1.03, high * 1.03] : [low - margin, high + margin];
  const [first, last] = range(xs);
  const x = scale(first, last, BOX.left, BOX.right, logX), y = scale(low, high, BOX.bottom, BOX.top, logY);
  const clip = add(add(svg, "clipPath", { id: "box" }), "rect", {
    x: BOX.left, y: BOX.top, width: BOX.right - BOX.left, height: BOX.bottom - BOX.top });
  for (const v of ticks(first, last, logX)) {
    add(svg, "line", { class: "grid", x1: x(v), x2: x(v), y1: BOX.top, y2: BOX.bottom });
    add(svg, "text", { x: x(v), y: BOX.bottom + 20, "text-anchor": "middle" }, format[by](v));
  }
  for (const v of ticks(low, high, logY)) {
    add(svg, "line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: y(v), y2: y(v) });
    add(svg, "text", { x: BOX.left - 8, y: y(v) + 4, "text-anchor": "end" }, format.value(v));
  }
  add(svg, "text", { x: BOX.right, y: BOX.bottom + 33, "text-anchor": "end" }, { step: "step", tokens: "training tokens", seconds: "time" }[by]);
  const path = (xs, ys) => {
    let pen = "M";
    return xs.map((v, i) => {
      if (!positive(v, logX) || !positive(ys[i], logY)) { pen = "M"; return ""; }
      const part = `${pen}${x(v).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
      pen = "L";
      return part;
    }).join("");
  };
  const band = get("metric").value === "loss" && by === "step" && data.band;
  if (band) {
    const inside = band.step.map((s, i) => i).filter((i) => positive(band.step[i], logX) && band.step[i] <= last);
    const edge = (order, side) => order.map((i) => `${x(band.step[i]).toFixed(1)} ${y(band[side][i]).toFixed(1)}`);
    if (inside.length > 1)
      add(svg, "path", { class: "band", "clip-path": "url(#box)", d: `M${[...edge(inside, "low"), ...edge([...inside].reverse(), "high")].join("L")}Z` });
  }
  for (const [step, name] of by === "step" ? data.stages : []) if (step >= first && step <= last) {
    add(svg, "line", { class: "stage", x1: x(step), x2: x(step), y1: BOX.top, y2: BOX.bottom });
    add(svg, "text", { x: x(step) + 4, y: BOX.top + 10 }, name);
  }
  for (const { series, long, xs, ys } of lines) {
    const stroke = color(series, all);
    const attributes = { "clip-path": "url(#box)", "data-series": series.name };
    if (long) add(svg, "path", { ...attributes, class: "raw", d: path(xs, series.values) }).style.stroke = stroke;
    add(svg, "path", { ...attributes, d: path(xs, ys) }).style.stroke = stroke;
    if (!long) xs.forEach((v, i) => {
      if (xs.length <= 60 && positive(v, logX) && positive(ys[i], logY) && y(ys[i]) >= BOX.top)
        add(svg, "circle", { cx: x(v), cy: y(ys[i]), r: 3 }).style.fill = stroke;
    });
  }
  if (cursor !== null) {
    const { group, index } = nearest(cursor, shown), at = x(axis(group)[index]);
    if (Number.isFinite(at)) add(svg, "line", { class: "cursor", x1: at, x2: at, y1: BOX.top, y2: BOX.bottom });
  }
  draw.unscale = (pixel) => { // a pixel on the x axis -> the nearest reported step
    const distances = lines.flatMap((line) => line.xs.map((v, i) => [Math.abs(x(v) - pixel), line.series.group.step[i]]));
    return distances.reduce((a, b) => (b[0] < a[0] ? b : a))[1];
  };
}

function nearest(step, all) { // the event of these series that is nearest to a step
  let best = null;
  for (const { group } of all) group.step.forEach((s, index) => {
    const distance = Math.abs(s - step);
    if (!best || distance < best.distance) best = { group, index, distance };
  });
  return best;
}

function legend() {
  const all = families.get(get("metric").value);
  get("legend").replaceChildren(...all.map((series) => {
    const button = document.createElement("button"), dot = document.createElement("i");
    button.type = "button";
    button.setAttribute("aria-pressed", series.shown);
    dot.style.background = color(series, all);
    const { group, index } = nearest(cursor ?? Infinity, [series]) ?? {};
    const value = group && group.metrics[series.name][cursor === null ? group.step.length - 1 : index];
    const note = group && cursor !== null && group.step[index] !== cursor ? ` (at ${format.step(group.step[index])})` : "";
    button.append(dot, `${series.name} ${value === null || value === undefined ? "–" : format.value(value)}${note}`);
    button.onclick = () => { series.shown = !series.shown || all.every((s) => s === series || !s.shown); show(); };
    return button;
  }));
  if (get("metric").value === "loss" && get("axis").value === "step" && data.band)
    get("legend").append("gray: validation of the reference runs");
  if (cursor === null) return void (get("reading").textContent = "");
  const { group, index } = nearest(cursor, all);
  get("reading").textContent = `step ${format.step(group.step[index])} · ${format.tokens(group.tokens[index])} tokens · ${format.seconds(group.seconds[index])}`;
}

function show() { draw(); legend(); }

if (families.size) {
  get("curves").hidden = false;
  get("metric").append(...[...families.keys()].map((name) => new Option(name, name)));
  get("metric").onchange = () => { cursor = null; show(); };
  ["axis", "smoothing", "log-x", "log-y", "start"].forEach((id) => get(id).addEventListener("input", show));
  document.querySelector(".controls").onsubmit = (event) => event.preventDefault();
  const chart = get("chart");
  chart.onpointermove = (event) => {
    const box = chart.getBoundingClientRect();
    cursor = draw.unscale(((event.clientX - box.left) / box.width) * 960);
    show();
  };
  chart.onpointerleave = () => { cursor = null; show(); };
  chart.onkeydown = (event) => {
    const steps = [...new Set(families.get(get("metric").value).filter((s) => s.shown).flatMap((s) => s.group.step))].sort((a, b) => a - b);
    const index = cursor === null ? (event.key === "ArrowLeft" ? steps.length : -1) : steps.indexOf(cursor);
    const target = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: steps.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    cursor = steps[Math.min(Math.max(target, 0), steps.length - 1)];
    show();
  };
  show();
}

const samples = [...document.querySelectorAll(".sample")];
if (samples.length > 1) {
  const slider = get("step-of-sample");
  get("sample-control").hidden = false;
  slider.max = samples.length - 1;
  const choose = () => {
    samples.forEach((sample, i) => { sample.hidden = i !== +slider.value; });
    slider.setAttribute("aria-valuetext", samples[+slider.value].dataset.name);
  };
  slider.oninput = choose;
  slider.value = samples.length - 1;
  choose();
}
