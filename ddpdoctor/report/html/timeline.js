// Draws a timeline: a strip of the whole run, and lanes of ranks under a window that moves and zooms.
class Timeline {
  static ROW = 46;
  static LEAST_MS = 0.05;
  static SPARE_ROWS = 4;

  constructor(figure) {
    this.data = JSON.parse(document.getElementById(figure.dataset.lanes).textContent);
    this.byRank = new Map(this.data.lanes.map((lane) => [lane.rank, lane]));
    this.open = new Set();
    this.current = 0;
    this.chosen = null;
    this.length = Math.max(this.data.lengthMs, Timeline.LEAST_MS);
    this.figure = figure;
    this.build(figure.querySelector(".stage"));
    const hasDetail = this.data.lanes.some((lane) => lane.detail.length) && this.data.detailFromMs < this.length;
    const drawn = this.data.lanes.filter((lane) => lane.detail.length || !hasDetail);
    const first = Math.min(...drawn.map(timelineData.firstMs), this.length) - this.length * 0.02;
    this.end = [this.endFrom(Math.max(hasDetail ? this.data.detailFromMs : 0, first)), this.length];
    this.view = this.end;
    this.listen();
    this.fold();
  }

  // Return where the view of the end begins: a little before the fault, if one is known.
  endFrom(first) {
    const fault = this.data.moments.find((one) => one.fault);
    if (!fault) return first;
    const shown = Math.max(((this.length - fault.atMs) * 4) / 3, (this.length - first) / 10);
    return Math.max(first, this.length - shown);
  }

  build(stage) {
    const button = (label, words, act) => {
      const one = page.make("button", { type: "button", "aria-label": words }, label);
      one.addEventListener("click", act);
      return one;
    };
    this.range = page.make("span", { class: "dim" });
    const tools = page.make(
      "div", { class: "tools", role: "toolbar", "aria-label": "Timeline" },
      button("+", "Zoom in", () => this.zoom(0.5)), button("\u2212", "Zoom out", () => this.zoom(2)),
      button("Whole run", "Show the whole run", () => this.show(0, this.length)),
      button("The end", "Show the end in detail", () => this.show(...this.end)),
      this.range,
    );
    this.strip = page.makeSvg("svg", { class: "strip", height: 40, "aria-hidden": "true" });
    this.ticks = page.makeSvg("svg", { height: 26, "aria-hidden": "true" });
    this.rows = page.make("div", { class: "rows" });
    const axis = page.make("div", { class: "axis" }, page.make("span", {}, "ranks"), this.ticks);
    this.plot = page.make(
      "div", { class: "plot", tabindex: 0, role: "group", "aria-label": "Lanes of ranks. " + Timeline.KEYS }, axis, this.rows,
    );
    this.saying = page.make("p", { class: "saying dim keys" }, Timeline.KEYS);
    stage.append(this.hatching(), tools, this.strip, this.plot, this.legend(), this.saying);
  }

