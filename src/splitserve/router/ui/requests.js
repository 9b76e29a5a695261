// View of the requests: filters, a list that renders only its visible rows, and the waterfall of one request.

import { getJson } from "./api.js";
import { button, clock, count, h, labelled, ms, select, setText } from "./dom.js";
import { live } from "./live.js";
import { nameOf } from "./now.js";
import { showTrace } from "./waterfall.js";

const ROW = 32;
const SPARE_ROWS = 6;
const MAX_RECORDS = 10000;
const SLOW_SHARE = 0.05;
const COLUMNS = [
  ["rid", (r) => r.request_id || r.rid], ["state", (r) => stateOf(r)], ["started", (r) => clock(r.started_at)],
  ["TTFT", (r) => ms(r.ttft_ms)], ["total", (r) => ms(r.e2e_ms)],
  ["tokens", (r) => `${count(r.prompt_tokens)} / ${count(r.output_tokens)}`],
  ["workers", (r) => Object.values(r.workers).map(nameOf).join(" > ")],
  ["moves", (r) => moves(r)],
];
const ORDERS = {
  newest: (a, b) => b.started_at - a.started_at,
  ttft: (a, b) => (b.ttft_ms ?? -1) - (a.ttft_ms ?? -1),
  total: (a, b) => (b.e2e_ms ?? -1) - (a.e2e_ms ?? -1),
};
// Generation of the live state for which older summaries were read. They are read when the list is first opened.
let loaded = -1;
// Filters are kept when the view closes, so that they are unchanged after a look at one request.
const filter = { text: "", worker: "", state: "", slow: false, error: false, order: "newest", from: null, to: null };

function stateOf(summary) {
  if (summary.state === "running") return summary.ttft_ms === null ? "dispatched" : "streaming";
  if (summary.state === "waiting") return "waiting";
  return summary.error || summary.status >= 400 ? `error ${summary.status}` : "done";
}

function moves(summary) {
  const parts = [];
  if (summary.retries) parts.push(`${summary.retries} retried`);
  if (summary.migrations) parts.push(`${summary.migrations} migrated`);
  return parts.join(", ");
}

// Lists only the requests of a period, in unix seconds, and reads its older summaries from the router.
export async function showPeriod(from, to) {
  Object.assign(filter, { from, to });
  location.hash = "#requests";
  await addRecords(from);
}

// Adds summaries older than those of the live stream. Errors are ignored, because the stream reports a lost router.
async function addRecords(since) {
  const answer = await getJson(`v1/traces?since=${since}&limit=${MAX_RECORDS}`).catch(() => ({ traces: [] }));
  live.add(answer.traces.reverse());
}

function matching() {
  let found = [];
  for (const summary of live.requests.values()) {
    if (filter.from !== null && (summary.started_at > filter.to || endOf(summary) < filter.from)) continue;
    if (filter.text && !summary.rid.includes(filter.text) && !summary.request_id.includes(filter.text)) continue;
    if (filter.worker && !Object.values(summary.workers).includes(filter.worker)) continue;
    if (filter.state && summary.state !== filter.state) continue;
    if (filter.error && !summary.error && !(summary.status >= 400)) continue;
    found.push(summary);
  }
  if (filter.slow) {
    const times = found.map((r) => r.ttft_ms ?? 0).sort((a, b) => b - a);
    const limit = times[Math.floor(times.length * SLOW_SHARE)] ?? 0;
    found = found.filter((r) => (r.ttft_ms ?? 0) >= limit);
  }
  return found.sort(ORDERS[filter.order]);
}

function endOf(summary) {
  return summary.state !== "done" ? Infinity : summary.started_at + (summary.e2e_ms ?? 0) / 1000;
}

// List of requests with one element per visible row.
class VirtualList {
  #rows = [];
  #items = [];
  #active = 0;
  #frame = 0;

  constructor(onopen) {
    this.onopen = onopen;
    this.body = h("div", { class: "rows", role: "rowgroup" });
    const head = h("div", { class: "request head", role: "row", "aria-rowindex": "1" },
      COLUMNS.map(([name]) => h("span", { role: "columnheader" }, name)));
    this.element = h("div", { class: "list", role: "grid", tabindex: "0", "aria-label": "Requests",
      onscroll: () => this.#plan(), onkeydown: (event) => this.#key(event) },
    h("div", { role: "rowgroup", class: "listhead" }, head), this.body);
  }

  set items(items) {
    const active = this.#items[this.#active]?.rid;
    this.#items = items;
    const at = active === undefined ? 0 : items.findIndex((item) => item.rid === active);
    this.#active = Math.max(0, Math.min(at < 0 ? this.#active : at, items.length - 1));
    this.body.style.height = `${items.length * ROW}px`;
    this.element.setAttribute("aria-rowcount", items.length + 1);
    this.#plan();
  }

  #plan() {
    this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#render(); });
  }

