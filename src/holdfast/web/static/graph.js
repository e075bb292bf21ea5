// The graph of a history: branches as lanes, checkpoints as circles from the oldest (left) to the newest (right).
// It gets its data, and a source for what it asks for later, so that the exported file can draw it as well.

import { clock, count, changeLines, el, short, size, svg } from "./parts.js";

const LANE = 58;
const TOP = 46;
const LEFT = 76;
const STEPS = [3, 6, 12, 24, 44, 60, 80, 110];
const COLOURS = 6;
const MARKS = 4;
const BAD = new Set(["in doubt", "lost", "failed"]);

/** A mark that says what it is, and leads to its page where there is one. The lists below lead there by keyboard. */
function leading(to, text, mark) {
  mark.append(svg("title", {}, text));
  return to ? svg("a", { href: to, tabindex: "-1", "aria-label": text }, mark) : mark;
}

const worth = (one) => one.validity === "good" ? null : one.validity;

export class Graph {
  /** `source`: { change(id), open(checkpoint) -> address }, and where there are such pages { call, dump } as `open`. */
  constructor(root, data, source) {
    this.root = root;
    this.source = source;
    this.list = [...data.checkpoints].reverse();
    this.place = new Map(this.list.map((one, at) => [one.id, at]));
    this.data = data;
    this.zoom = this.fitting();
    this.at = this.list.length - 1;
    this.effects = [];
    this.walking = false;
    this.drawn = [];
    this.card = el("div", { class: "graph-card", role: "status", hidden: true });
    this.scroll = el("div", { class: "graph-scroll", tabindex: "-1" });
    this.root.replaceChildren(this.tools(), this.scroll, this.card);
    this.draw();
    this.scroll.scrollLeft = this.scroll.scrollWidth;
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.change(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
    this.scroll.addEventListener("mouseleave", () => this.hide());
    this.scroll.addEventListener("scroll", () => {
      this.left = this.scroll.scrollLeft;
      this.ended = this.left + this.scroll.clientWidth >= this.scroll.scrollWidth - 2;
    });
  }

  /** Look at the same part as the one before, which had less to show: nothing moves under somebody's hand. */
  follow(before) {
    if (before.chosen) {
      this.zoom = before.zoom;
      this.chosen = true;
      this.draw();
    }
    this.scroll.scrollLeft = before.ended === false ? before.left : this.scroll.scrollWidth;
    if (before.walking) this.go(this.place.get(before.list[before.at].id) ?? this.at);
  }

  fitting() {
    const room = Math.max(280, this.root.clientWidth - LEFT - 60);
    const fits = STEPS.findLastIndex((step) => step * this.list.length <= room);
    return Math.max(fits, Math.min(4, STEPS.length - 1));
  }

  get step() { return STEPS[this.zoom]; }
  x(at) { return LEFT + (at + 0.5) * this.step; }
  y(lane) { return TOP + lane * LANE; }
  get width() { return LEFT + this.list.length * this.step + 90; }

  tools() {
    const button = (text, label, by) =>
      el("button", { type: "button", class: "small", "aria-label": label, title: label, onclick: by }, text);
    return el("div", { class: "graph-tools" },
      button("−", "Smaller (key −)", () => this.change(-1)),
      button("+", "Larger (key +)", () => this.change(1)),
      button("⇤", "To the oldest (Home)", () => this.go(0)),
      button("⇥", "To the newest (End)", () => this.go(this.list.length - 1)),
      el("span", { class: "quiet" }, "Arrow keys walk, Enter opens the state."),
      el("span", { class: "legend quiet end" }, ...[["write", "a call that changed something"], ["read", "only read"],
        ["bad", "in doubt"]].map(([key, text]) => el("span", { class: `key-${key}` }, text)), "dashed: left behind"));
  }

  change(by) {
    const zoom = Math.min(STEPS.length - 1, Math.max(0, this.zoom + by));
    if (zoom === this.zoom) return;
    this.zoom = zoom;
    this.chosen = true;
    this.draw();
    const x = this.x(this.at);
    this.scroll.scrollLeft = x - this.scroll.clientWidth / 2;
  }

  draw() {
    const lanes = 1 + Math.max(0, ...this.list.map((one) => one.lane));
    const height = this.y(lanes - 1) + 50;
    const lines = svg("g", { class: "lines" });
    const dots = svg("g", { class: "dots" });
    this.nodes = [];
    this.list.forEach((one, at) => {
      lines.append(this.edge(one, at));
      const node = this.node(one, at);
      this.nodes.push(node);
      dots.append(node);
    });
    for (const one of this.data.rollbacks ?? []) {
      const arc = this.rollback(one);
      if (arc) lines.append(arc);
    }
    const picture = svg("svg", {
      width: this.width, height, role: "group",
      "aria-label": `${count(this.list.length, "checkpoint")} on ${count(lanes, "lane")}, oldest first`,
    }, svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      svg("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))), lines, dots);
    this.marks(picture);
    const focused = this.scroll.contains(document.activeElement);
    this.scroll.replaceChildren(picture, ...this.drawn.map((draw) => draw(this)));
    if (focused) this.nodes[this.at]?.focus({ preventScroll: true });
  }

  /** Something that is drawn below, with the same places from left to right: a chart. */
  below(draw) {
    this.drawn = [draw];
    const left = this.scroll.scrollLeft;
    this.draw();
    this.scroll.scrollLeft = left;
  }

  edge(one, at) {
    const [x, y] = [this.x(at), this.y(one.lane)];
    const lane = `line lane-${one.lane % COLOURS}${one.abandoned ? " abandoned" : ""}`;
    const from = this.place.get(one.previous);
    if (from === undefined) {
      return one.previous ? svg("path", { class: `${lane} before`, d: `M${Math.max(0, x - this.step)} ${y}H${x}` }) : svg("g");
    }
    const [px, py] = [this.x(from), this.y(this.list[from].lane)];
    if (py === y) return svg("path", { class: lane, d: `M${px} ${py}H${x}` });
    const bend = Math.min(x, px + Math.max(this.step, 18));
    const middle = (px + bend) / 2;
    return svg("path", { class: lane, d: `M${px} ${py}C${middle} ${py} ${middle} ${y} ${bend} ${y}H${x}` });
  }

  rollback(one) {
    const [from, to] = [this.place.get(one.from), this.place.get(one.to)];
    if (from === undefined || to === undefined) return null;
    const [x, y, tx, ty] = [this.x(from), this.y(this.list[from].lane), this.x(to), this.y(this.list[to].lane)];
    const below = Math.max(y, ty) + 48;
    return svg("path", { class: "rollback", "marker-end": "url(#arrow)", d: `M${x} ${y + 9}C${x} ${below} ${tx} ${below} ${tx} ${ty + 10}` },
      svg("title", {}, `went back, ${clock(one.time, true)}, by ${one.by}`));
  }

  node(one, at) {
    const [x, y] = [this.x(at), this.y(one.lane)];
    const radius = this.step < 10 ? 2.5 : this.step < 30 ? 4.5 : 7;
    const names = [...one.heads, ...one.tags.map((tag) => `tag ${tag}`)];
    const node = svg("a", {
      href: this.source.open(one), class: `node lane-${one.lane % COLOURS}${one.abandoned ? " abandoned" : ""}`,
      tabindex: at === this.at ? 0 : -1, "data-at": at,
      "aria-label": [`#${one.depth}`, one.label, names.join(", "), worth(one), one.abandoned ? "abandoned" : "", clock(one.time, true)].filter(Boolean).map((part) => short(part, 120)).join(", "),
      onmouseenter: () => this.show(at), onfocus: () => { this.at = at; this.walking = true; this.show(at); },
      onblur: (event) => { this.hide(); if (event.relatedTarget) this.walking = false; },
    }, svg("circle", { class: "hit", cx: x, cy: y, r: Math.max(radius + 5, 9) }),
      svg("circle", { class: `dot ${one.kind}${one.validity === "good" ? "" : " suspect"}`, cx: x, cy: y, r: radius }));
    if (one.kind !== "checkpoint" && radius > 5) {
      node.append(svg("text", { class: "sign", x, y: y + 4 }, { undo: "↶", redo: "↷", recover: "✚" }[one.kind] ?? "?"));
    }
    if (this.step >= 60 && one.label) node.append(svg("text", { class: "label", x, y: y + 24 }, short(one.label, Math.floor(this.step / 6.4))));
    if (this.step >= 24) {
      const first = (found, most) => `${short(found[0], most)}${found.length > 1 ? ` +${found.length - 1}` : ""}`;
      if (one.heads.length) node.append(svg("text", { class: "branch-name", x: x + radius + 5, y: y + 4 }, first(one.heads, 16)));
      if (one.tags.length) node.append(svg("text", { class: "tag", x, y: y - radius - 7 }, `⚑ ${first(one.tags, 12)}`));
    }
    return node;
  }

  /** Calls stand before the checkpoint that was saved next on their branch, the last ones, crashes and dumps after the one that they followed. */
  mark(effects) {
    this.effects = effects;
    this.draw();
  }

  marks(picture) {
    const of = new Map();
    for (const one of this.effects) {
      const mine = (point) => point.branch === one.branch || point.heads.includes(one.branch);
      let at = this.list.findIndex((point) => point.time >= one.at && mine(point));
      if (at < 0) at = this.list.findLastIndex(mine) + 0.5; // none was saved since
      if (at < 0) at = Math.max(0, this.list.findIndex((point) => point.time >= one.at));
      of.set(at, [...(of.get(at) ?? []), one]);
    }
    if (this.step >= 24) {
      for (const [at, calls] of of) {
        const [x, y] = [this.x(Math.ceil(at)) - this.step / 2, this.y(this.list[Math.floor(at)].lane)];
        calls.slice(0, MARKS).forEach((one, number) => picture.append(leading(this.source.call?.(one), `${one.tool}: ${one.status}`,
          svg("rect", { class: `mark ${BAD.has(one.status) ? "bad" : one.kind === "read" ? "read" : "write"}`,
            x: x - 4, y: y - 15 - number * 9, width: 8, height: 7, rx: 1.5 }))));
        if (calls.length > MARKS) picture.append(svg("text", { class: "label", x, y: y - 16 - MARKS * 9 }, `+${calls.length - MARKS}`));
      }
    }
    this.calls = of;
    for (const crash of this.data.crashes ?? []) {
      const at = this.place.get(crash.checkpoint);
      if (at === undefined) continue;
      const [x, y] = [this.x(at) + Math.max(6, this.step / 3), this.y(this.list[at].lane)];
      picture.append(leading(crash.dump && this.source.dump?.(crash), short(`${crash.what}: ${crash.error} ${crash.message}`, 200),
        svg("text", { class: "crash", x, y: y - 8 }, { rehydrate: "⚑", dump: "▣" }[crash.what] ?? "✗")));
    }
  }

  // -- walking, and what a circle tells

  key(event) {
    const moves = { ArrowLeft: () => this.beside(-1), ArrowRight: () => this.beside(1), ArrowUp: () => this.across(-1),
      ArrowDown: () => this.across(1), Home: () => 0, End: () => this.list.length - 1 };
    if (event.key === "+" || event.key === "=") this.change(1);
    else if (event.key === "-") this.change(-1);
    else if (event.key === "Escape") this.hide();
    else if (event.key in moves && event.target.closest(".node")) {
      const to = moves[event.key]();
      if (to >= 0) this.go(to);
    } else return;
    event.preventDefault();
  }

  /** Along the line: to the ancestor, or to the next one on this lane. */
  beside(by) {
    const one = this.list[this.at];
    if (by < 0) return this.place.get(one.previous) ?? -1;
    const next = this.list.findIndex((other, at) => at > this.at && other.previous === one.id && other.lane === one.lane);
    return next >= 0 ? next : this.list.findIndex((other) => other.previous === one.id);
  }

  across(by) {
    const lane = this.list[this.at].lane;
    let [best, found] = [Infinity, -1];
    this.list.forEach((one, at) => {
      const far = Math.abs(at - this.at) + 1000 * Math.abs(one.lane - lane);
      if ((one.lane - lane) * by > 0 && far < best) [best, found] = [far, at];
    });
    return found;
  }

  go(at) {
    if (!this.nodes[at]) return;
    this.nodes[this.at]?.setAttribute("tabindex", -1);
    this.at = at;
    this.nodes[at].setAttribute("tabindex", 0);
    const x = this.x(at);
    if (x < this.scroll.scrollLeft + 40 || x > this.scroll.scrollLeft + this.scroll.clientWidth - 40) {
      this.scroll.scrollLeft = x - this.scroll.clientWidth / 2;
    }
    this.nodes[at].focus({ preventScroll: true });
  }

  hide() { this.card.hidden = true; }

  async show(at) {
    const one = this.list[at];
    if (!one) return;
    const calls = [["", at], ["then ", at + 0.5]].flatMap(([when, place]) => (this.calls.get(place) ?? []).slice(0, 6).map((call) =>
      el("div", { class: BAD.has(call.status) ? "bad" : "quiet" }, `${when}${call.tool}: ${call.status}`)));
    const body = el("div", { class: "changes" }, el("span", { class: "quiet" }, "…"));
    this.card.replaceChildren(
      el("div", { class: "card-title" }, el("b", {}, `#${one.depth} ${short(one.label, 60) || "no label"}`),
        el("span", { class: "quiet" }, `${one.id.slice(0, 12)} · ${clock(one.time, true)} · ${size(one.size_bytes)}${one.abandoned ? " · abandoned" : ""}`),
        worth(one) && el("span", { class: "bad" }, worth(one))),
      ...calls, body);
    this.card.hidden = false;
    const box = this.scroll.getBoundingClientRect();
    const left = Math.max(0, Math.min(this.x(at) - this.scroll.scrollLeft - 160, box.width - 340));
    this.card.style.setProperty("left", `${left}px`);
    this.card.style.setProperty("top", `${this.scroll.offsetTop + this.y(one.lane) + 30}px`);
    const shown = (this.showing = {});
    try {
      const told = await this.source.change(one);
      if (this.showing !== shown) return;
      const lines = told.changes.slice(0, 8).flatMap((change) => changeLines(change, 90));
      const more = told.more + Math.max(0, told.changes.length - 8);
      body.replaceChildren(...(lines.length ? lines : [el("span", { class: "quiet" }, "The state is as before.")]),
        more ? el("div", { class: "quiet" }, count(more, "more change")) : "");
    } catch (error) {
      if (this.showing === shown) body.replaceChildren(el("span", { class: "bad" }, error.message));
    }
  }
}
