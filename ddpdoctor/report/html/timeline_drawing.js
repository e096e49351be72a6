// Draws a timeline: a strip of the whole run, and lanes of ranks under a window.
class TimelineDrawing {
  static ROW = 46;
  static SPARE_ROWS = 4;
  static KEYS = "Keys: + and - zoom, left and right pan, up and down choose a lane, Enter opens it, n and p read its calls. Ctrl and wheel zoom, dragging pans.";

  build(stage) {
    const button = (label, words, act) => {
      const one = page.make("button", { type: "button", "aria-label": words }, label);
      one.addEventListener("click", act);
      return one;
    };
    this.range = page.make("span", { class: "dim" });
    this.start = button("", "Show what was shown first", () => this.show(...this.end));
    this.list = page.make("ul", { class: "legend" });
    const tools = page.make(
      "div", { class: "tools", role: "toolbar", "aria-label": "Timeline" },
      button("+", "Zoom in", () => this.zoom(0.5)), button("\u2212", "Zoom out", () => this.zoom(2)),
      button("Whole run", "Show the whole run", () => this.show(0, this.length)),
      this.start,
      this.range,
    );
    this.strip = page.makeSvg("svg", { class: "strip", height: 40, "aria-hidden": "true" });
    this.ticks = page.makeSvg("svg", { height: 26, "aria-hidden": "true" });
    this.rows = page.make("div", { class: "rows" });
    const axis = page.make("div", { class: "axis" }, page.make("span", {}, "ranks"), this.ticks);
    this.plot = page.make(
      "div", { class: "plot", tabindex: 0, role: "group", "aria-label": "Lanes of ranks. " + TimelineDrawing.KEYS }, axis, this.rows,
    );
    this.saying = page.make("p", { class: "saying dim keys" }, TimelineDrawing.KEYS);
    stage.append(this.hatching(), tools, this.strip, this.plot, this.list, this.saying);
  }

