// Charts of the last hour. A drag over a chart zooms all of them.

import { getJson } from "./api.js";
import { button, bytes, clock, count, h, labelled, ms, number, percent, select, setText } from "./dom.js";
import { nameOf } from "./now.js";
import { showPeriod } from "./requests.js";

const HOUR = 3600;
const PERIOD_MS = 2000;
const HEIGHT = 170;
// Title, text of a value, and the series: exact names, or a prefix that ends with ":" for one series per worker.
const CHARTS = [
  ["TTFT", ms, ["ttft_p50_ms"]],
  ["Inter-token latency", ms, ["itl_p50_ms", "itl_p99_ms"]],
  ["Tokens per second", count, ["tokens_per_s"]],
  ["Requests per second", (value) => number(value), ["requests_per_s"]],
  ["Requests on workers, queued there, and waiting at the router", count, ["running", "queued", "waiting"]],
  ["Queue lengths", count, ["queue:"]],
  ["KV pool in use", percent, ["kv_usage:"]],
  ["Prefix hits", percent, ["prefix_hit_rate"]],
  ["KV transfer", (value) => (value === null || value === undefined ? "–" : `${bytes(value * 1e9)}/s`), ["transfer_gb_s"]],
];

class Samples {
  time = [];
  series = {};

  // Appends the samples that are newer than the last one.
  append({ time, series }) {
    const newest = this.time.at(-1) ?? 0;
    const start = time.findIndex((at) => at > newest);
    if (start < 0) return;
    const length = this.time.length;
    this.time.push(...time.slice(start));
    for (const [name, values] of Object.entries(series)) {
      this.series[name] ??= new Array(length).fill(null);
      this.series[name].push(...values.slice(start));
    }
    const surplus = Math.max(0, this.time.length - HOUR);
    this.time.splice(0, surplus);
    for (const values of Object.values(this.series)) {
      while (values.length < this.time.length + surplus) values.push(null);
      values.splice(0, surplus);
    }
  }

  names(patterns) {
    return Object.keys(this.series).filter((name) =>
      patterns.some((pattern) => (pattern.endsWith(":") ? name.startsWith(pattern) : name === pattern)));
  }
}

function titleOf(name) {
  const [kind, ...url] = name.split(":");
  return url.length ? nameOf(url.join(":")) : kind.replace(/_/g, " ").replace(/ ms$/, "");
}