  hatching() {
    const line = page.makeSvg("path", { class: "hatch", d: "M0 6L6 0M-1 1L1 -1M5 7L7 5" });
    const pattern = page.makeSvg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, line);
    return page.makeSvg("svg", { class: "hidden", "aria-hidden": "true" }, page.makeSvg("defs", {}, pattern));
  }

  legend() {
    const used = new Set(this.data.whats.map((what) => this.data.kinds[what[0]]));
    const list = page.make("ul", { class: "legend" });
    for (const kind of this.data.kinds.filter((one) => used.has(one))) {
      const swatch = page.makeSvg("svg", { width: 16, height: 12, "aria-hidden": "true" });
      swatch.append(page.makeSvg("rect", { class: `k-${kind}`, width: 16, height: 12, rx: 2 }));
      if (kind === "wait") swatch.append(page.makeSvg("rect", { class: "wait-hatch", width: 16, height: 12 }));
      list.append(page.make("li", {}, swatch, ` ${kind}`));
    }
    if (this.data.moments.length) {
      const mark = page.makeSvg("svg", { width: 16, height: 12, "aria-hidden": "true" });
      mark.append(page.makeSvg("path", { class: "moment-mark", d: "M2 1H14L8 11z" }));
      list.append(page.make("li", {}, mark, " what happened"));
    }
    return list;
  }

  // The lanes as shown: a class is one lane, or when opened each of its ranks.
  fold() {
    this.shown = [];
    this.data.classes.forEach((ranks, number) => {
      const lanes = ranks.map((rank) => this.byRank.get(rank));
      const leader = lanes.find((lane) => lane.blamed) || lanes.find((lane) => lane.detail.length) || lanes[0];
      this.shown.push({ lane: leader, ranks, number, isClass: ranks.length > 1 });
      if (this.open.has(number)) lanes.forEach((lane) => this.shown.push({ lane, ranks: [lane.rank], number, isMember: true }));
    });
    this.current = Math.min(this.current, this.shown.length - 1);
    this.rows.replaceChildren(...this.shown.map((row, at) => this.makeRow(row, at)));
    this.plot.style.setProperty("--bar", `${this.rows.offsetWidth - this.rows.clientWidth}px`);
    this.draw();
  }

  makeRow(row, at) {
    const isOpen = this.open.has(row.number);
    const sign = row.isClass ? (isOpen ? "\u25be " : "\u25b8 ") : "";
    const count = row.isClass && row.ranks.length > 2 ? ` (${row.ranks.length})` : "";
    const culprit = row.lane.blamed ? "culprit, " : "";
    const label = page.make(row.isClass ? "button" : "div", { class: "label" });
    label.append(page.make("b", {}, sign + timelineData.ranks(row.ranks) + count), page.make("span", { class: "dim" }, culprit + row.lane.state));
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

  toggle(number) {
    if (!this.open.delete(number)) this.open.add(number);
    this.chosen = null;
    this.fold();
    const button = this.rows.querySelectorAll("button.label")[this.shown.filter((row) => row.isClass && row.number < number).length];
    button?.focus();
    page.say(`${this.shown.length} lanes`);
  }

  show(start, end) {
    const span = Math.min(Math.max(end - start, Timeline.LEAST_MS), this.length);
    const first = Math.min(Math.max(start, 0), this.length - span);
    this.view = [first, first + span];
    this.draw();
  }

  zoom(factor, share = 0.5) {
    const [start, end] = this.view;
    const at = start + (end - start) * share;
    this.show(at - (at - start) * factor, at + (end - at) * factor);
  }

  pan(share) {
    const by = (this.view[1] - this.view[0]) * share;
    this.show(this.view[0] + by, this.view[1] + by);
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
    const moments = this.moments().filter((one) => one.atMs >= start && one.atMs <= end).map((one) => {
      const x = this.x(one.atMs);
      const mark = page.makeSvg("path", { class: one.fault ? "moment-mark fault" : "moment-mark", d: `M${x - 6} 0H${x + 6}L${x} 9z` });
      mark.dataset.say = `${timelineData.clock(one.atMs)}: ${one.label}${one.ranks.length ? ` (${timelineData.ranks(one.ranks)})` : ""}`;
      return mark;
    });
    this.ticks.replaceChildren(...texts, ...moments);
  }

  // The fault comes last, so that it lies over what happened at the same time.
  moments() {
    return [...this.data.moments].sort((one, other) => one.fault - other.fault);
  }

  // Only the rows that are in sight are drawn.
  drawRows() {
    const first = Math.max(0, Math.floor(this.rows.scrollTop / Timeline.ROW) - Timeline.SPARE_ROWS);
    const count = Math.ceil(this.rows.clientHeight / Timeline.ROW) + 2 * Timeline.SPARE_ROWS;
    this.shown.forEach((row, at) => {
      row.element.classList.toggle("current", at === this.current && document.activeElement === this.plot);
      if (at < first || at >= first + count) row.bars.replaceChildren();
      else row.bars.replaceChildren(...this.drawLane(row));
    });
  }

  drawLane(row) {
    const height = Timeline.ROW - 1;
    const line = (ms, kind) => page.makeSvg("line", { class: kind, x1: this.x(ms), x2: this.x(ms), y1: 0, y2: height });
    const [start, end] = this.view;
    const moments = this.moments().filter((one) => !one.ranks.length || row.ranks.some((rank) => one.ranks.includes(rank)));
    return [
      ...this.marks.map((ms) => line(ms, "tick")), ...this.bars(row),
      ...moments.filter((one) => one.atMs >= start && one.atMs <= end).map((one) => line(one.atMs, one.fault ? "moment fault" : "moment")),
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
      parts.push(page.makeSvg("text", { class: span.kind === "wait" ? "over-wait" : "", x: left + 4, y: y + 11 }, shown));
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

  // Hovering looks into the data, because spans that are too close are not drawn.
  find(row, event) {
    const box = row.bars.getBoundingClientRect();
    const [start, end] = this.view;
    const slack = ((end - start) / box.width) * 3;
    const ms = start + ((event.clientX - box.left) / box.width) * (end - start);
    const y = event.clientY - box.top;
    const spans = timelineData.spansOf(row.lane, this.data).filter((span) => {
      const [top, height] = timelineData.BANDS[span.band];
      return y >= top - 1 && y <= top + height + 1 && span.startMs - slack <= ms && span.endMs + slack >= ms;
    });
    return spans.at(-1);
  }

  rowAt(event) {
    const element = event.target.closest?.(".lane");
    return element && event.target.closest(".bars") ? this.shown[element.dataset.at] : null;
  }

  hover(event) {
    const row = this.rowAt(event);
    const span = row && this.find(row, event);
    if (!span) {
      if (row) page.hideTip();
      return;
    }
    page.showTip(timelineData.words(row.lane, span), event.clientX, event.clientY);
  }

  choose(row, span) {
    this.chosen = span;
    this.current = this.shown.indexOf(row);
    const said = timelineData.words(row.lane, span);
    this.saying.textContent = said;
    this.saying.classList.remove("keys");
    page.say(said);
    const [start, end] = this.view;
    if (span.endMs < start || span.startMs > end) {
      const middle = span.startMs - (end - start) * 0.3;
      this.show(middle, middle + (end - start));
    }
    this.draw();
  }

  // Choose the next or previous call of the current lane; the first one chosen is the last in sight.
  next(by) {
    const row = this.shown[this.current];
    const spans = timelineData.spansOf(row.lane, this.data).filter((span) => span.kind !== "step");
    spans.sort((one, other) => one.startMs - other.startMs);
    if (!spans.length) return;
    const at = spans.indexOf(this.chosen);
    const inSight = spans.filter((span) => span.startMs <= this.view[1]).length - 1;
    this.choose(row, spans[Math.min(Math.max(at < 0 ? inSight : at + by, 0), spans.length - 1)]);
  }

  move(by) {
    this.current = Math.min(Math.max(this.current + by, 0), this.shown.length - 1);
    const row = this.shown[this.current];
    row.element.scrollIntoView({ block: "nearest" });
    page.say(`${timelineData.ranks(row.ranks)}${row.lane.blamed ? ", culprit" : ""}, ${row.lane.state}`);
    this.chosen = null;
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.shown[this.current];
    const acts = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15),
      ArrowUp: () => this.move(-1), ArrowDown: () => this.move(1),
      Home: () => this.show(0, this.length), End: () => this.show(...this.end),
      n: () => this.next(1), p: () => this.next(-1),
      Enter: () => row.isClass && this.toggle(row.number),
    };
    if (!acts[event.key] || (event.target !== this.plot && event.key === "Enter")) return;
    event.preventDefault();
    acts[event.key]();
  }

  listen() {
    this.plot.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["focus", "blur"]) this.plot.addEventListener(name, () => this.draw());
    this.rows.addEventListener("scroll", () => this.draw(), { passive: true });
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.rows.addEventListener("pointerleave", () => page.hideTip());
    this.plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = this.ticks.getBoundingClientRect();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1));
    }, { passive: false });
    this.drag(this.plot, (from, by) => this.show(from[0] - by * (from[1] - from[0]), from[1] - by * (from[1] - from[0])), () => this.width());
    this.drag(this.strip, (from, by) => this.show(from[0] + by * this.length, from[1] + by * this.length), () => this.strip.clientWidth);
    this.strip.addEventListener("pointerdown", (event) => this.jump(event));
    this.plot.addEventListener("click", (event) => {
      const row = this.rowAt(event);
      const span = row && !this.dragged && this.find(row, event);
      if (span) this.choose(row, span);
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // A click on the strip outside the window moves the window there.
  jump(event) {
    const box = this.strip.getBoundingClientRect();
    const ms = ((event.clientX - box.left) / box.width) * this.length;
    const [start, end] = this.view;
    if (ms < start || ms > end) this.show(ms - (end - start) / 2, ms + (end - start) / 2);
    if (this.dragging) this.dragging.view = this.view;
  }

  drag(element, act, width) {
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.target.closest(".label")) return;
      this.dragging = { element, x: event.clientX, view: this.view };
      this.dragged = false;
    });
    element.addEventListener("pointermove", (event) => {
      if (this.dragging?.element !== element) return;
      const by = event.clientX - this.dragging.x;
      if (Math.abs(by) < 4 && !this.dragged) return;
      if (!this.dragged) element.setPointerCapture(event.pointerId);
      this.dragged = true;
      act(this.dragging.view, by / width());
    });
    for (const name of ["pointerup", "pointercancel"]) element.addEventListener(name, () => { this.dragging = null; });
  }
}

Timeline.KEYS = "Keys: + and - zoom, left and right pan, up and down choose a lane, Enter opens it, n and p read its calls. Ctrl and wheel zoom, dragging pans.";
document.querySelectorAll("[data-lanes]").forEach((figure) => new Timeline(figure));
