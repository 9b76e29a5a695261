// Elements and texts. All data enters the document as text nodes or attributes, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Returns an element. `properties`: on* are listeners, dataset is an object, others are attributes.
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Sets the text only if it differs, so that the browser has nothing to lay out again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function button(text, onclick, properties = {}) {
  return h("button", { type: "button", onclick, ...properties }, text);
}

export function labelled(text, control, properties = {}) {
  return h("label", properties, h("span", {}, text), control);
}

export function select(options, properties = {}) {
  return h("select", properties, options.map(([value, text]) => h("option", { value }, text)));
}

const NONE = "–";

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en");
}

export function plural(value, one, many) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function number(value, digits = 1) {
  return value === null || value === undefined ? NONE : value.toFixed(digits);
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(0)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

// Returns the address of a worker without its scheme.
export function shortUrl(url) {
  return url.replace(/^https?:\/\//, "");
}

// Opens a modal dialog. It is removed when it closes.
export function openDialog(title, ...content) {
  const heading = h("h2", { id: "dialog-title" }, title);
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, heading, ...content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
