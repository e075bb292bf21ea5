// The exported file: the same graph, with what it asks for already here.

import { changeLines, clock, count, el, embedded, short, size, visible } from "./parts.js";
import { Graph } from "./graph.js";
import { chart } from "./chart.js";
import { waterfall } from "./waterfall.js";

const data = embedded();
const told = data.timeline;
const points = new Map(told.checkpoints.map((one) => [one.id, one]));
const none = { changes: [], more: 0 };

document.getElementById("about").textContent = [
  count(told.total, "checkpoint"), told.more ? `the newest ${told.checkpoints.length} are here` : "",
  data.left_out ? `changes of ${data.left_out} older ones are left out` : "", `written ${clock(data.made, true)}`,
  Object.keys(data.redacted).length ? "what looks secret was taken out" : ""].filter(Boolean).join(" · ");

const graph = new Graph(document.getElementById("graph"), told, {
  change: async (one) => data.changes[one.id] ?? none,
  open: (one) => `#${one.id}`,
});
graph.mark(data.effects.filter((one) => !one.again));

const draw = (of) => graph.below(chart(of, data.series[of]));
document.getElementById("figures").replaceChildren(...Object.keys(data.series).map((of) =>
  el("button", { type: "button", class: "small", onclick: () => draw(of) }, short(of, 40))));
draw(Object.keys(data.series).find((of) => !["size", "changes"].includes(of)) ?? "size");

function choose() {
  const one = points.get(location.hash.slice(1)) ?? told.checkpoints[0];
  const box = document.getElementById("chosen");
  if (!one) { box.replaceChildren(el("p", {}, "There is no checkpoint.")); return; }
  const found = data.changes[one.id];
  box.replaceChildren(
    el("h2", {}, `#${one.depth} ${short(one.label, 100) || one.id.slice(0, 12)}`),
    el("p", { class: "muted" }, `${one.id.slice(0, 24)} · ${clock(one.time, true)} · ${one.branch} · ${size(one.size_bytes)}${one.abandoned ? " · abandoned" : one.unknown ? " · not looked at" : ""}`),
    el("div", { class: "changes" }, ...(found ? found.changes.flatMap((change) => changeLines(change, 2000)) : [el("p", { class: "quiet" }, "What it changed is not in this file.")])),
    found?.more ? el("p", { class: "quiet" }, count(found.more, "more change")) : "");
}
choose();
addEventListener("hashchange", choose);

if (data.runs.length) {
  const box = document.getElementById("runs");
  box.hidden = false;
  box.append(el("h2", {}, "Runs"));
  for (const run of data.runs) {
    const calls = data.effects.filter((one) => one.run === run.id && one.branch === run.branch).reverse();
    const bars = el("div", { class: "waterfall" });
    box.append(el("div", { class: "pad" }, el("h3", {}, `${run.function}: ${run.status}${run.branch === "main" ? "" : ` on ${run.branch}`}`), bars));
    if (calls.length) waterfall(bars, run, calls);
  }
}
document.getElementById("state").textContent = visible(JSON.stringify(data.state, null, 2));
