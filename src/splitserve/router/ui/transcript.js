// Text of a streamed answer, and its tokens with logprobs.

import { h, number } from "./dom.js";

const BLOCK_CHARACTERS = 2000;
const MAX_TOKENS = 1000;

// Element that receives text in pieces. It writes once per frame, and only its last block is laid out again.
export class StreamedText {
  #pending = "";
  #frame = 0;
  #last = null;

  constructor(text = "") {
    this.element = h("div", { class: "text" });
    this.value = "";
    if (text) this.append(text);
  }

  append(text) {
    this.value += text;
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const lines = this.#pending.split(/(?<=\n)/);
    this.#pending = "";
    for (const line of lines) {
      if (!this.#last || this.#last.data.endsWith("\n") || this.#last.length > BLOCK_CHARACTERS) {
        const isInline = this.#last && !this.#last.data.endsWith("\n");
        this.#last = document.createTextNode("");
        this.element.append(h(isInline ? "span" : "p", {}, this.#last));
      }
      this.#last.appendData(line);
    }
  }
}

// Returns the tokens of an answer. The background shows the probability; a focused token lists its alternatives.
export function tokenList(logprobs) {
  if (!logprobs?.length) return h("p", { class: "muted" }, "No logprobs. They are not stored with conversations.");
  const detail = h("p", { role: "status", class: "mono" }, "Select a token to read its probability and alternatives.");
  const select = (entry) => {
    const alternatives = (entry.top_logprobs ?? []).map((top) => `${JSON.stringify(top.token)} ${probability(top.logprob)}`);
    detail.textContent = `${JSON.stringify(entry.token)} ${probability(entry.logprob)}, logprob ${number(entry.logprob, 3)}. `
      + `Alternatives: ${alternatives.join(", ") || "none"}`;
  };
  const tokens = logprobs.slice(0, MAX_TOKENS).map((entry) => h("button", {
    type: "button", class: "token", dataset: { level: level(entry.logprob) }, onfocus: () => select(entry), onclick: () => select(entry),
  }, visible(entry.token)));
  const rest = logprobs.length - tokens.length;
  return h("div", {}, detail, h("div", { class: "tokens" }, tokens), rest > 0 ? h("p", {}, `${rest} more tokens are not listed.`) : null);
}

// Returns the text of a token. White space is replaced by visible characters.
function visible(token) {
  const text = token.replace(/\n/g, "\u21b5");
  return text.trim() ? text : text.replace(/\s/g, "\u2423") || "\u2205";
}

function probability(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function level(logprob) {
  const p = Math.exp(logprob);
  return p > 0.9 ? 4 : p > 0.6 ? 3 : p > 0.3 ? 2 : p > 0.1 ? 1 : 0;
}
