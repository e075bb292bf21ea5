// The calls of a run in time: one bar each, where it began and how long it took.

import { count, el, embedded, short, span, svg } from "./parts.js";

const ROW = 26;
const NAME = 190;
const BAD = new Set(["in doubt", "lost", "failed"]);

export function waterfall(root, run, effects) {
  const calls = effects.map((one) => {
    const at = Date.parse(one.at);
    const took = one.status === "running" ? Math.max(0, Date.now() - at) : (one.took_s ?? 0) * 1000;
    return { earlier: [], ...one, from: one.kind === "read" && one.took_s !== null ? at - took : at, took };  // of a read, `at` is its end
  });
  const began = Math.min(Date.parse(run.began), ...calls.map((one) => one.from), ...calls.flatMap((one) => one.earlier.map((try_) => Date.parse(try_.at))));
  const ended = Math.max(run.ended ? Date.parse(run.ended) : 0, began + 1, ...calls.map((one) => one.from + one.took));
  const width = Math.max(320, root.clientWidth);
  const name = width < 560 ? 110 : NAME;
  const room = width - name - 84;
  const x = (time) => name + ((time - began) / (ended - began)) * room;
  const height = 28 + calls.length * ROW + 8;
  const picture = svg("svg", { width, height, role: "group",
    "aria-label": `${count(calls.length, "call")} within ${span((ended - began) / 1000)}` });
  const parts = room < 280 ? 2 : 4;
  for (let part = 0; part <= parts; part += 1) {
    const time = began + ((ended - began) * part) / parts;
    picture.append(svg("line", { class: "rule", x1: x(time), x2: x(time), y1: 22, y2: height }),
      svg("text", { class: "axis", x: x(time), y: 14 }, part ? span((time - began) / 1000) : "0"));
  }
  calls.forEach((one, at) => {
    const y = 28 + at * ROW;
    const bar = (kind, from, to, title) => svg("rect", { class: kind, x: x(from), y: y + 9, width: Math.max(3, x(to) - x(from)), height: ROW - 18, rx: 2 }, svg("title", {}, title));
    const kind = BAD.has(one.status) ? "bad" : one.status === "undone" || one.status === "rolled back" ? "undone" : one.kind === "read" ? "read" : "write";
    picture.append(svg("a", { href: `#call-${one.number}`, class: "bar-row" },
      svg("rect", { class: "row-back", x: 0, y, width, height: ROW }),
      svg("text", { class: "name", x: 12, y: y + 17 }, short(one.tool, name < 150 ? 14 : 26)),
      ...one.earlier.map((try_) => bar("bar earlier", Date.parse(try_.at), Date.parse(try_.ended ?? try_.at), `attempt ${try_.number}: ${try_.how} ${try_.why}`)),
      svg("rect", { class: `bar ${kind}`, x: x(one.from), y: y + 6, width: Math.max(3, x(one.from + one.took) - x(one.from)), height: ROW - 12, rx: 3 }),
      svg("text", { class: "took", x: Math.max(x(one.from) + 3, x(one.from + one.took)) + 6, y: y + 17 },
        `${one.took_s === null ? one.status : span(one.took_s)}${one.attempt > 1 ? ` ×${one.attempt}` : ""}`),
      svg("title", {}, `${one.tool}: ${one.status}`)));
  });
  root.replaceChildren(picture, el("p", { class: "legend quiet" },
    el("span", { class: "key-write" }, "changes something"), el("span", { class: "key-read" }, "reads"), el("span", { class: "key-bad" }, "failed or in doubt"),
    calls.some((one) => one.earlier.length) ? el("span", { class: "key-earlier" }, "an earlier attempt") : null));
}

function begin() {
  const root = document.getElementById("waterfall");
  if (!root) return;
  const data = embedded();
  waterfall(root, data.run, data.effects);
}
begin();
addEventListener("resize", begin);
document.addEventListener("holdfast:part", begin);
