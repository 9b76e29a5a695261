// Waterfall of one request: its stages, what they mean, and the other requests in the same steps.

import { ApiError, getJson } from "./api.js";
import { button, clock, count, h, labelled, ms, percent, plural, setText, shortUrl } from "./dom.js";
import { STAGES, UNKNOWN } from "./stages.js";

// Attempts to read the trace of a request that has just ended.
const ATTEMPTS = 5;
const PAUSE_MS = 300;
const MAX_STEPS = 512;

// Reads the trace of a request and fills `root` with it. `signal` ends the attempts.
export async function showTrace(root, rid, signal) {
  root.replaceChildren(h("p", { role: "status" }, "Loading the timeline."));
  try {
    const report = await readReport(rid, signal);
    if (!signal?.aborted) root.replaceChildren(...traceParts(report));
  } catch (error) {
    if (signal?.aborted) return;
    const text = error.status === 404 ? "The router has no timeline of this request. The request is running, was not sampled, or ended too long ago."
      : `The timeline could not be read: ${error.message}`;
    root.replaceChildren(h("p", { role: "status" }, text));
  }
}

async function readReport(rid, signal) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return await getJson(`v1/trace/${encodeURIComponent(rid)}`, { signal });
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404 || attempt === ATTEMPTS) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}

function traceParts(report) {
  const workers = Object.entries(report.workers).map(([role, url]) => `${role} ${shortUrl(url)}`).join(", ");
  const facts = [
    ["Request", report.rid], ["Client's id", report.request_id || "–"], ["Trace", report.trace_id], ["Route", report.route],
    ["Status", report.error ? `${report.status}: ${report.error}` : report.status],
    ...(report.error_message ? [["Error", report.error_message]] : []),
    ["Started", clock(report.started_at)], ["TTFT", ms(report.ttft_ms)], ["Total", ms(report.e2e_ms)],
    ["Unaccounted", ms(report.unaccounted_ms)],
    ["Tokens", `${count(report.prompt_tokens)} in (${count(report.num_cached_tokens)} cached), ${count(report.output_tokens)} out`],
    ["Workers", workers], ["Attempts", `${report.attempts} (${plural(report.retries, "retry", "retries")}, ${plural(report.migrations, "migration", "migrations")})`],
    ["Clocks", report.clocks.map((c) => `${shortUrl(c.worker)} ${c.offset_ms.toFixed(3)} ± ${c.error_ms.toFixed(3)} ms`).join(", ")],
  ];
  const list = h("dl", { class: "facts" }, facts.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(text)))));
  const note = "Stages of different workers overlap. The column \"of TTFT\" counts every moment once: with the unaccounted time it adds up "
    + "to the time to the first token (TTFT). Open a stage to read what it means.";
  const silent = report.silent_workers.length ? h("p", { role: "note" }, `Stages of ${report.silent_workers.map(shortUrl).join(", ")} are `
    + "missing: the worker sent no report. It died, the client left, or it records no timelines.") : null;
  return [list, h("h3", {}, "Timeline"), causes(report), h("p", { class: "muted" }, note), silent, ...timeline(report), ...neighbours(report)]
    .filter((part) => part !== null);
}

// Returns the groups of stages with one name and place, the one with the largest part of the TTFT first.
function groupsOf(report) {
  const groups = new Map();
  for (const stage of report.stages) {
    const key = `${stage.name} (${stage.where})`;
    if (!groups.has(key)) groups.set(key, { key, stages: [], time: 0 });
    groups.get(key).stages.push(stage);
    groups.get(key).time += stage.exclusive_ms;
  }
  return [...groups.values()].sort((a, b) => b.time - a.time);
}

// Text with the share of the request in the tokens of its steps. Empty: it was alone there.
function shareOf(stages) {
  const sum = (name) => stages.reduce((total, stage) => total + (stage.attributes?.[name] ?? 0), 0);
  const [own, all] = [sum("tokens"), sum("batch_tokens")];
  return own < all ? `, ${count(own)} of the ${count(all)} tokens of its steps` : "";
}

// Sentence with the stages that have the largest parts of the TTFT, and the meaning of the first.
function causes(report) {
  const total = report.ttft_ms ?? report.e2e_ms;
  const largest = groupsOf(report).slice(0, 3).filter(({ time }) => time > 0.05 * total);
  if (!largest.length) return null;
  const parts = largest.map(({ key, stages, time }) => `${key} ${ms(time)}, ${percent(time / total)}${shareOf(stages)}`);
  return h("p", { class: "causes" }, `Largest parts of the ${report.ttft_ms === null ? "time" : "TTFT"}: ${parts.join("; ")}. `
    + (STAGES[largest[0].stages[0].name] ?? UNKNOWN));
}

// Rows of the stages, up to the first token or, on request, up to the end of the answer.
function timeline(report) {
  const end = Math.max(report.e2e_ms, ...report.stages.map((stage) => stage.end_ms), 0.001);
  const first = report.ttft_ms > 0 ? report.ttft_ms : end;
  const stages = [...report.stages].sort((a, b) => a.start_ms - b.start_ms || b.end_ms - a.end_ms);
  const [largest] = groupsOf(report);
  const limit = h("span", {});
  const head = h("div", { class: "stage head", "aria-hidden": "true" }, h("span", {}, "stage"), h("span", {}, "where"),
    h("span", { class: "scale" }, h("span", {}, "0"), limit), h("span", { class: "num" }, "lasted"), h("span", { class: "num" }, "of TTFT"));
  const rows = stages.map((stage) => stageRow(stage, report.ttft_ms, largest.time > 0 && largest.stages.includes(stage)));
  const scale = (last) => {
    setText(limit, ms(last));
    for (const row of rows) row.scale(last);
  };
  const whole = h("input", { type: "checkbox", oninput: () => scale(whole.checked ? end : first) });
  scale(first);
  return [first < end ? h("div", { class: "row" }, labelled("Up to the end of the answer", whole)) : null,
    h("div", { class: "waterfall" }, head, rows.map((row) => row.element))];
}

