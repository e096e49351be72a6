"""Where the time of a step goes, what changes are predicted to gain, and how two runs differ."""

from __future__ import annotations

import math
import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import decode
from ddpdoctor.model.steps import Budget, NetworkUse
from ddpdoctor.model.tuning import Bound, PredictedStep, RunDifferences, SpeedComparison, Topic
from ddpdoctor.model.words import count_of, format_about
from ddpdoctor.report import blocks as bl
from ddpdoctor.report.findings import read_part, read_picture

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.tuning import RunSpeed

LEAST_GAIN = 0.05  # Of the step. Our choice: predictions are off by about as much.
MOST_ROWS = 5
LOW_EFFICIENCY = 0.7  # our choice: below this, a job without a finding deserves attention as well
LOADING, LACKING = "data loading", "waited for a core"  # the phase of the budget, and what a prediction is refused for
SHOWN_SHARE = 0.001  # phases below this share of the step on every rank are left out
STEP = "step"
LIMIT = (
    "The intervals (95%) hold what varies within each run. Two runs of one job may differ by more: run A twice to see."
)
HEADS = ("about", "what", "A", "B")
ABSENT = "-"
MAX_CELL = 48  # Longer values are cut in the table. JSON and CSV have more of them.


def speed_sections(report: Report) -> tuple[bl.Section, ...]:
    """Return the section with the time budget, or nothing if the user did not ask for it."""
    said = speed_data(report)
    if not said.get("asked"):
        return ()
    budget = read_part(Budget, said.get("budget"), "time budget")
    if budget is None:
        return ((bl.Heading("time of a step"), bl.Text(f"cannot tell: {said.get('reason', 'unknown')}", indent=2)),)
    seen = count_of(budget.count, "step")
    where = " on the GPU" if budget.is_device else ""
    mean = "" if budget.steps == budget.count else f", mean of {budget.steps}"
    phases = []
    for row in budget.phases:
        if max(row.critical_ms, row.worst_ms) >= SHOWN_SHARE * budget.wall_ms:
            share, worst = f"{row.critical_ms / budget.wall_ms:.1%}", f"{number(row.worst_ms)} (rank {row.worst_rank})"
            phases.append((row.phase, number(row.critical_ms), share, number(row.median_ms), worst))
    network = network_words(read_part(NetworkUse, said.get("network"), "use of the network"))
    shares = f"communication {budget.communication_share:.0%}, waiting for slower ranks {budget.waiting_share:.0%}"
    lines = [f"{shares} (median rank): scaling efficiency is at most {budget.efficiency_bound:.0%}"]
    if budget.overlap is not None:
        lines.append(f"backward hides about {budget.overlap:.0%} of the reduction")
    if budget.samples_per_s is not None:
        lines.append(f"{budget.samples_per_s:,.0f} samples/s over all ranks")
    if budget.own_ms >= SHOWN_SHARE * budget.wall_ms:
        lines.append(f"ddpdoctor's own checks of replicas take {ms(budget.own_ms)} a step more, and are not included")
    shown: bl.Section = (
        bl.Heading(f"time of a step{where}: {ms(budget.wall_ms)} ({seen}{mean})"),
        *speed_bars(report),
        bl.table_of(("phase", ("critical rank", "ms"), "share", ("median rank", "ms"), ("worst rank", "ms")), phases),
        *(bl.Text(line, indent=2) for line in (*lines, network) if line),
    )
    # The changes that gain most
    predictions = read_part(tuple[PredictedStep, ...], said.get("predictions"), "predictions") or ()
    rows = []
    for step in [step for step in predictions if step.gain >= LEAST_GAIN][:MOST_ROWS]:
        ends = [f"{max(0.0, 1 - ratio):.0%}" for ratio in (step.high, step.low) if ratio is not None]
        is_range = step.bound is Bound.RANGE  # such as "31% to 40%"
        gain = " to ".join(dict.fromkeys(ends)) if is_range else f"{step.bound.value} {step.gain:.0%}"
        rows.append((step.change, gain, step.assumes))
    if not rows:
        return (shown,)
    heading = bl.Heading("what a change would gain (predicted)")
    table = bl.table_of(("change", "shorter step", "if"), rows, left={"change", "if"}, weights={"if": 1})
    refused = next((step.reason for step in predictions if step.reason), "")
    more = bl.Text(f"Other settings of DDP cannot be predicted here: {refused}", indent=2)
    return (shown, (heading, table, *([more] if refused else ())))


