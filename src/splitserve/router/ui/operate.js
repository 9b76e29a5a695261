// Orders of operators. Each order states its consequence before it is sent.

import { send } from "./api.js";
import { button, count, h, labelled, openDialog, percent, select, setText, shortUrl } from "./dom.js";
import { live } from "./live.js";

const ROLES = ["prefill", "decode", "null"];

function othersReady(worker) {
  return live.workers.filter((w) => w.url !== worker.url && w.role === worker.role && w.state === "ready").length;
}

function withoutOthers(worker) {
  const others = othersReady(worker);
  return others ? `${others} other ${worker.role} worker${others > 1 ? "s" : ""} will serve.`
    : `No other ${worker.role} worker is ready: new requests wait or fail with 503.`;
}

// Opens a dialog that confirms an order. `order` sends it, and may read the controls.
function confirmOrder(title, consequences, controls, order, done) {
  const problem = h("p", { role: "alert" });
  const confirm = button(title, async () => {
    confirm.disabled = true;
    setText(problem, "Waiting for the answer.");
    try {
      await order();
      dialog.close();
      done(`${title}: done.`);
    } catch (error) {
      confirm.disabled = false;
      setText(problem, `${title} failed: ${error.message}`);
    }
  }, { class: "primary" });
  const dialog = openDialog(title, h("ul", {}, consequences.map((text) => h("li", {}, text))), ...controls, problem,
    h("p", { class: "row" }, confirm, button("Cancel", () => dialog.close())));
}

function drain(worker, done) {
  const migrate = h("input", { type: "checkbox" });
  confirmOrder(`Drain ${shortUrl(worker.url)}`, ["The worker receives no new requests.", withoutOthers(worker),
    `Its ${count(worker.running)} running requests finish there, or move now if you check the box.`],
  [labelled("Move running requests to other workers now", migrate)],
  () => send("workers/drain", { body: { url: worker.url, migrate: migrate.checked, force: true } }), done);
}

function resume(worker, done) {
  confirmOrder(`Resume ${shortUrl(worker.url)}`, ["The worker receives new requests again.", "The router deletes its record of failures."], [],
    () => send("workers/resume", { body: { url: worker.url } }), done);
}

function changeRole(worker, done) {
  const role = select(ROLES.filter((name) => name !== worker.role).map((name) => [name, name === "null" ? "null (colocated)" : name]));
  const running = select([["complete", "finish on this worker"], ["migrate", "move to other workers"]]);
  confirmOrder(`Change the role of ${shortUrl(worker.url)}`, ["The worker drains, changes its role, and joins the other pool.",
    withoutOthers(worker), "The router rejects the change if no other worker could serve meanwhile."],
  [labelled("New role", role), labelled("Running requests", running)],
  () => send("role", { body: { url: worker.url, role: role.value, drain: running.value } }), done);
}

function flush(done) {
  confirmOrder("Flush the prefix cache", ["All workers remove cached prefixes that no request uses.",
    "The next requests compute their whole prompts, so their TTFT rises.", "Running requests are not affected."], [],
  () => send("flush_cache", { body: {} }), done);
}

export function operateView(root) {
  const notice = h("p", {});
  const result = h("p", { role: "status" });
  const rows = h("tbody");
  const done = (text) => setText(result, text);
  const flushButton = button("Flush the prefix cache", () => flush(done));
  const header = ["Worker", "Role", "State", "Running", "KV pool", "Orders"].map((name) => h("th", { scope: "col" }, name));
  root.append(notice, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Workers" },
    h("table", { class: "orders" }, h("caption", {}, "Workers"), h("thead", {}, h("tr", {}, header)), rows)),
  h("p", {}, flushButton), result);
  const byUrl = new Map();

  function newRow(worker) {
    const cells = Array.from({ length: 5 }, () => h("td"));
    const current = () => live.workers.find((w) => w.url === worker.url) ?? worker;
    const name = shortUrl(worker.url);
    const buttons = [
      button("Drain", () => drain(current(), done), { "aria-label": `Drain ${name}` }),
      button("Resume", () => resume(current(), done), { "aria-label": `Resume ${name}` }),
      button("Change role", () => changeRole(current(), done), { "aria-label": `Change the role of ${name}` }),
    ];
    return { cells, buttons, element: h("tr", {}, cells, h("td", { class: "row" }, buttons)) };
  }

  function update() {
    if (!live.state) return;
    const allowed = live.state.can_operate;
    setText(notice, allowed ? "An order takes effect at once. You confirm each order after you read its consequence."
      : "These orders need an operator's key. Enter it with the button API key.");
    flushButton.disabled = !allowed;
    for (const [url, row] of byUrl) {
      if (!live.workers.some((worker) => worker.url === url)) { row.element.remove(); byUrl.delete(url); }
    }
    for (const worker of live.workers) {
      if (!byUrl.has(worker.url)) {
        byUrl.set(worker.url, newRow(worker));
        rows.append(byUrl.get(worker.url).element);
      }
      const { cells, buttons } = byUrl.get(worker.url);
      const texts = [worker.name || shortUrl(worker.url), worker.role, worker.state, count(worker.running), percent(worker.kv_usage)];
      texts.forEach((text, i) => setText(cells[i], text));
      const [drainButton, resumeButton, roleButton] = buttons;
      drainButton.disabled = !allowed || worker.state !== "ready";
      resumeButton.disabled = !allowed || worker.state === "ready" || worker.state === "switching";
      roleButton.disabled = !allowed || worker.state !== "ready";
    }
  }
  return { update };
}
