// The state as a tree: what is inside a place is asked for when somebody opens it, one page at a time.
// Arrow keys walk as in any tree, Enter opens, c copies the path, Tab leads to what else can be done with a place.

import { address, ask, count, el, embedded, visible } from "./parts.js";

const data = embedded();
const root = document.getElementById("tree");
const question = (path, more) => ({ at: data.at, path, bookkeeping: data.bookkeeping ? "1" : "", ...more });

function line(node, level) {
  const label = el("div", { class: `tree-line ${node.type}` },
    el("span", { class: "twist", "aria-hidden": "true" }, node.open ? "▸" : ""),
    el("code", { class: "key" }, node.name),
    el("span", { class: "value" }, node.open ? node.text : node.type === "text" ? `“${node.text}”` : node.text),
    node.preview ? el("span", { class: "preview" }, node.preview) : null,
    el("span", { class: "tree-ways" }, ...ways(node)));
  label.style.setProperty("--level", level);
  const item = el("div", { role: "treeitem", class: "tree-item", tabindex: "-1", "aria-level": level + 1,
    "aria-expanded": node.open ? "false" : null, "aria-label": visible(`${node.name}: ${node.text}`) }, label);
  item.node = node;
  item.level = level;
  label.addEventListener("click", (event) => {
    if (event.target.closest("button, a")) return;
    choose(item);
    if (node.open) toggle(item);
    else if (node.rest) whole(item);
  });
  return item;
}

function ways(node) {
  if (!node.path) return [];
  const made = [button("copy path", () => copy(node.path))];
  if (node.rest) made.push(button("all of it", (event) => whole(event.target.closest(".tree-item"))));
  if (data.changes && node.path !== "state") made.push(button("edit", () => edit(node)));
  made.push(el("a", { href: address("/why", data.agent, { ask: "blame", path: node.path, at: data.at }) }, "who changed it"));
  return made;
}

const button = (text, by) => el("button", { type: "button", class: "plain", onclick: by }, text);

async function toggle(item) {
  const open = item.getAttribute("aria-expanded") === "true";
  item.setAttribute("aria-expanded", String(!open));
  item.querySelector(".twist").textContent = open ? "▸" : "▾";
  if (open) { item.querySelector(":scope > [role=group]")?.remove(); return; }
  const group = el("div", { role: "group" }, el("div", { class: "quiet tree-wait" }, "…"));
  item.append(group);
  try {
    const told = await ask("/items", data.agent, question(item.node.path));
    group.replaceChildren();
    fill(group, told, item.level + 1);
  } catch (error) { group.replaceChildren(el("div", { class: "bad tree-wait", role: "alert" }, error.message)); }
}

function fill(group, told, level, before = 0) {
  if (told.messages && !before) {
    group.append(el("div", { class: "tree-wait" },
      el("a", { href: address("/conversation", data.agent, { at: data.at, path: told.path }) }, "Read it as a conversation")));
  }
  group.append(...told.items.map((node) => line(node, level)));
  const shown = before + told.items.length;
  if (told.next !== null) {
    const more = el("button", { type: "button", class: "small tree-more" }, `${count(told.count - shown, "more item")}`);
    more.addEventListener("click", async () => {
      more.disabled = true;
      const rest = await ask("/items", data.agent, question(told.path, { from: told.next, n: 500 }));
      more.remove();
      fill(group, rest, level, shown);
    });
    group.append(more);
  }
  if (!shown && told.next === null) group.append(el("div", { class: "quiet tree-wait" }, "empty"));
}

/** A long text, in parts of some tens of thousands of characters. */
async function whole(item, from = 0) {
  item.querySelector(":scope > .tree-text .tree-more")?.remove();
  let box = item.querySelector(":scope > .tree-text");
  if (box && from === 0) { box.remove(); return; }
  const told = await ask("/text", data.agent, question(item.node.path, { from }));
  if (!box) item.append(box = el("div", { class: "tree-text" }));
  box.append(el("pre", {}, told.text));
  const next = from + told.text.length;
  if (next < told.count) {
    box.append(el("button", { type: "button", class: "small tree-more", onclick: () => whole(item, next) },
      `${count(told.count - next, "more character")}`));
  }
}

async function copy(path) {
  try { await navigator.clipboard.writeText(path); say(`Copied: ${path}`); }
  catch { say(path); }
}

const say = (text) => document.getElementById("hits").replaceChildren(el("p", { class: "say" }, text));

function edit(node) {
  const dialog = document.getElementById("edit");
  dialog.querySelector("[name=path]").value = node.path;
  dialog.querySelector("[name=value]").value = node.rest || node.open ? "" : node.type === "text" ? JSON.stringify(node.text) :
    { True: "true", False: "false", None: "null" }[node.text] ?? node.text;
  dialog.querySelector("[name=branch]").value = `edit-${data.at.slice(3, 11)}`;
  dialog.showModal();
}
document.getElementById("edit-close")?.addEventListener("click", () => document.getElementById("edit").close());

// -- walking

const items = () => [...root.querySelectorAll("[role=treeitem]")];

function choose(item) {
  if (!item) return;
  for (const one of root.querySelectorAll('[tabindex="0"]')) one.setAttribute("tabindex", "-1");
  item.setAttribute("tabindex", "0");
  item.focus({ preventScroll: false });
}

root.addEventListener("keydown", (event) => {
  const item = event.target.closest("[role=treeitem]");
  if (!item || event.target !== item) return;
  const all = items();
  const at = all.indexOf(item);
  const open = item.getAttribute("aria-expanded");
  const acts = {
    ArrowDown: () => choose(all[at + 1]), ArrowUp: () => choose(all[at - 1]), Home: () => choose(all[0]), End: () => choose(all.at(-1)),
    ArrowRight: () => open === "false" ? toggle(item) : open === "true" ? choose(all[at + 1]) : null,
    ArrowLeft: () => open === "true" ? toggle(item) : choose(item.parentElement.closest("[role=treeitem]")),
    Enter: () => item.node.open ? toggle(item) : item.node.rest ? whole(item) : null,
    c: () => event.ctrlKey || event.metaKey ? null : copy(item.node.path),
  };
  if (!(event.key in acts) || ((event.ctrlKey || event.metaKey) && event.key === "c")) return;
  event.preventDefault();
  acts[event.key]();
});

// -- search

document.getElementById("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const wanted = event.target.q.value.trim();
  if (!wanted) return;
  say("Looking …");
  try {
    const told = await ask("/search", data.agent, { at: data.at, q: wanted });
    const list = el("ul", { class: "hits" }, ...told.hits.map((hit) => el("li", {},
      el("a", { href: address("/state", data.agent, { at: data.at, path: hit.path }) }, el("code", {}, hit.path)), " ", el("span", { class: "quiet" }, hit.text))));
    document.getElementById("hits").replaceChildren(el("p", { class: "say" },
      `${count(told.hits.length, "place")}${told.complete ? "" : ", and perhaps more: the search has its limits"}`), list);
  } catch (error) { say(error.message); }
});

const top = data.items;
if (data.path && top.path !== "state") {
  root.before(el("p", { class: "row tree-wait" }, el("a", { href: address("/state", data.agent, { at: data.at }) }, "the whole state"), " ", el("code", {}, top.path)));
}
fill(root, top, 0);
items()[0]?.setAttribute("tabindex", "0");
