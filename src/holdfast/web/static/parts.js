// What the scripts of this page share: elements without markup, hostile text made visible, addresses, questions.
// Nothing here, or in any other script, parses markup: text is always set as text.

const UNSAFE = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu;

const escaped = (code) => [["\\x", 2], ["\\u", 4], ["\\U", 8]].filter(([, digits]) => code < 16 ** digits)
  .map(([sign, digits]) => sign + code.toString(16).padStart(digits, "0"))[0];

/** A text as it may stand on a page: what turns a line around, or cannot be seen, is written as an escape. */
export function visible(text) {
  return String(text).replace(UNSAFE, (c) =>
    c === "\n" || c === "\t" || c === "\u200d" ? c : escaped(c.codePointAt(0)));
}

/** At most so many characters on one line. */
export function short(text, most = 80) {
  const line = visible(String(text).slice(0, most + 1).replace(/[\n\t]/g, " "));
  return line.length <= most ? line : `${line.slice(0, most - 1)}…`;
}

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "hidden") element.hidden = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : visible(child));
  }
  return element;
}

export const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) =>
  made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** An address of this page, as `address` of the templates makes it. */
export function address(path, agent, query = {}) {
  const parts = agent === undefined ? [] : String(agent).split("/");
  const given = new URLSearchParams();
  if (parts.some((part) => ["", ".", ".."].includes(part))) given.set("agent", agent);
  else if (parts.length) path += `/${parts.map(encodeURIComponent).join("/")}`;
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") given.set(name, value);
  }
  const text = given.toString();
  return text ? `${path}?${text}` : path;
}

/** Ask a JSON twin. What it refuses is an error with its sentence. */
export async function ask(path, agent, query, signal) {
  const answer = await fetch(`/api${address(path, agent, query)}`, { signal, headers: { accept: "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error([told.message, told.hint].filter(Boolean).join(" "));
  return told;
}

/** The data that came with the page. */
export function embedded(id = "data") {
  const held = document.getElementById(id); // a template, since scripts must not be replaced; in an export a script
  return JSON.parse((held.content ?? held).textContent);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
export function size(bytes) {
  let unit = 0;
  while (Math.abs(bytes) >= 1000 && unit < UNITS.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && Math.abs(bytes) < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${UNITS[unit]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  for (const [unit, least] of [["s", 1], ["ms", 1e-3]]) {
    if (seconds >= least) return `${Number((seconds / least).toPrecision(3))} ${unit}`;
  }
  return `${Number((seconds * 1e6).toPrecision(3))} µs`;
}

export function clock(iso, withDay = false) {
  const at = new Date(iso);
  const time = at.toLocaleTimeString("en-GB");
  return withDay ? `${at.toLocaleDateString("sv-SE")} ${time}` : time;
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

/** A value of JSON on one line, as `schemas` writes it. */
export function valueText(value, most = 120) {
  if (value === undefined) return "(nothing)";
  if (value && typeof value === "object" && "$type" in value) {
    if (value.$type === "more") return `… ${count(value.$more, "more item")}`;
    if ("$text" in value) return short(value.$text, most);
    if (value.$type === "dict") return short(`{${value.$items.map((pair) => pair.map((one) => valueText(one, most)).join(": ")).join(", ")}${value.$more ? ", …" : ""}}`, most);
    return short(`${value.$type}(${JSON.stringify(value.$data ?? value.$items ?? "")})`, most);
  }
  return short(JSON.stringify(value), most);
}

/** The lines of one change: old in red, new in green, of long texts the words that differ. */
export function changeLines(change, most = 160) {
  const where = el("code", { class: "spot" }, short(change.where, 80));
  if (change.words?.length) {
    const words = change.words.map(([sign, text]) =>
      sign === " " ? text : el(sign === "-" ? "del" : "ins", {}, text));
    return [el("div", { class: "change words" }, where, " ", el("span", { class: "text" }, ...words))];
  }
  const lines = [];
  for (const [sign, name, tag] of [["−", "old", "del"], ["+", "new", "ins"]]) {
    if (name in change) {
      lines.push(el("div", { class: `change ${name}` },
        el("span", { class: "sign", "aria-hidden": "true" }, sign), where.cloneNode(true), " ",
        el(tag, {}, valueText(change[name], most))));
    }
  }
  return lines.length ? lines : [el("div", { class: "change" }, where, ` ${change.kind}`)];
}
