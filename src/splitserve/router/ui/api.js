// Requests to the router, with the API key of this tab.

import { button, h, labelled, openDialog } from "./dom.js";

const STORED = "splitserve-key";
let asking = null;

function headers() {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Error of a request, with the HTTP status. Status 0: no answer.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Sends a request. While the answer is 401, shows the dialog for an API key and sends the request again.
export async function send(path, { body, ...options } = {}) {
  for (;;) {
    const init = { headers: headers(), cache: "no-store", ...options };
    if (body !== undefined) {
      init.method = "POST";
      init.body = JSON.stringify(body);
      init.headers = { ...init.headers, "Content-Type": "application/json" };
    }
    let response;
    try {
      response = await fetch(path, init);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The router does not answer.");
    }
    if (response.ok) return response;
    const message = await errorText(response);
    if (response.status !== 401) throw new ApiError(response.status, message);
    if (!await askForKey(message)) throw new ApiError(401, message);
  }
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

async function errorText(response) {
  const text = await response.text().catch(() => "");
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || `HTTP status ${response.status}`;
  }
}

// Shows one dialog for an API key, even if many requests need it. Returns whether the user entered a key.
export function askForKey(reason = "") {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", name: "key" });
    const form = h("form", { method: "dialog" }, h("p", { role: "alert" }, reason), labelled("API key", input),
      h("p", {}, "The key stays in this tab and is deleted when you close it. Leave it empty to delete it now."),
      h("p", { class: "row" }, h("button", { class: "primary", value: "use" }, "Use this key"),
        button("Cancel", () => dialog.close("cancel"))));
    const dialog = openDialog("API key", form);
    dialog.addEventListener("close", () => {
      const key = input.value.trim();
      const isUsed = dialog.returnValue === "use";
      if (isUsed && key) sessionStorage.setItem(STORED, key);
      else if (isUsed) sessionStorage.removeItem(STORED);
      asking = null;
      resolve(isUsed && key !== "");
    });
  });
  return asking;
}

// Yields the data of each event of a stream (Server-Sent Events). EventSource cannot send a key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
