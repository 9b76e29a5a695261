// Live state of the cluster, from the stream GET /v1/live.

import { ApiError, askForKey, events, send } from "./api.js";

// Maximum number of requests that the page stores.
const MAX_REQUESTS = 12000;
const MAX_EVENTS = 200;
const RETRY_MS = 1000;
// Milliseconds without an event after which the stream is opened again.
const SILENCE_MS = 10000;

class Live extends EventTarget {
  // Last event without its lists. null: none yet.
  state = null;
  workers = [];
  links = [];
  // TraceSummary by rid, oldest first.
  requests = new Map();
  // Events of the cluster, newest first.
  events = [];
  // Number of times that the key has changed.
  generation = 0;
  // "connecting", "live", or the problem.
  connection = "connecting";
  #abort = null;
  #resume = null;
  #timer = 0;

  // Reads the stream while the page is open.
  async run() {
    for (;;) {
      try {
        await this.#follow();
        this.#connected("reconnecting");
      } catch (error) {
        this.#connected(error instanceof ApiError && error.status ? error.message : "reconnecting");
        // Without a key each attempt would open the dialog again.
        if (error.status === 401) await new Promise((resolve) => { this.#resume = resolve; });
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  // Opens the stream again, for example with another key.
  restart() {
    this.requests.clear();
    this.generation += 1;
    this.#abort?.abort();
    this.#resume?.();
  }

  // Adds summaries from GET /v1/traces.
  add(summaries) {
    for (const summary of summaries) if (!this.requests.has(summary.rid)) this.requests.set(summary.rid, summary);
    this.#trim();
    this.dispatchEvent(new Event("change"));
  }

  async #follow() {
    this.#abort = new AbortController();
    let isFirst = true;
    try {
      const response = await send("v1/live", { signal: this.#abort.signal });
      this.#watch();
      for await (const data of events(response)) {
        this.#watch();
        this.#merge(JSON.parse(data), isFirst);
        isFirst = false;
      }
    } finally {
      clearTimeout(this.#timer);
    }
  }

  #watch() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#abort.abort(), SILENCE_MS);
  }

  #merge({ workers, links, requests, events: news, ...state }, isFirst) {
    if (isFirst) {
      // The first event contains the requests that ended while the stream was closed.
      for (const [rid, summary] of this.requests) if (summary.state !== "done") this.requests.delete(rid);
      this.events = [];
    }
    this.state = state;
    this.workers = workers;
    this.links = links;
    for (const summary of requests) this.requests.set(summary.rid, summary);
    this.#trim();
    this.events = [...[...news].reverse(), ...this.events].slice(0, MAX_EVENTS);
    this.#connected("live");
    this.dispatchEvent(new Event("change"));
  }

  #trim() {
    let surplus = this.requests.size - MAX_REQUESTS;
    if (surplus <= 0) return;
    for (const [rid, summary] of this.requests) {
      if (surplus <= 0) return;
      if (summary.state !== "done") continue;
      this.requests.delete(rid);
      surplus -= 1;
    }
  }

  #connected(connection) {
    if (this.connection === connection) return;
    this.connection = connection;
    this.dispatchEvent(new Event("connection"));
  }
}

export const live = new Live();

export async function changeKey() {
  await askForKey();
  live.restart();
}
