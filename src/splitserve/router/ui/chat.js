// Chat with the served model. An answer can be stopped and repeated, a message edited. A panel has the waterfall and
// logprobs of an answer.

import { events, getJson, send } from "./api.js";
import { load, newConversation, parse, serialize, store } from "./conversations.js";
import { button, h, labelled, ms, openDialog, save, select, setText } from "./dom.js";
import { StreamedText, tokenList } from "./transcript.js";
import { showTrace } from "./waterfall.js";

// Name of the field in the request, label, and attributes of the input.
const SETTINGS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }], ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: -1, step: 1 }], ["min_p", "Min p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }], ["seed", "Seed", { step: 1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0, step: 0.05 }],
];
const TOP_LOGPROBS = 5;
// Settings are kept while other views are open, until the tab is closed.
const chosen = { system: "", logprobs: true };
// Logprobs by rid. They are too large to be stored with conversations.
const logprobsOf = new Map();
let model = null;

// The one chat of the page. An answer continues while another view is open.
let view = null;

export function chatView(root) {
  view ??= new ChatView();
  root.append(...view.parts);
  view.follow();
}

class ChatView {
  #all = load();
  #current;
  #abort = null;
  #panelAbort = null;
  #log = h("div", { class: "messages", role: "log", "aria-label": "Messages", tabindex: "0" });
  #input = h("textarea", { rows: "3", "aria-label": "Message", placeholder: "Write a message. Enter sends, Shift and Enter makes a new line." });
  #send = h("button", { class: "primary" }, "Send");
  #stop = button("Stop", () => this.#abort?.abort(), { disabled: true });
  #problem = h("p", { role: "alert" });
  #panel = h("aside", { class: "panel", "aria-label": "Details of an answer" }, h("p", { class: "muted" },
    "Press Details under an answer to read its timeline and token probabilities."));
  #list = select([]);

  constructor() {
    if (!this.#all.length) this.#all = [newConversation()];
    this.#current = this.#all.at(-1);
    this.#list.addEventListener("input", () => { this.#open(this.#all.find((c) => c.id === this.#list.value)); });
    this.#input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    const file = h("input", { type: "file", accept: "application/json", class: "hidden", "aria-label": "File with conversations", tabindex: "-1" });
    file.addEventListener("change", () => this.#import(file));
    const form = h("form", { onsubmit: (event) => { event.preventDefault(); this.#submit(); } }, this.#input,
      h("p", { class: "row" }, this.#send, this.#stop));
    this.parts = [
      h("div", { class: "row" }, labelled("Conversation", this.#list), button("New", () => this.#add()),
        button("Delete", () => this.#delete()), button("Export", () => save("splitserve-chats.json", serialize(this.#all), "application/json")),
        button("Import", () => file.click()), file),
      settings(),
      h("div", { class: "chat" }, h("div", { class: "talk" }, this.#log, this.#problem, form), this.#panel),
    ];
    this.#show();
  }

  #show() {
    this.#list.replaceChildren(...this.#all.map((c) => h("option", { value: c.id }, c.title)));
    this.#list.value = this.#current.id;
    this.#log.replaceChildren(...this.#current.messages.map((message, index) => this.#message(message, index)));
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #open(conversation) {
    this.#abort?.abort();
    this.#current = conversation;
    this.#show();
  }

  #add() {
    this.#all.push(newConversation());
    this.#open(this.#all.at(-1));
    this.#input.focus();
  }

  #delete() {
    this.#all = this.#all.filter((c) => c !== this.#current);
    if (!this.#all.length) this.#all = [newConversation()];
    this.#open(this.#all.at(-1));
    this.#store();
  }

  async #import(file) {
    try {
      this.#all.push(...parse(await file.files[0].text()));
      this.#open(this.#all.at(-1));
      this.#store();
    } catch (error) {
      setText(this.#problem, `The import failed: ${error.message}`);
    }
    file.value = "";
  }

  #store() {
    setText(this.#problem, store(this.#all));
  }

  // Returns the element of a message. Its buttons refer to the message by its place in the conversation.
  #message(message, index) {
    const text = new StreamedText(message.content);
    text.flush();
    const buttons = message.role === "user" ? [button("Edit", () => this.#edit(index))]
      : [button("Retry", () => this.#answer(index)), button("Details", () => this.#details(message))];
    return h("article", { class: `message ${message.role}` }, h("h3", {}, message.role === "user" ? "You" : "Model"), text.element,
      h("p", { class: "row" }, message.note ? h("span", { class: "muted" }, message.note) : null, buttons));
  }

  #submit() {
    const content = this.#input.value.trim();
    if (!content || this.#abort) return;
    this.#input.value = "";
    const { messages } = this.#current;
    if (!messages.length) this.#current.title = content.slice(0, 40);
    messages.push({ role: "user", content, rid: "", note: "" });
    this.#answer(messages.length);
  }

  #edit(index) {
    const input = h("textarea", { rows: "6", "aria-label": "Message" });
    input.value = this.#current.messages[index].content;
    const dialog = openDialog("Edit the message", h("p", {}, "The answers after this message are removed."), input,
      h("p", { class: "row" }, button("Send again", () => {
        dialog.close();
        this.#current.messages[index].content = input.value;
        this.#answer(index + 1);
      }, { class: "primary" }), button("Cancel", () => dialog.close())));
  }

  // Streams the answer at place `index` of the conversation. Everything from there on is replaced.
  async #answer(index) {
    this.#abort?.abort();
    const abort = this.#abort = new AbortController();
    const conversation = this.#current;
    const answer = { role: "assistant", content: "", rid: "", note: "" };
    conversation.messages.splice(index);
    const history = conversation.messages.map(({ role, content }) => ({ role, content }));
    conversation.messages.push(answer);
    this.#show();
    const text = new StreamedText();
    this.#log.lastChild.querySelector(".text").replaceWith(text.element);
    this.#busy(true);
    setText(this.#problem, "");
    const started = performance.now();
    try {
      await this.#stream(answer, text, history, abort.signal, started);
    } catch (error) {
      answer.note = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    }
    text.flush();
    answer.content = text.value;
    this.#store();
    if (this.#abort !== abort) return;
    this.#abort = null;
    this.#busy(false);
    this.#show();
    if (answer.note.startsWith("failed")) setText(this.#problem, `The answer ${answer.note}`);
    if (answer.rid) this.#details(answer);
  }

  async #stream(answer, text, messages, signal, started) {
    model ??= (await getJson("v1/models", { signal })).data[0].id;
    const response = await send("v1/chat/completions", { signal, body: body(messages) });
    answer.rid = response.headers.get("x-request-id") ?? "";
    const logprobs = [];
    if (answer.rid) logprobsOf.set(answer.rid, logprobs);
    let first = null;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const frame = JSON.parse(data);
      if (frame.error) throw new Error(frame.error.message);
      const choice = frame.choices?.[0];
      const piece = choice?.delta?.content ?? "";
      if (piece) first ??= performance.now() - started;
      logprobs.push(...(choice?.logprobs?.content ?? []));
      text.append(piece);
      if (choice?.finish_reason) answer.note = `${choice.finish_reason}, first token after ${ms(first)}`;
      if (frame.usage) answer.note += `, ${frame.usage.completion_tokens} tokens in ${ms(performance.now() - started)}`;
      this.follow();
    }
  }

  // Keeps the newest text in view, unless the user has scrolled away from it.
  #following = 0;
  follow() {
    this.#following ||= requestAnimationFrame(() => {
      this.#following = 0;
      const left = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight;
      if (left < 120) this.#log.scrollTop = this.#log.scrollHeight;
    });
  }

  #busy(isBusy) {
    this.#stop.disabled = !isBusy;
    this.#send.disabled = isBusy;
    this.#log.setAttribute("aria-busy", isBusy);
  }

  #details(message) {
    this.#panelAbort?.abort();
    this.#panelAbort = new AbortController();
    const timeline = h("div");
    this.#panel.replaceChildren(h("h3", {}, "Tokens"), tokenList(logprobsOf.get(message.rid)), h("h3", {}, "Request"), timeline);
    if (message.rid) showTrace(timeline, message.rid, this.#panelAbort.signal);
    else timeline.append(h("p", {}, "The answer has no request id."));
  }
}

function body(messages) {
  const system = chosen.system.trim();
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  const request = { model, messages: all, stream: true, stream_options: { include_usage: true } };
  if (chosen.logprobs) Object.assign(request, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  for (const [name] of SETTINGS) if (Number.isFinite(chosen[name])) request[name] = chosen[name];
  return request;
}

function settings() {
  const system = h("textarea", { rows: "2" });
  system.value = chosen.system;
  system.addEventListener("input", () => { chosen.system = system.value; });
  const inputs = SETTINGS.map(([name, title, attributes]) => {
    const input = h("input", { type: "number", placeholder: "default", ...attributes });
    if (Number.isFinite(chosen[name])) input.value = chosen[name];
    input.addEventListener("input", () => { chosen[name] = input.valueAsNumber; });
    return labelled(title, input);
  });
  const logprobs = h("input", { type: "checkbox" });
  logprobs.checked = chosen.logprobs;
  logprobs.addEventListener("input", () => { chosen.logprobs = logprobs.checked; });
  return h("details", { class: "settings" }, h("summary", {}, "Settings"), labelled("System prompt", system, { class: "wide" }),
    h("div", { class: "row" }, inputs, labelled("Token logprobs", logprobs)));
}
