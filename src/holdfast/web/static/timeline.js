// The page of one timeline: graph, marks, charts. What it shows is in its address: ?page, ?n, ?of.

import { Graph } from "./graph.js";
import { chart } from "./chart.js";
import { address, ask, el, embedded } from "./parts.js";

let graph = null;

function begin() {
  const root = document.getElementById("graph");
  if (!root) return;
  const data = embedded();
  const before = graph;
  graph = new Graph(root, data, {
    change: remembered((one) => ask("/change", data.agent, { at: `id:${one.id}` })),
    open: (one) => address("/state", data.agent, { at: `id:${one.id}` }),
    call: (one) => one.run ? address("/run", data.agent, { id: one.run, branch: one.branch, call: one.number }) : address("/runs", data.agent),
    dump: (one) => address("/dump", undefined, { file: one.dump.split("/").at(-1) }),
  });
  if (before) graph.follow(before);
  const times = data.checkpoints.map((one) => one.time);
  if (times.length) {
    // Calls after the newest checkpoint belong to the first window, too.
    const to = data.page === 1 && !data.at ? "" : times[0];
    ask("/marks", data.agent, { from: data.more ? times.at(-1) : "", to }).then((told) => graph.mark(told.effects), () => {});
  }
  charts(graph, data);
}

function remembered(question) {
  const known = new Map();
  return (one) => {
    if (!known.has(one.id)) known.set(one.id, question(one));
    return known.get(one.id);
  };
}

function charts(graph, data) {
  const form = document.getElementById("chart-form");
  const said = document.getElementById("chart-said");
  const draw = async (of) => {
    said.textContent = "";
    try {
      const told = await ask("/series", data.agent, { of, at: data.at, page: data.page, n: data.n });
      graph.below(chart(of, told.values));
      if (told.cut) said.textContent = "Not all could be looked up in time.";
      const url = new URL(location);
      if (url.searchParams.get("of") !== of) {
        url.searchParams.set("of", of);
        history.replaceState(null, "", url);
      }
    } catch (error) { said.textContent = error.message; }
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); draw(form.of.value.trim() || "size"); });
  ask("/numbers", data.agent).then(({ paths }) => {
    const list = document.getElementById("chart-paths");
    const known = ["size", "changes", "stall"];
    list.replaceChildren(...[...known, ...paths].map((path) => el("option", { value: path })));
    document.getElementById("chart-quick").replaceChildren(...[...known, ...paths].slice(0, 8).map((path) =>
      el("button", { type: "button", class: "small", onclick: () => { form.of.value = path; draw(path); } }, path)));
    const of = form.of.value || paths.find((path) => !path.startsWith("len(")) || "size";
    form.of.value = of;
    draw(of);
  }, () => draw("size"));
}

begin();
document.addEventListener("holdfast:part", (event) => { if (event.target.dataset.part === "graph") begin(); });
