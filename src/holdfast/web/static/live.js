// What happens now. One tab of a browser holds the stream and tells the others, since browsers open six connections to
// a host and no more; a tab that nobody looks at holds none. Then each part of the page that has changed is replaced.

const wanted = document.body.dataset.live;
const sign = document.getElementById("live");
const html = window.trustedTypes
  ? window.trustedTypes.createPolicy("holdfast", { createHTML: (text) => text })
  : { createHTML: (text) => text };
const others = "BroadcastChannel" in window ? new BroadcastChannel("holdfast-live") : null;
let stream = null;
let release = null;
let asking = false;
let again = false;
let said = 0;
let full = ""; // why there is no place for this tab; it asks again by itself

const words = { on: "Live", off: "Not live", full: "Not live: too many tabs", trouble: "The store cannot be read" };

function show(state, why = "") {
  if (!sign) return;
  sign.dataset.state = state;
  sign.textContent = words[state];
  sign.title = why;
}

function concerns(change) {
  return wanted === "*" || change.all || (change.agents || []).includes(wanted);
}

const opened = (part) => new Map([...part.querySelectorAll("details")].map((one) =>
  [`${one.closest("[id]")?.id} ${one.querySelector("summary").textContent}`, one]));

// The same address once more; whoever types, chooses or has opened something in a part is not disturbed.
export async function refresh() {
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "error" });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(html.createHTML(await answer.text()), "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const next = fresh.querySelector(`[data-part="${CSS.escape(part.dataset.part)}"]`);
      if (!next || next.outerHTML === part.outerHTML || part.querySelector("dialog[open], details[data-edit][open]")) continue;
      const focused = part.contains(document.activeElement) ? document.activeElement : null;
      if (focused && focused.matches("input, textarea, select")) continue;
      const key = focused && focused.id;
      const made = document.importNode(next, true);
      const before = opened(part);
      for (const [name, one] of opened(made)) one.open = before.get(name)?.open ?? one.open;
      part.replaceWith(made);
      if (key) document.getElementById(key)?.focus({ preventScroll: true });
      made.dispatchEvent(new CustomEvent("holdfast:part", { bubbles: true }));
    }
  } catch {
    show("off");
  } finally {
    asking = false;
    if (again) {
      again = false;
      setTimeout(refresh, 250);
    }
  }
}

function heard({ type, data, why }) {
  if (type === "state") {
    show(data, why);
  } else if (type === "changed" && concerns(data)) {
    if (!document.hidden) refresh();
  }
}

function tell(type, data, why) {
  heard({ type, data, why });
  others?.postMessage({ type, data, why });
}

function open() {
  stream = new EventSource("/events");
  stream.addEventListener("full", (event) => {
    full = `${JSON.parse(event.data).most} browsers are told what happens, and no more can be. Close one; this one asks again.`;
    tell("state", "full", full);
  });
  stream.addEventListener("hello", () => {
    tell("state", "on");
    if (said++) tell("changed", { all: true }); // what happened while there was no stream, nobody has told
  });
  stream.addEventListener("changed", (event) => tell("changed", JSON.parse(event.data)));
  stream.addEventListener("trouble", (event) => tell("state", "trouble", JSON.parse(event.data).message));
  stream.addEventListener("error", () => {
    if (!full) tell("state", "off"); // the stream that said it ended with that
    full = "";
  });
}

function close() {
  stream?.close();
  stream = null;
  release?.();
  release = null;
}

function begin() {
  if (document.hidden || stream || release) return;
  if (!navigator.locks) {
    open();
    return;
  }
  const mine = { cancelled: false };
  release = () => { mine.cancelled = true; };
  others?.postMessage({ type: "ask" });
  navigator.locks.request("holdfast-live", () => {
    if (mine.cancelled) return undefined;
    open();
    return new Promise((resolve) => { release = resolve; });
  });
}

// Ages grow while nothing happens, by the server's clock: else a program that has fallen silent would look busy for ever.
const ahead = Date.now() - Date.parse(document.body.dataset.now);
const units = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"]];

function older() {
  for (const one of document.querySelectorAll("time:not([aria-live] time)")) {
    const seconds = (Date.now() - ahead - Date.parse(one.dateTime)) / 1000;
    const [, unit, word] = units.find(([limit]) => Math.abs(seconds) < limit) ?? [];
    if (!unit || Math.abs(seconds) < 2) continue;
    const said = `${Math.floor(Math.abs(seconds) / unit)} ${word}`;
    one.textContent = seconds > 0 ? `${said} ago` : `in ${said}`;
  }
}
setInterval(older, 5000);

if (wanted) {
  show("off");
  others?.addEventListener("message", (event) => {
    if (event.data.type === "ask") {
      if (stream && stream.readyState === EventSource.OPEN) others.postMessage({ type: "state", data: "on" });
    } else heard(event.data);
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
    } else {
      begin();
      refresh();
    }
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", begin);
  begin();
}
