// Frame of the page: navigation between the views, colors, and the state of the connection.

import { chatView } from "./chat.js";
import { chartsView } from "./charts.js";
import { h } from "./dom.js";
import { changeKey, live } from "./live.js";
import { nowView } from "./now.js";
import { operateView } from "./operate.js";
import { requestsView } from "./requests.js";

// Name in the address -> title and view. A view takes its element and the rest of the address, and may return `update`
// and `close`.
const VIEWS = {
  now: ["Now", nowView],
  requests: ["Requests", requestsView],
  charts: ["Charts", chartsView],
  operate: ["Operate", operateView],
  chat: ["Chat", chatView],
};
const main = document.getElementById("main");
let open = {};

function show() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const [title, view] = VIEWS[name] ?? VIEWS.now;
  open.close?.();
  main.replaceChildren();
  for (const link of document.querySelectorAll("#views a")) {
    if (link.textContent === title) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${title} - Splitserve`;
  const section = h("section", { id: "view", "aria-labelledby": "view-title" }, h("h2", { id: "view-title" }, title));
  main.append(section);
  open = view(section, decodeURIComponent(rest.join("/"))) ?? {};
  open.update?.();
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  dispatchEvent(new Event("colors"));
}

function start() {
  document.getElementById("views").append(...Object.entries(VIEWS).map(([name, [title]]) =>
    h("a", { href: `#${name}` }, title)));
  const theme = document.getElementById("theme");
  theme.value = localStorage.getItem("splitserve-theme") ?? "";
  setTheme(theme.value);
  theme.addEventListener("change", () => {
    localStorage.setItem("splitserve-theme", theme.value);
    setTheme(theme.value);
  });
  document.getElementById("key").addEventListener("click", changeKey);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  const connection = document.getElementById("connection");
  live.addEventListener("connection", () => {
    connection.textContent = live.connection;
    connection.dataset.live = live.connection === "live";
  });
  live.addEventListener("change", () => open.update?.());
  addEventListener("hashchange", show);
  show();
  live.run();
}

start();