def speed_headline(report: Report) -> tuple[str, bl.Tone]:
    """Say what share of a step could be won back, or that cores are contended; nothing without a time budget."""
    said = speed_data(report)
    budget = read_part(Budget, said.get("budget"), "time budget") if said.get("asked") else None
    if budget is None:
        return "", bl.Tone.PLAIN
    parts = {"communication": budget.communication_share, "waiting for slower ranks": budget.waiting_share}
    parts |= {row.phase: row.median_ms / budget.wall_ms for row in budget.phases if row.phase == LOADING}
    part, share = max(parts.items(), key=lambda item: item[1])
    words = f"{part} takes {share:.0%} of a step, the largest part that could be won back"
    words = words if share >= LEAST_GAIN else f"less than {LEAST_GAIN:.0%} of a step could be won back"
    predictions = read_part(tuple[PredictedStep, ...], said.get("predictions"), "predictions") or ()
    if lacking := next((step.reason for step in predictions if LACKING in step.reason), ""):
        words = f"the cores are contended: {lacking}"
    if budget.efficiency_bound >= LOW_EFFICIENCY:
        return f"no problem found{', but' if lacking else ';'} {words}", bl.Tone.PLAIN
    return f"{words}; scaling efficiency is at most {budget.efficiency_bound:.0%}", bl.Tone.WARNING


def speed_data(report: Report) -> dict[str, Any]:
    """Return what a report says of speed. Empty if it says nothing, or is damaged there."""
    plain = report.data.get("speed")
    return plain if isinstance(plain, dict) else {}


def network_words(use: NetworkUse | None) -> str | None:
    """Say what the network could carry and what the job uses of it, or nothing if one of them is unknown."""
    if use is None or use.limit_gb_s is None:
        return None
    used = f"{use.used_gb_s:.2g} GB/s on average ({format_about(use.step_bytes)} a step)"
    return f"the network could carry {use.limit_gb_s:.3g} GB/s ({use.source}); the reductions of this job use {used}"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ms(value: float) -> str:
    return f"{number(value)} ms"


STRAGGLER = "DD610"
SPEED = "DD8"
MAX_BARS = 24  # our choice: more bars cannot be compared by eye
WAITING = "waiting for ranks"  # also the name of this phase in a budget
# Names of the medians that a report has of each rank. All but the last are without waiting.
PHASES = {
    "before_forward_ms": "before forward",
    "forward_ms": "forward",
    "between_ms": "between forward and backward",
    "backward_ms": "backward",
    "waited_ms": WAITING,
}


def speed_bars(report: Report) -> Iterator[bl.Bars]:
    """Yield the time of a step on each rank by phase, if that is known. Of many ranks, the busiest are shown."""
    budget, phases = read_picture(Budget, speed_data(report).get("budget")), {}
    if budget is not None:
        rows = [row for row in budget.phases if max(row.critical_ms, row.worst_ms) >= SHOWN_SHARE * budget.wall_ms]
        phases = {row.phase: dict(zip(budget.ranks, row.ranks_ms, strict=False)) for row in rows}
    if not any(phases.values()):  # an older run, or too few steps for a budget
        paces = read_paces(report)
        phases = {label: {rank: pace[key] for rank, pace in paces.items()} for key, label in PHASES.items()}
    slow = (finding for finding in report.findings if finding.code.startswith((STRAGGLER, SPEED)))
    named = {rank for finding in slow for rank in finding.ranks}
    ranks = set[int]().union(*phases.values())
    busy = {rank: sum(times.get(rank, 0) for name, times in phases.items() if name != WAITING) for rank in ranks}
    shown = sorted(sorted(ranks, key=lambda rank: (rank not in named, -busy[rank]))[:MAX_BARS])
    if shown:
        values = {rank: tuple(times.get(rank, 0) for times in phases.values()) for rank in shown}
        bars = tuple((f"rank {rank}", rank in named, values[rank]) for rank in shown)
        legend = bl.not_shown(len(ranks) - len(shown), "rank")
        yield bl.Bars(title="usual step by rank", unit="ms", parts=tuple(phases), rows=bars, legend=legend)


