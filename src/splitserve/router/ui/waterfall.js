// Waterfall of one request: its stages, what they mean, and the other requests in the same steps.

import { ApiError, getJson } from "./api.js";
import { button, clock, count, h, ms, shortUrl } from "./dom.js";
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
    ["Request", report.rid], ["Trace", report.trace_id], ["Route", report.route],
    ["Status", report.error ? `${report.status}: ${report.error}` : report.status],
    ["Started", clock(report.started_at)], ["TTFT", ms(report.ttft_ms)], ["Total", ms(report.e2e_ms)],
    ["Unaccounted", ms(report.unaccounted_ms)],
    ["Tokens", `${count(report.prompt_tokens)} in (${count(report.num_cached_tokens)} cached), ${count(report.output_tokens)} out`],
    ["Workers", workers], ["Attempts", `${report.attempts} (${report.retries} retries, ${report.migrations} migrations)`],
    ["Clocks", report.clocks.map((c) => `${shortUrl(c.worker)} ${c.offset_ms.toFixed(3)} ± ${c.error_ms.toFixed(3)} ms`).join(", ")],
  ];
  const list = h("dl", { class: "facts" }, facts.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(text)))));
  const note = "Stages of different workers overlap. The column \"of TTFT\" counts every moment once: with the unaccounted time it adds up "
    + "to the time to the first token (TTFT). Open a stage to read what it means.";
  return [list, h("h3", {}, "Timeline"), h("p", { class: "muted" }, note), timeline(report), neighbours(report)];
}

function timeline(report) {
  const end = Math.max(report.e2e_ms, ...report.stages.map((stage) => stage.end_ms), 0.001);
  const stages = [...report.stages].sort((a, b) => a.start_ms - b.start_ms || b.end_ms - a.end_ms);
  const head = h("div", { class: "stage head", "aria-hidden": "true" }, h("span", {}, "stage"), h("span", {}, "where"),
    h("span", { class: "scale" }, h("span", {}, "0"), h("span", {}, ms(end))), h("span", { class: "num" }, "lasted"),
    h("span", { class: "num" }, "of TTFT"));
  return h("div", { class: "waterfall" }, head, stages.map((stage) => stageRow(stage, end, report.ttft_ms)));
}

function stageRow(stage, end, ttft) {
  const bar = h("span", { class: "bar", dataset: { where: stage.where, after: !stage.before_first_token } });
  bar.style.left = `${(100 * stage.start_ms) / end}%`;
  bar.style.width = `${(100 * Math.max(0, stage.end_ms - stage.start_ms)) / end}%`;
  const track = h("span", { class: "track", "aria-hidden": "true" }, bar);
  if (ttft !== null && ttft !== undefined) {
    const mark = h("span", { class: "mark" });
    mark.style.left = `${(100 * ttft) / end}%`;
    track.append(mark);
  }
  const attributes = Object.entries(stage.attributes ?? {}).map(([name, value]) =>
    `${name} ${typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : value}`);
  return h("details", { class: "stage-row" },
    h("summary", { class: "stage" }, h("span", {}, stage.name), h("span", {}, stage.where), track,
      h("span", { class: "num" }, ms(stage.end_ms - stage.start_ms)), h("span", { class: "num" }, ms(stage.exclusive_ms))),
    h("p", {}, STAGES[stage.name] ?? UNKNOWN),
    h("p", {}, `From ${ms(stage.start_ms)} to ${ms(stage.end_ms)}, ${stage.before_first_token ? "before" : "after"} the first token.`,
      stage.worker ? ` Worker ${shortUrl(stage.worker)}.` : ""),
    attributes.length ? h("p", { class: "muted" }, attributes.join(", ")) : null);
}

// Section that lists the requests of the same decode steps. It is read on demand, because it needs an operator's key.
function neighbours(report) {
  const stage = report.stages.find((s) => s.worker && s.attributes?.first_step !== undefined);
  const box = h("div", {});
  if (!stage) return box;
  const { first_step: first, last_step: last } = stage.attributes;
  box.append(h("h3", {}, "Other requests in the same steps"),
    button(`Read steps ${first} to ${last}`, async (event) => {
      event.target.disabled = true;
      try {
        box.append(await readSteps(report.rid, stage.worker, first, last));
        event.target.remove();
      } catch (error) {
        box.append(h("p", { role: "alert" }, `The steps could not be read: ${error.message}`));
      }
    }));
  return box;
}

async function readSteps(rid, worker, first, last) {
  const query = new URLSearchParams({ worker, since: Math.max(0, first - 1), limit: MAX_STEPS });
  const { steps } = await getJson(`v1/steps?${query}`);
  const own = steps.filter((step) => step.number >= first && step.number <= last);
  const shared = new Map();
  for (const step of own) for (const other of step.rids) if (other !== rid) shared.set(other, (shared.get(other) ?? 0) + 1);
  if (!own.length) return h("p", {}, "The worker no longer has these steps.");
  const mean = own.reduce((sum, step) => sum + step.num_requests, 0) / own.length;
  const rows = [...shared].sort((a, b) => b[1] - a[1]).slice(0, 50);
  return h("div", {}, h("p", {}, `${own.length} steps with ${mean.toFixed(1)} requests on average.`),
    h("ul", {}, rows.map(([other, steps_]) => h("li", {},
      h("a", { href: `#requests/${encodeURIComponent(other)}` }, other), ` in ${steps_} steps`))));
}