function color(index) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--series-${index % 6}`).trim();
}

// Returns the labels of an axis. A label that equals the one before it is left out: half a request is rounded to the same label.
function distinct(text) {
  return (_, ticks) => ticks.map(text).map((label, i, all) => (label === all[i - 1] ? "" : label));
}

// Width of an axis: that of its longest label, the tick and the gap.
function widthOf(plot, labels, index) {
  const { ticks, gap, font } = plot.axes[index];
  plot.ctx.font = font[0];
  const widest = Math.max(0, ...(labels ?? []).map((label) => plot.ctx.measureText(label).width));
  return Math.ceil(widest / devicePixelRatio + ticks.size + gap) + 2;
}

// Indices of the values without neighbours. A line does not contain them, so they are drawn as points.
function lonely(plot, index) {
  const values = plot.data[index];
  const isKnown = (i) => values[i] !== null && values[i] !== undefined;
  return [...values.keys()].filter((i) => isKnown(i) && !isKnown(i - 1) && !isKnown(i + 1));
}

// One chart. `range`: shared x range [from, to]. `onzoom` receives a new one.
class Chart {
  #plot = null;
  #names = "";

  constructor([title, text, patterns], samples, onzoom) {
    Object.assign(this, { title, text, patterns, samples, onzoom });
    this.latest = h("p", { class: "muted" });
    this.box = h("div", { class: "plot", role: "img" });
    this.element = h("article", { class: "chart" }, h("h3", {}, title), this.latest, this.box);
  }

  update(range) {
    const names = this.samples.names(this.patterns);
    if (names.join() !== this.#names || !this.#plot) this.#build(names);
    const values = names.map((name) => this.samples.series[name]);
    const latest = names.map((name, i) => `${titleOf(name)} ${this.text(values[i].at(-1))}`).join(", ");
    setText(this.latest, latest || "no values yet");
    this.box.setAttribute("aria-label", `${this.title}, latest: ${latest || "no values yet"}`);
    this.#plot.setData([this.samples.time, ...values], false);
    this.#plot.setScale("x", { min: range[0], max: range[1] });
  }

  rebuild() {
    this.#plot?.destroy();
    this.#plot = null;
  }

  resize() {
    this.#plot?.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  #build(names) {
    this.rebuild();
    this.#names = names.join();
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--muted").trim(), grid: { stroke: style.getPropertyValue("--line").trim(), width: 1 } };
    const options = {
      width: this.box.clientWidth || 300, height: HEIGHT, legend: { show: names.length > 1, live: false },
      cursor: { sync: { key: "splitserve" }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-3) * 1.1] } },
      axes: [{ ...axis, values: distinct(clock) }, { ...axis, size: widthOf, values: distinct(this.text) }],
      series: [{}, ...names.map((name, i) => ({ label: titleOf(name), stroke: color(i), width: 1.5, points: { show: true, size: 5, fill: color(i), filter: lonely } }))],
      hooks: { setSelect: [(plot) => this.#selected(plot)] },
    };
    this.#plot = new uPlot(options, [this.samples.time, ...names.map((name) => this.samples.series[name])], this.box);
  }

  #selected(plot) {
    if (plot.select.width < 4) return;
    this.onzoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }
}

export function chartsView(root) {
  const samples = new Samples();
  // Zoomed range. null: the last `span` seconds.
  let zoom = null;
  let timer = 0;
  let isOpen = true;
  const charts = CHARTS.map((chart) => new Chart(chart, samples, (range) => { zoom = range; draw(); }));
  const span = select([["300", "5 minutes"], ["900", "15 minutes"], ["3600", "1 hour"]]);
  span.value = "900";
  span.addEventListener("input", () => { zoom = null; draw(); });
  const shown = h("p", { role: "status" });
  const reset = button("Follow the newest", () => { zoom = null; draw(); });
  const problem = h("p", { role: "alert" });
  root.append(h("div", { class: "row" }, labelled("Period", span), button("Zoom in", () => scale(0.5)),
    button("Zoom out", () => scale(2)), button("Earlier", () => move(-0.5)), button("Later", () => move(0.5)), reset,
    button("Requests of this period", () => showPeriod(...range()), { class: "primary" })),
  h("p", { class: "muted" }, "Drag over a chart to zoom. Then list the requests of that period."), shown, problem,
  h("div", { class: "charts" }, charts.map((chart) => chart.element)));

  function range() {
    const end = samples.time.at(-1) ?? Date.now() / 1000;
    return zoom ?? [end - Number(span.value), end];
  }

  function scale(factor) {
    const [from, to] = range();
    const [middle, half] = [(from + to) / 2, Math.max(1, ((to - from) / 2) * factor)];
    zoom = [middle - half, middle + half];
    draw();
  }

  function move(part) {
    const [from, to] = range();
    zoom = [from + (to - from) * part, to + (to - from) * part];
    draw();
  }

  function draw() {
    const [from, to] = range();
    for (const chart of charts) chart.update([from, to]);
    setText(shown, `${clock(from)} to ${clock(to)}`);
    reset.disabled = zoom === null;
  }

  async function refresh() {
    try {
      const since = samples.time.at(-1);
      samples.append(await getJson(since === undefined ? "v1/charts" : `v1/charts?since=${since}`));
      setText(problem, "");
    } catch (error) {
      setText(problem, `The charts could not be read: ${error.message}`);
    }
    if (!isOpen) return;
    draw();
    timer = setTimeout(refresh, PERIOD_MS);
  }

  function recolor() {
    for (const chart of charts) chart.rebuild();
    draw();
  }

  const resized = new ResizeObserver(() => charts.forEach((chart) => chart.resize()));
  resized.observe(root);
  addEventListener("colors", recolor);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", recolor);
  refresh();
  return {
    close() {
      isOpen = false;
      clearTimeout(timer);
      resized.disconnect();
      removeEventListener("colors", recolor);
      dark.removeEventListener("change", recolor);
      for (const chart of charts) chart.rebuild();
    },
  };
}