def read_paces(report: Report) -> dict[int, Mapping[str, float]]:
    """Return the usual step of each rank. A row that lacks a time, as in a damaged report, is left out."""
    rows = report.data.get("steps")
    paces: dict[int, Mapping[str, float]] = {}
    for row in rows if isinstance(rows, list) else ():
        rank: Any = row.get("rank") if isinstance(row, dict) else None
        values = [row.get(key) for key in ("step_ms", *PHASES)] if type(rank) is int else [None]
        if all(type(value) in {int, float} and math.isfinite(value) for value in values):  # type: ignore[arg-type]
            paces[rank] = row
    return paces


def comparison_content(report: Report) -> bl.Content:
    found = decode(SpeedComparison, report.data["comparison"])
    about = bl.FactList((_compared_run("A", found.first), _compared_run("B", found.second)))
    least_ms = SHOWN_SHARE * max(found.first.wall_ms, found.second.wall_ms)
    every = [*((phase.phase, phase.time) for phase in found.phases), (STEP, found.step)]
    rows = [(name, time) for name, time in every if name == STEP or max(time.first_ms, time.second_ms) >= least_ms]
    shown, tones = [], dict[int, bl.Tone]()
    for at, (name, time) in enumerate(rows):
        way, tone = ("shorter", bl.Tone.GOOD) if time.change_ms < 0 else ("longer", bl.Tone.WARNING)
        span = f"{_signed(time.low_ms)} to {_signed(time.high_ms)}"
        times = (number(time.first_ms), number(time.second_ms), _signed(time.change_ms), span)
        shown.append((name, *times, way if time.is_change else ""))
        tones |= {at: tone} if time.is_change else {}
    heads = ("phase", ("A", "ms"), ("B", "ms"), ("B - A", "ms"), ("95% interval", "ms"), "changed")
    table = bl.table_of(heads, shown, left={"phase", "changed"}, tones=tones)
    fields = ("first_ms", "second_ms", "change_ms", "low_ms", "high_ms", "is_change")
    texts = [f"{one.name}: {one.first} in A, {one.second} in B" for one in found.unequal]
    title = "what else differs" if texts else "no other setting that was recorded differs"
    return bl.Content(
        headline=verdict_of(found),
        about=((about,),),
        sections=(
            (bl.Heading("time of a step, on the rank that the others wait for"), table),
            (bl.Heading(title), *([bl.items(texts, "  ")] if texts else [])),
        ),
        records=bl.Records(
            names=("phase", *fields),
            rows=tuple((name, *(getattr(time, field) for field in fields)) for name, time in every),
        ),
        remarks=(LIMIT,),
    )


def verdict_of(found: SpeedComparison) -> str:
    step = found.step
    if step.is_change:
        way = "shorter" if step.change_ms < 0 else "longer"
        low, high = sorted(abs(value) / found.first.wall_ms for value in (step.low_ms, step.high_ms))
        share = f"{abs(step.change_ms) / found.first.wall_ms:.0%} ({low:.0%} to {high:.0%})"
        # The phase that changed most in the direction of the step
        falls = step.change_ms < 0
        alike = [phase for phase in found.phases if phase.time.is_change and (phase.time.change_ms < 0) is falls]
        cause = ", and no phase of it alone changed by more than the noise"
        if alike:
            most = max(alike, key=lambda change: abs(change.time.change_ms))
            times = f"from {number(most.time.first_ms)} to {ms(most.time.second_ms)}"
            cause = f": {most.phase} {'fell' if falls else 'rose'} {times}"
        said = f"a step of B is {share} {way} than one of A{cause}"
    else:
        sure = step.low_ms > 0 or step.high_ms < 0
        what = "no difference of 1% or more" if sure else "no difference larger than the noise"
        span = f"{step.low_ms / found.first.wall_ms:+.0%} to {step.high_ms / found.first.wall_ms:+.0%}"
        said = f"{what}: a step takes {ms(step.first_ms)} in A and {ms(step.second_ms)} in B ({span})"
    a, b = found.first, found.second
    words = f"; A has {_ranks(a)}, B {_ranks(b)}" if a.ranks != b.ranks else ""
    changed = {one.name for one in found.unequal} & {"ranks", "rows of a rank's batch"}
    if changed and a.samples_per_s and b.samples_per_s:
        words += f"; A trains {a.samples_per_s:,.0f} samples/s, B {b.samples_per_s:,.0f}"
    return said + words


