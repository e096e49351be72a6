// Lets a user move in a timeline: zoom and pan, open lanes, and read calls by mouse and by keyboard.
class Timeline extends TimelineDrawing {
  static LEAST_MS = 0.05;
  static SPANS = 24;

  constructor(figure) {
    super();
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
    this.end = this.firstView(Math.max(hasDetail ? this.data.detailFromMs : 0, first));
    this.show(...this.end);
    this.start.textContent = this.opensAt ? this.opensAt[0].toUpperCase() + this.opensAt.slice(1) : "The end";
    this.listen();
    this.fold();
  }

  // Return what is shown at first: the step that the verdict names; else the last spans before the fault and what
  // follows; else, of a job that finished, a usual step; else the end.
  firstView(first) {
    const named = this.figure.dataset.step && timelineData.findStep(Number(this.figure.dataset.step), this.data);
    const fault = !named && this.data.events.find((one) => one.fault && one.atMs > first);
    if (!fault) {
      const leaders = this.data.lanes.filter((lane) => lane.detail.length);
      const isOpen = leaders.some((lane) => timelineData.spansOf(lane, this.data).some((span) => span.isOpen));
      const finished = !isOpen && !this.data.events.length && leaders.length > 0;
      const step = named || (finished && timelineData.usualStep(leaders[0], this.data));
      if (!step) return [first, this.length];
      this.opensAt = step.number === null ? step.label : `step ${step.number}`;
      const room = (step.endMs - step.startMs) * 0.6;
      return [Math.max(step.startMs - room, 0), Math.min(step.endMs + room, this.length)];
    }
    this.opensAt = "the fault";
    const lane = this.byRank.get(fault.ranks[0]) || this.data.lanes[0];
    const spans = timelineData.spansOf(lane, this.data).filter((span) => span.kind !== "step" && span.startMs < fault.atMs);
    const starts = spans.map((span) => span.startMs).sort((one, other) => one - other);
    const start = Math.max(starts.at(-Timeline.SPANS) ?? first, first);
    const before = Math.max(fault.atMs - start, this.length / 1000);
    return [fault.atMs - before * 1.05, Math.min(fault.atMs + before / 3, this.length)];
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

document.querySelectorAll("[data-lanes]").forEach((figure) => new Timeline(figure));
