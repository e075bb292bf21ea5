// A figure over time, below the graph and in line with it: one point for each checkpoint, joined as history is.

import { el, short, size, span, svg } from "./parts.js";

const HEIGHT = 130;
const PAD = 16;

const worded = { size, stall: span };

/** What `Graph.below` draws. `values` has a number, or null, for ids. */
export function chart(of, values) {
  return (graph) => {
    const known = Object.values(values).filter((value) => typeof value === "number");
    if (!known.length) return el("p", { class: "quiet chart-empty" }, `No number is known for ${short(of, 60)} here.`);
    let [low, high] = [Math.min(...known), Math.max(...known)];
    if (low > 0 && low < high / 2) low = 0;
    const flat = low === high;
    if (flat) [low, high] = [low - (Math.abs(low) || 1), high + (Math.abs(high) || 1)];
    const y = (value) => HEIGHT - PAD - ((value - low) / (high - low)) * (HEIGHT - 2 * PAD);
    const write = worded[of] ?? ((value) => Number(value.toPrecision(6)).toLocaleString("en"));
    const picture = svg("svg", { class: "chart", width: graph.width, height: HEIGHT, role: "img",
      "aria-label": `${short(of, 60)}: from ${write(Math.min(...known))} to ${write(Math.max(...known))}` });
    for (const value of flat ? known.slice(0, 1) : low < 0 && high > 0 ? [low, 0, high] : [low, high]) {
      picture.append(svg("line", { class: value === 0 && low < 0 ? "zero" : "rule", x1: 0, x2: graph.width, y1: y(value), y2: y(value) }));
    }
    graph.list.forEach((one, at) => {
      const value = values[one.id];
      if (typeof value !== "number") return;
      const lane = `lane-${one.lane % 6}${one.abandoned ? " abandoned" : ""}`;
      const from = graph.place.get(one.previous);
      const before = from === undefined ? undefined : values[one.previous];
      if (typeof before === "number") {
        picture.append(svg("path", { class: `line ${lane}`, d: `M${graph.x(from)} ${y(before)}L${graph.x(at)} ${y(value)}` }));
      }
      if (graph.step >= 6) {
        picture.append(svg("circle", { class: `dot ${lane}`, cx: graph.x(at), cy: y(value), r: graph.step < 24 ? 2 : 3.5 },
          svg("title", {}, `#${one.depth}: ${write(value)}`)));
      }
    });
    return el("figure", { class: "chart-figure" },
      el("figcaption", {}, el("b", {}, short(of, 24)), ...(flat ? [el("span", {}, write(known[0]))] : [el("span", {}, write(high)), el("span", { class: "low" }, write(low))])), picture);
  };
}