  #render() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE_ROWS);
    const visible = Math.ceil(this.element.clientHeight / ROW) + 2 * SPARE_ROWS;
    const last = Math.min(this.#items.length, first + visible);
    while (this.#rows.length < last - first) this.#rows.push(this.#newRow());
    this.#rows.forEach((row, i) => {
      row.element.hidden = first + i >= last;
      if (first + i < last) this.#fill(row, first + i);
    });
    const active = this.#rows.find((row) => !row.element.hidden && row.index === this.#active);
    if (active) this.element.setAttribute("aria-activedescendant", active.element.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  #newRow() {
    const cells = COLUMNS.map(() => h("span", { role: "gridcell" }));
    const element = h("div", { class: "request", role: "row", id: `row-${this.#rows.length}` }, cells);
    const row = { element, cells, index: -1 };
    element.addEventListener("click", () => this.#open(row.index));
    this.body.append(element);
    return row;
  }

  #fill(row, index) {
    const item = this.#items[index];
    if (row.index !== index) {
      row.index = index;
      row.element.style.transform = `translateY(${index * ROW}px)`;
      row.element.setAttribute("aria-rowindex", index + 2);
    }
    row.element.classList.toggle("active", index === this.#active);
    row.element.dataset.state = stateOf(item).split(" ")[0];
    COLUMNS.forEach(([, text], i) => setText(row.cells[i], text(item)));
  }

  #open(index) {
    this.#active = index;
    this.onopen(this.#items[index]);
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const moves_ = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && this.#items.length) this.#open(this.#active);
    else if (event.key in moves_) this.#moveTo(this.#active + moves_[event.key]);
    else return;
    event.preventDefault();
  }

  #moveTo(index) {
    this.#active = Math.max(0, Math.min(this.#items.length - 1, index));
    const top = this.#active * ROW;
    const room = this.element.clientHeight - 2 * ROW;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top > this.element.scrollTop + room) this.element.scrollTop = top - room;
    this.#plan();
  }
}

export function requestsView(root, rid) {
  return rid ? oneRequest(root, rid) : listOfRequests(root);
}

function oneRequest(root, rid) {
  const abort = new AbortController();
  const box = h("div", {});
  root.append(h("p", {}, h("a", { href: "#requests" }, "All requests")), box);
  showTrace(box, rid, abort.signal);
  return { close: () => abort.abort() };
}

function listOfRequests(root) {
  const total = h("p", { role: "status", class: "muted" });
  const list = new VirtualList((summary) => { location.hash = `#requests/${encodeURIComponent(summary.rid)}`; });
  const workers = select([["", "all"]], {});
  let urls = "";
  const period = button("", () => { Object.assign(filter, { from: null, to: null }); update(); });
  const controls = [
    bound("Search id", h("input", { type: "search" }), "text"), bound("Worker", workers, "worker"),
    bound("State", select([["", "all"], ["waiting", "waiting"], ["running", "in flight"], ["done", "done"]]), "state"),
    bound("Order", select([["newest", "newest first"], ["ttft", "slowest first token"], ["total", "slowest in total"]]), "order"),
    bound("Slowest 5 %", h("input", { type: "checkbox" }), "slow"), bound("Errors", h("input", { type: "checkbox" }), "error"),
  ];
  root.append(h("form", { class: "row", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() }, controls, period),
    total, list.element);

  function bound(text, control, name) {
    const property = control.type === "checkbox" ? "checked" : "value";
    control[property] = filter[name];
    control.addEventListener("input", () => { filter[name] = control[property]; update(); });
    return labelled(text, control);
  }

  function update() {
    if (loaded !== live.generation && live.state) {
      loaded = live.generation;
      addRecords(0);
    }
    const known = live.workers.map((worker) => worker.url);
    if (known.join() !== urls) {
      urls = known.join();
      workers.replaceChildren(...[["", "all"], ...known.map((url) => [url, nameOf(url)])]
        .map(([value, text]) => h("option", { value }, text)));
      workers.value = filter.worker;
    }
    const found = matching();
    list.items = found;
    setText(total, `${count(found.length)} of ${count(live.requests.size)} requests`);
    period.hidden = filter.from === null;
    if (filter.from !== null) setText(period, `Only ${clock(filter.from)} to ${clock(filter.to)}: show all times`);
  }
  return { update };
}