def _ranks(run: RunSpeed) -> str:
    return "an unknown number of ranks" if run.ranks is None else count_of(run.ranks, "rank")


def _compared_run(label: str, run: RunSpeed) -> bl.FactEntry:
    samples = "" if run.samples_per_s is None else f", {run.samples_per_s:,.0f} samples/s"
    seen = f"{run.status}, {_ranks(run)}, {count_of(run.count, 'step')} of {ms(run.wall_ms)}{samples}"
    return bl.FactEntry(label, (f"{run.name}: {seen}", *([run.command] if run.command else [])))


def _signed(value_ms: float) -> str:
    size = number(abs(value_ms))
    return size if not float(size) else ("+" if value_ms > 0 else "-") + size


def run_diff_content(report: Report) -> bl.Content:
    found = decode(RunDifferences, report.data["run_differences"])
    sides = tuple(
        bl.FactEntry(label, (f"{run.name}: {run.ended}", *([run.command] if run.command else [])))
        for label, run in (("A", found.first), ("B", found.second))
    )
    sections: list[bl.Section] = []
    if found.differences:
        rows, facts = [], []
        for each in found.differences:
            rows.append((each.topic.value, each.name, *show_apart(each.first, each.second)))
            a, b = show_apart(each.first, each.second, 2 * MAX_CELL)
            facts.append(bl.FactEntry(each.topic.value, (each.name, f"A: {a or ABSENT}", f"B: {b or ABSENT}")))
        table = bl.table_of(HEADS, rows, left=4, instead=(bl.FactList(tuple(facts)),))
        sections.append((bl.Heading("differences, the most telling first"), table))
    if found.not_compared:
        unknown = f"not compared, because one run has no facts: {', '.join(found.not_compared)}"
        sections.append((bl.Text(unknown, tone=bl.Tone.SKIPPED),))
    # The difference that tells most. The verdicts themselves are what is to be explained.
    causes = [difference for difference in found.differences if difference.topic not in {Topic.VERDICT, Topic.PACE}]
    if not found.differences:
        headline = f"no difference found (compared: {', '.join(found.compared) or 'nothing'})"
    elif not causes:
        topics = dict.fromkeys(difference.topic.value for difference in found.differences)
        headline = f"the runs differ only in {' and '.join(topics)}"
    else:
        more = f", and {count_of(len(causes) - 1, 'more difference')}" if len(causes) > 1 else ""
        a, b = (value or "not set" for value in show_apart(causes[0].first, causes[0].second))
        headline = f"the runs differ in {causes[0].name}: {a} in A, {b} in B{more}"
    return bl.Content(
        headline=headline,
        verb="diff",
        about=((bl.FactList(sides),),),
        sections=tuple(sections),
        records=bl.Records(
            names=("topic", "name", "first", "second"),
            rows=tuple((each.topic.value, each.name, each.first, each.second) for each in found.differences),
        ),
    )


def show_apart(first: str, second: str, most: int = MAX_CELL) -> tuple[str, str]:
    """Return two texts, or of long ones only the words in which they differ, each cut to ``most`` characters."""
    texts = [first, second]
    if max(map(len, texts)) > most:
        a, b = (re.findall(r"[^ /]*[ /]|[^ /]+", text) for text in texts)
        shown: tuple[list[str], list[str]] = ([], [])
        for tag, a1, a2, b1, b2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            option = a[a2 - 1] if a2 < len(a) and re.match("-[^=]+$", a[a2 - 1]) else ""  # whose value differs
            for words, part in zip(shown, (a[a1:a2], b[b1:b2]), strict=True):
                words.extend(["…", option] if tag == "equal" else part)
        texts = ["".join(words) for words in shown]
    first, second = (text if len(text) <= most else f"{text[: most - 1]}…" for text in texts)
    return first, second