// Returns the element of a stage, and a function that draws its bar on the time up to a number of milliseconds.
function stageRow(stage, ttft, isLargest) {
  const bar = h("span", { class: "bar", dataset: { where: stage.where, after: !stage.before_first_token } });
  const mark = ttft === null || ttft === undefined ? null : h("span", { class: "mark" });
  const scale = (end) => {
    const part = (time) => `${100 * Math.min(1.1, time / end)}%`;
    bar.style.left = part(stage.start_ms);
    bar.style.width = part(Math.max(0, stage.end_ms - stage.start_ms));
    if (mark) mark.style.left = part(ttft);
  };
  const track = h("span", { class: "track", "aria-hidden": "true" }, bar, mark);
  const attributes = Object.entries(stage.attributes ?? {}).map(([name, value]) =>
    `${name} ${typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : value}`);
  const element = h("details", { class: "stage-row", dataset: { largest: isLargest } },
    h("summary", { class: "stage" }, h("span", {}, stage.name), h("span", {}, stage.where), track,
      h("span", { class: "num" }, ms(stage.end_ms - stage.start_ms)), h("span", { class: "num" }, ms(stage.exclusive_ms))),
    h("p", {}, STAGES[stage.name] ?? UNKNOWN),
    h("p", {}, `From ${ms(stage.start_ms)} to ${ms(stage.end_ms)}, ${stage.before_first_token ? "before" : "after"} the first token.`,
      stage.worker ? ` Worker ${shortUrl(stage.worker)}.` : ""),
    attributes.length ? h("p", { class: "muted" }, attributes.join(", ")) : null);
  return { element, scale };
}

// Sections that list the requests in the steps before and with this one. They are read on demand: they need an operator's key.
function neighbours(report) {
  const chunks = report.stages.filter((s) => s.worker && s.attributes?.step !== undefined);
  const decode = report.stages.find((s) => s.worker && s.attributes?.first_step !== undefined);
  const sections = [];
  if (chunks.length) {
    // The steps that delayed the prompt have no number in the trace. The first chunk gives the time of its step, and so of all.
    const [first, last] = [chunks[0], chunks.at(-1)];
    const { worker, attributes: { step } } = first;
    const waits = report.stages.filter((s) => s.worker === worker && (s.name === "waiting" || s.name === "between_steps"));
    const from = Math.min(first.start_ms, ...waits.map((wait) => wait.start_ms));
    sections.push(section("Other requests in the steps while the prompt waited and was computed", report.rid, worker,
      Math.max(0, step - MAX_STEPS / 2), (steps) => {
        const anchor = steps.find((other) => other.number === step);
        const endOf = (other) => first.start_ms + (other.end - anchor.start) * 1000;
        return anchor ? steps.filter((other) => endOf(other) > from && other.number <= last.attributes.step) : [];
      }));
  }
  if (decode) {
    const { first_step: first, last_step: last } = decode.attributes;
    sections.push(section("Other requests in the same decode steps", report.rid, decode.worker, Math.max(0, first - 1),
      (steps) => steps.filter((step) => step.number >= first && step.number <= last)));
  }
  return sections;
}

// `choose`: returns those of a worker's steps after number `since` that count.
function section(title, rid, worker, since, choose) {
  const box = h("div", {}, h("h3", {}, title));
  box.append(button("Read the steps", async (event) => {
    event.target.disabled = true;
    try {
      const { steps } = await getJson(`v1/steps?${new URLSearchParams({ worker, since, limit: MAX_STEPS })}`);
      box.append(shared(rid, choose(steps)));
      event.target.remove();
    } catch (error) {
      box.append(h("p", { role: "alert" }, `The steps could not be read: ${error.message}`));
    }
  }, { "aria-label": `Read the steps: ${title}` }));
  return box;
}

// Other requests of the steps, those with the longest common time first.
function shared(rid, steps) {
  if (!steps.length) return h("p", {}, "The worker no longer has these steps.");
  const others = new Map();
  for (const step of steps) {
    for (const other of step.rids.filter((found) => found !== rid)) {
      const known = others.get(other) ?? { steps: 0, seconds: 0 };
      others.set(other, { steps: known.steps + 1, seconds: known.seconds + step.end - step.start });
    }
  }
  const mean = steps.reduce((sum, step) => sum + step.num_requests, 0) / steps.length;
  const rows = [...others].sort((a, b) => b[1].seconds - a[1].seconds).slice(0, 50);
  return h("div", {}, h("p", {}, `${plural(steps.length, "step", "steps")} with ${mean.toFixed(1)} requests on average.`),
    h("ul", {}, rows.map(([other, found]) => h("li", {}, h("a", { href: `#requests/${encodeURIComponent(other)}` }, other),
      ` in ${plural(found.steps, "step", "steps")}, ${ms(found.seconds * 1000)}`))));
}
