// View of the cluster as it is now: workers, links between pairs, and events.

import { bytes, clock, count, h, ms, number, percent, setText, shortUrl, svg } from "./dom.js";
import { live } from "./live.js";

const ROLES = [["null", "Colocated workers"], ["prefill", "Prefill workers"], ["decode", "Decode workers"]];
const FIGURES = [
  ["Requests running", (r) => count(r.running - (r.queued ?? 0))], ["Waiting at the router", (r) => count(r.waiting)],
  ["Waiting on workers", (r) => count(r.queued)],
  ["Requests per second", (r) => number(r.requests_per_s)], ["Tokens per second", (r) => count(r.tokens_per_s)],
  ["TTFT p50", (r) => ms(r.ttft_p50_ms)], ["ITL p50", (r) => ms(r.itl_p50_ms)], ["ITL p99", (r) => ms(r.itl_p99_ms)],
];

// Returns an element with one text per name, and a function that sets the texts.
function figures(names) {
  const values = names.map(() => h("dd"));
  const list = h("dl", { class: "figures" }, names.map((name, i) => h("div", {}, h("dt", {}, name), values[i])));
  return [list, (texts) => texts.forEach((text, i) => setText(values[i], text))];
}

const CARD = ["running", "waiting", "step", "tok/s", "KV pool", "prefix hits"];

// Box of one worker.
class WorkerCard {
  #name = h("h4");
  #state = h("p", { class: "state" });
  #pool = h("span", { class: "fill" });
  #queues = h("p", { class: "muted" });
  #set;

  constructor() {
    const [list, set] = figures(CARD);
    this.#set = set;
    this.element = h("article", { class: "worker" }, this.#name, this.#state,
      h("div", { class: "pool", "aria-hidden": "true" }, this.#pool), list, this.#queues);
  }

  update(worker) {
    setText(this.#name, worker.name || shortUrl(worker.url));
    this.#name.title = worker.url;
    this.element.dataset.state = worker.state;
    setText(this.#state, worker.reason ? `${worker.state}: ${worker.reason}` : worker.state);
    this.#pool.style.width = percent(worker.kv_usage ?? 0).replace(" ", "");
    this.#set([count(worker.running), count(worker.waiting), ms(worker.step_ms), count(worker.tokens_per_s),
      percent(worker.kv_usage), percent(worker.prefix_hit_rate)]);
    const queues = Object.entries(worker.queues ?? {}).filter(([, size]) => size);
    if (worker.retracted) queues.push(["retracted", worker.retracted]);
    const texts = queues.map(([name, size]) => `${name} ${size}`);
    if (worker.waiting_reason) texts.push(`waits: ${worker.waiting_reason}`);
    setText(this.#queues, texts.join(", "));
  }
}

export function nowView(root) {
  const [summary, setSummary] = figures(FIGURES.map(([name]) => name));
  const router = h("div", { class: "column" }, h("h3", {}, "Router"), h("article", { class: "worker router" }, summary));
  const columns = ROLES.map(([role, title]) => [role, h("div", { class: "column" }, h("h3", {}, title))]);
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const picture = h("div", { class: "topology" }, lines, router, columns.map(([, column]) => column));
  const links = h("tbody");
  const linkTable = h("table", {}, h("caption", {}, "KV transfers between pairs"),
    h("thead", {}, h("tr", {}, ["From", "To", "Requests", "KV per second"].map((name) => h("th", { scope: "col" }, name)))),
    links);
  const news = h("ol", { class: "events", "aria-live": "polite", "aria-relevant": "additions" });
  const empty = h("p", { class: "muted" }, "No events so far.");
  root.append(picture, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "KV transfers" }, linkTable),
    h("h3", {}, "Events"), empty, news);
  const cards = new Map();
  let newest = null;

  function updateCards() {
    const seen = new Set(live.workers.map((worker) => worker.url));
    for (const [url, card] of cards) if (!seen.has(url)) { card.element.remove(); cards.delete(url); }
    for (const worker of live.workers) {
      if (!cards.has(worker.url)) cards.set(worker.url, new WorkerCard());
      const card = cards.get(worker.url);
      card.update(worker);
      const column = columns.find(([role]) => role === worker.role)?.[1] ?? columns[0][1];
      if (card.element.parentNode !== column) column.append(card.element);
    }
    for (const [, column] of columns) column.hidden = column.childElementCount === 1;
  }

  function updateNews() {
    const until = newest === null ? live.events.length : live.events.indexOf(newest);
    for (const event of live.events.slice(0, until < 0 ? live.events.length : until).reverse()) {
      news.prepend(h("li", { dataset: { kind: event.kind } }, h("time", {}, clock(event.at)), ` ${event.text}`,
        event.rid ? [" ", h("a", { href: `#requests/${encodeURIComponent(event.rid)}` }, "request")] : null));
    }
    while (news.childElementCount > 50) news.lastChild.remove();
    newest = live.events[0] ?? null;
    empty.hidden = news.childElementCount > 0;
  }

  function update() {
    if (!live.state) return;
    setSummary(FIGURES.map(([, text]) => text(live.state.router)));
    updateCards();
    links.replaceChildren(...live.links.map((link) => h("tr", {}, h("td", {}, nameOf(link.prefill)),
      h("td", {}, nameOf(link.decode)), h("td", {}, count(link.requests)), h("td", {}, bytes(link.bytes_per_s)))));
    linkTable.hidden = live.links.length === 0;
    updateNews();
    drawLines(lines, picture, router.lastChild, cards);
  }

  const resized = new ResizeObserver(() => drawLines(lines, picture, router.lastChild, cards));
  resized.observe(picture);
  return { update, close: () => resized.disconnect() };
}

export function nameOf(url) {
  return live.workers.find((worker) => worker.url === url)?.name || shortUrl(url);
}

// Draws the router's connections and the KV transfers. All positions are read before the first change.
function drawLines(lines, picture, router, cards) {
  const frame = picture.getBoundingClientRect();
  const boxes = new Map([...cards].map(([url, card]) => [url, card.element.getBoundingClientRect()]));
  const source = router.getBoundingClientRect();
  const paths = [];
  for (const worker of live.workers) {
    const box = boxes.get(worker.url);
    if (box && worker.role !== "decode") paths.push(line(curve(source, box, frame), "request", 1.5, false));
  }
  for (const link of live.links) {
    const [from, to] = [boxes.get(link.prefill), boxes.get(link.decode)];
    if (!from || !to) continue;
    const width = 1.5 + Math.min(3, Math.log10(1 + (link.bytes_per_s ?? 0) / 1e6));
    paths.push(line(curve(from, to, frame), "kv", width, link.bytes_per_s > 0));
  }
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  lines.replaceChildren(...paths);
}

function line(d, kind, width, flows) {
  return svg("path", { d, class: flows ? `${kind} flows` : kind, "stroke-width": width });
}

// Returns a curve from the right edge of one box to the left edge of another, or downwards if they are stacked.
function curve(from, to, frame) {
  if (to.left >= from.right) {
    const [x, y] = [from.right - frame.left, from.top + from.height / 2 - frame.top];
    const [x2, y2] = [to.left - frame.left, to.top + to.height / 2 - frame.top];
    const middle = (x + x2) / 2;
    return `M${x} ${y}C${middle} ${y} ${middle} ${y2} ${x2} ${y2}`;
  }
  const edge = Math.min(from.left, to.left) - frame.left;
  const [y, y2] = [from.top + from.height / 2 - frame.top, to.top + to.height / 2 - frame.top];
  return `M${edge} ${y}C${edge - 14} ${y} ${edge - 14} ${y2} ${edge} ${y2}`;
}
