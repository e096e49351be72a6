// Reads the data of a timeline: see timeline.py for its form.
const timelineData = (() => {
  const TICKS_PER_MS = 100;
  const ABSENT = -1;
  // Where each kind of span is drawn in a lane: [top, height].
  const BANDS = { step: [4, 6], compute: [12, 14], calls: [28, 14] };
  const BAND_OF = {
    step: "step", forward: "compute", backward: "compute", batch: "compute", checkpoint: "compute", host: "compute",
    collective: "calls", "point-to-point": "calls", wait: "calls",
  };

  // Return spans in the order in which they are drawn: a wait lies over the call that it is part of.
  function unpack(flat, data) {
    const spans = [];
    let start = 0;
    for (let at = 0; at < flat.length; at += 4) {
      start += flat[at + 1];
      const [kind, label, group, shape, place] = data.whats[flat[at]];
      const isOpen = flat[at + 2] === ABSENT;
      const startMs = start / TICKS_PER_MS;
      spans.push({
        kind: data.kinds[kind], band: BAND_OF[data.kinds[kind]], label, group, shape, place, startMs, isOpen,
        endMs: isOpen ? Math.max(data.lengthMs, startMs) : startMs + flat[at + 2] / TICKS_PER_MS,
        number: flat[at + 3] === ABSENT ? null : flat[at + 3],
      });
    }
    return spans.sort((one, other) => (one.kind === "wait") - (other.kind === "wait") || one.startMs - other.startMs);
  }

  // Return what a lane did: its steps, the rest of the run in few spans, and every call of the end where that is known.
  function spansOf(lane, data) {
    if (!lane.spans) {
      const detail = unpack(lane.detail, data);
      const coarse = unpack(lane.coarse, data);
      const cut = detail.length ? data.detailFromMs : Infinity;
      const before = coarse.filter((span) => span.startMs < cut || span.kind === "step");
      const ended = (span) => (span.endMs > cut && span.kind !== "step" ? { ...span, endMs: cut, isOpen: false } : span);
      lane.spans = [...before.map(ended), ...detail];
    }
    return lane.spans;
  }

  // Return the span of a step, or of the steps with it among them, on the first lane that has it.
  function findStep(number, data) {
    const holds = (span) => {
      const [first, last] = span.label.match(/\d+/g) || [];
      return span.kind === "step" && (span.number === number || (last && first <= number && number <= last));
    };
    for (const lane of data.lanes) {
      const found = spansOf(lane, data).find(holds);
      if (found) return found;
    }
    return null;
  }

  // Return a step of usual length, of those with every call if there are such, or null if no step is known.
  function usualStep(lane, data) {
    const steps = spansOf(lane, data).filter((span) => span.kind === "step" && span.number !== null);
    const late = steps.filter((span) => span.startMs >= data.detailFromMs);
    const sorted = (late.length ? late : steps).sort((one, other) => one.endMs - one.startMs - other.endMs + other.startMs);
    return sorted[Math.floor(sorted.length / 2)] || null;
  }

  // Return when a lane begins, without unpacking it.
  function firstMs(lane) {
    const flat = lane.detail.length ? lane.detail : lane.coarse;
    return flat.length ? flat[1] / TICKS_PER_MS : Infinity;
  }

  function duration(ms) {
    if (ms < 1) return `${Math.round(ms * 1000)} us`;
    if (ms < 1000) return `${ms.toPrecision(3)} ms`;
    return ms < 120000 ? `${(ms / 1000).toPrecision(3)} s` : `${Math.round(ms / 60000)} min`;
  }

  function clock(ms) {
    return `${(ms / 1000).toFixed(3)} s`;
  }

  function name(span) {
    if (span.kind === "step" && span.number !== null) return `step ${span.number}`;
    const number = span.number === null ? "" : ` #${span.number}`;
    return (span.label || span.kind) + number;
  }

  function words(lane, span) {
    const what = span.kind === "wait" ? `wait in ${span.label || "a call"}` : name(span);
    const parts = [
      `rank ${lane.rank}: ${what}`, span.group && `group ${span.group}`, span.shape, span.place,
      `from ${clock(span.startMs)} for ${duration(span.endMs - span.startMs)}${span.isOpen ? ", not ended" : ""}`,
    ];
    return parts.filter(Boolean).join(", ");
  }

  // Format ranks as the rest of the page does: "ranks 0-6, 9".
  function ranks(numbers) {
    const runs = [];
    for (const rank of [...numbers].sort((one, other) => one - other)) {
      const last = runs.at(-1);
      if (last && last[1] === rank - 1) last[1] = rank;
      else runs.push([rank, rank]);
    }
    const written = runs.map(([first, last]) => (first === last ? `${first}` : `${first}${last === first + 1 ? ", " : "-"}${last}`)).join(", ");
    return `rank${numbers.length > 1 ? "s" : ""} ${written}`;
  }

  return { BANDS, spansOf, findStep, usualStep, firstMs, duration, clock, name, words, ranks };
})();