  hatching() {
    const line = page.makeSvg("path", { class: "hatch", d: "M0 6L6 0M-1 1L1 -1M5 7L7 5" });
    const pattern = page.makeSvg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, line);
    return page.makeSvg("svg", { class: "hidden", "aria-hidden": "true" }, page.makeSvg("defs", {}, pattern));
  }

  // The legend has what is drawn, and nothing else.
  drawLegend() {
    const swatch = (...parts) => page.makeSvg("svg", { width: 16, height: 12, "aria-hidden": "true" }, ...parts);
    const drawn = (what) => [this.strip, this.rows].some((part) => part.querySelector(what));
    const entries = this.data.kinds.filter((kind) => drawn(`.k-${kind}`)).map((kind) => {
      const parts = [page.makeSvg("rect", { class: `k-${kind}`, width: 16, height: 12, rx: 2 })];
      if (kind === "wait") parts.push(page.makeSvg("rect", { class: "wait-hatch", width: 16, height: 12 }));
      return page.make("li", {}, swatch(...parts), ` ${kind}`);
    });
    for (const [what, label] of [[".event-mark.fault", "the fault"], [".event-mark:not(.fault)", "other event"]]) {
      if (!this.ticks.querySelector(what)) continue;
      const mark = page.makeSvg("path", { class: what.includes("not") ? "event-mark" : "event-mark fault", d: "M2 1H14L8 11z" });
      entries.push(page.make("li", {}, swatch(mark), ` ${label}`));
    }
    this.list.replaceChildren(...entries);
  }

  makeRow(row, at) {
    const isOpen = this.open.has(row.number);
    const sign = row.isClass ? (isOpen ? "\u25be " : "\u25b8 ") : "";
    const count = row.isClass && row.ranks.length > 2 ? `${row.ranks.length} ranks, ` : "";
    const culprit = row.lane.blamed ? "culprit, " : "";
    const label = page.make(row.isClass ? "button" : "div", { class: "label" });
    label.append(page.make("b", {}, sign + timelineData.ranks(row.ranks)), page.make("span", { class: "dim" }, culprit + count + row.lane.state));
    if (row.isClass) {
      label.type = "button";
      label.setAttribute("aria-expanded", isOpen);
      label.addEventListener("click", () => this.toggle(row.number));
    }
    row.bars = page.makeSvg("svg", { class: "bars", "aria-hidden": "true" });
    const kind = `lane${row.lane.blamed ? " blamed" : ""}${row.isMember ? " member" : ""}`;
    row.element = page.make("div", { class: kind, "data-at": at }, label, row.bars);
    return row.element;
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      const [start, end] = this.view;
      this.range.textContent = `${timelineData.clock(start)} to ${timelineData.clock(end)} of ${timelineData.clock(this.length)}`;
      this.drawStrip();
      this.drawTicks();
      this.drawRows();
      this.drawLegend();
    });
  }

  width() {
    return this.ticks.clientWidth || 600;
  }

  x(ms) {
    return ((ms - this.view[0]) / (this.view[1] - this.view[0])) * this.width();
  }

  drawTicks() {
    const [start, end] = this.view;
    const rough = (end - start) / Math.max(2, this.width() / 95);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const digits = Math.max(0, -Math.floor(Math.log10(step / 1000) + 1e-9));
    this.marks = [];
    for (let at = Math.ceil(start / step); at * step <= end; at += 1) this.marks.push(at * step);
    const texts = this.marks.filter((ms) => this.x(ms) < this.width() - 30).map((ms) =>
      page.makeSvg("text", { x: this.x(ms) + 3, y: 17 }, `${(ms / 1000).toFixed(Math.min(digits, 5))} s`));
    const events = this.events().filter((one) => one.atMs >= start && one.atMs <= end).map((one) => {
      const x = this.x(one.atMs);
      const mark = page.makeSvg("path", { class: one.fault ? "event-mark fault" : "event-mark", d: `M${x - 6} 0H${x + 6}L${x} 9z` });
      mark.dataset.say = `${timelineData.clock(one.atMs)}: ${one.label}${one.ranks.length ? ` (${timelineData.ranks(one.ranks)})` : ""}`;
      return mark;
    });
    this.ticks.replaceChildren(...texts, ...events);
  }

  // The fault comes last, so that it lies over what happened at the same time.
  events() {
    return [...this.data.events].sort((one, other) => one.fault - other.fault);
  }

  // Only the rows that are in sight are drawn.
  drawRows() {
    const first = Math.max(0, Math.floor(this.rows.scrollTop / TimelineDrawing.ROW) - TimelineDrawing.SPARE_ROWS);
    const count = Math.ceil(this.rows.clientHeight / TimelineDrawing.ROW) + 2 * TimelineDrawing.SPARE_ROWS;
    this.shown.forEach((row, at) => {
      row.element.classList.toggle("current", at === this.current && document.activeElement === this.plot);
      if (at < first || at >= first + count) row.bars.replaceChildren();
      else row.bars.replaceChildren(...this.drawLane(row));
    });
  }

  drawLane(row) {
    const height = TimelineDrawing.ROW - 1;
    const line = (ms, kind) => page.makeSvg("line", { class: kind, x1: this.x(ms), x2: this.x(ms), y1: 0, y2: height });
    const [start, end] = this.view;
    const events = this.events().filter((one) => !one.ranks.length || row.ranks.some((rank) => one.ranks.includes(rank)));
    return [
      ...this.marks.map((ms) => line(ms, "tick")), ...this.bars(row),
      ...events.filter((one) => one.atMs >= start && one.atMs <= end).map((one) => line(one.atMs, one.fault ? "event fault" : "event")),
    ];
  }

  bars(row) {
    const [start, end] = this.view;
    const drawn = [];
    const last = {};
    for (const span of timelineData.spansOf(row.lane, this.data)) {
      if (span.endMs < start || span.startMs > end) continue;
      const x = Math.max(this.x(span.startMs), -2);
      const width = Math.max(Math.min(this.x(span.endMs), this.width() + 2) - x, 1);
      const before = last[span.kind];
      if (width < 2 && before && x - before.x < 2 && span !== this.chosen) continue; // too close to tell apart
      last[span.kind] = { x };
      drawn.push(...this.bar(span, x, width));
    }
    return drawn;
  }

  bar(span, x, width) {
    const [y, height] = timelineData.BANDS[span.band];
    const place = { x, y, width: width > 4 ? width - 0.7 : width, height, rx: width > 6 ? 2 : 0 };
    const on = span === this.chosen ? " on" : "";
    const parts = [page.makeSvg("rect", { class: `k-${span.kind}${on}`, ...place })];
    if (span.kind === "wait") parts.push(page.makeSvg("rect", { class: "wait-hatch", ...place }));
    const left = Math.max(x, 0);
    const room = Math.min(x + width, this.width()) - left;
    const text = span.kind === "wait" ? `wait in ${span.label}` : timelineData.name(span);
    const fits = Math.floor((room - 8) / 6);
    if (span.band !== "step" && fits >= Math.min(text.length, 5)) {
      const shown = text.length > fits ? `${text.slice(0, fits - 1)}\u2026` : text;
      // No hatching behind a label
      if (span.kind === "wait") {
        parts.push(page.makeSvg("rect", { class: "k-wait", x: left + 1, y: y + 1, width: Math.min(shown.length * 6.4 + 6, room - 2), height: height - 2 }));
      }
      parts.push(page.makeSvg("text", { x: left + 4, y: y + 11 }, shown));
    }
    return parts;
  }

  drawStrip() {
    const width = this.strip.clientWidth || 800;
    const scale = width / this.length;
    const parts = this.data.classes.slice(0, 6).flatMap((ranks, number) => {
      const lanes = ranks.map((rank) => this.byRank.get(rank));
      const lane = lanes.find((one) => one.blamed) || lanes.find((one) => one.detail.length) || lanes[0];
      return this.stripLane(lane, 3 + number * 6, scale);
    });
    const [start, end] = this.view;
    const box = { class: "window", x: start * scale, width: Math.max((end - start) * scale, 3), y: 1, height: 38, rx: 3 };
    this.strip.replaceChildren(...parts, page.makeSvg("rect", box));
  }

  stripLane(lane, y, scale) {
    const drawn = [];
    let edge = -1;
    for (const span of timelineData.spansOf(lane, this.data)) {
      if (span.kind === "step") continue;
      const x = span.startMs * scale;
      const width = Math.max((span.endMs - span.startMs) * scale, 1);
      if (x + width < edge + 1 && span.kind !== "wait") continue;
      edge = Math.max(edge, x + width);
      drawn.push(page.makeSvg("rect", { class: `k-${span.kind}`, x, y, width, height: 4.5 }));
    }
    return drawn;
  }
}
