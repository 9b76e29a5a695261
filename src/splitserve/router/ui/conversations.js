// Conversations of the chat, in the local storage of the browser.

const STORED = "splitserve-chats";
const ROLES = ["user", "assistant"];

export function newConversation() {
  return { id: newId(), title: "New conversation", messages: [] };
}

// Returns a random id. crypto.randomUUID exists only on https pages.
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function load() {
  try {
    return parse(localStorage.getItem(STORED) ?? "[]");
  } catch {
    return [];
  }
}

// Stores the conversations. Returns "" or the problem.
export function store(conversations) {
  try {
    localStorage.setItem(STORED, serialize(conversations));
    return "";
  } catch {
    return "The browser's storage is full or blocked: export and delete conversations.";
  }
}

export function serialize(conversations) {
  return JSON.stringify(conversations, null, 1);
}

// Returns the conversations in a JSON text. Throws an Error with the reason if the text is invalid.
export function parse(text) {
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new Error("The file does not contain a list of conversations.");
  return list.map(({ title, messages }, i) => {
    if (!Array.isArray(messages)) throw new Error(`Conversation ${i + 1} has no list of messages.`);
    return { id: newId(), title: String(title ?? "").slice(0, 80) || "Imported", messages: messages.map(message) };
  });
}

function message({ role, content, rid, note }) {
  if (!ROLES.includes(role) || typeof content !== "string") throw new Error("A message needs a role (user, assistant) and a text.");
  return { role, content, rid: typeof rid === "string" ? rid : "", note: typeof note === "string" ? note : "" };
}
