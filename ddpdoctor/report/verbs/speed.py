"""Where the time of a step goes, what changes are predicted to gain, and how two runs differ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.steps import Budget, NetworkUse
from ddpdoctor.model.tuning import Bound, PredictedStep, RunDifferences, SpeedComparison, Topic
from ddpdoctor.model.words import count_of, format_about, format_numbers
from ddpdoctor.report.blocks import (
    MARK,
    MAX_COLUMNS,
    Column,
    Content,
    FactEntry,
    FactList,
    Grid,
    GridCell,
    Heading,
    Records,
    Table,
    Text,
    Tone,
    grid_by_member,
    items,
    linear_level,
    not_shown,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.steps import PhaseRow
    from ddpdoctor.model.tuning import ComparedRun, PhaseChange, RunSpeed, TimeChange
    from ddpdoctor.report.blocks import Block, Section

LEAST_GAIN = 0.05
"""Of the step. Our choice: predictions are off by about as much."""
MOST_ROWS = 5


def prediction_blocks(report: Report) -> tuple[Block, ...]:
    """Return the table of the changes that gain most, or nothing if none gains enough.

    Raises:
        UserError: the report is damaged.
    """
    predictions = read_predictions(report)
    shown = [one for one in predictions if one.gain >= LEAST_GAIN][:MOST_ROWS]
    refused = next((one.reason for one in predictions if one.reason), "")
    if not shown:
        return ()
    blocks: tuple[Block, ...] = (Heading(text="what a change would gain (predicted)"), _predicted_table(shown))
    if not refused:
        return blocks
    return (*blocks, Text(text=f"Other settings of DDP cannot be predicted here: {refused}", indent=2))


def read_predictions(report: Report) -> tuple[PredictedStep, ...]:
    """Return the predictions in a report, the largest gain first.

    Raises:
        UserError: the report is damaged.
    """
    try:
        return tuple(decode(PredictedStep, one) for one in (report.data.get("speed") or {}).get("predictions") or ())
    except (WrongValue, TypeError) as error:
        raise UserError(f"the predictions in the report cannot be read: {error}") from error


def _predicted_table(shown: Sequence[PredictedStep]) -> Table:
    return Table(
        indent=2,
        columns=(
            Column(name="change", cells=tuple(one.change for one in shown), align="left"),
            Column(name="shorter step", cells=tuple(_gain(one) for one in shown)),
            Column(name="if", cells=tuple(one.assumes for one in shown), align="left", weight=1),
        ),
    )


def _gain(one: PredictedStep) -> str:
    """Return the gain as a range: "31% to 40%"."""
    if one.bound is not Bound.RANGE:
        return f"{one.bound.value} {one.gain:.0%}"
    ends = [f"{max(0.0, 1 - ratio):.0%}" for ratio in (one.high, one.low) if ratio is not None]
    return " to ".join(dict.fromkeys(ends))


SHOWN_SHARE = 0.001
"""Phases below this share of the step on every rank are left out."""


def speed_sections(report: Report) -> tuple[Section, ...]:
    """Return the section with the time budget, or nothing if the user did not ask for it.

    Raises:
        UserError: the report is damaged.
    """
    said = speed_data(report)
    if not said.get("asked"):
        return ()
    budget = read_budget(report)
    if budget is None:
        return ((Heading(text="time of a step"), Text(text=f"cannot tell: {said.get('reason', 'unknown')}", indent=2)),)
    seen = count_of(budget.count, "step")
    where = " on the GPU" if budget.is_device else ""
    mean = "" if budget.steps == budget.count else f", mean of {budget.steps}"
    rows = [row for row in budget.phases if is_shown(row, budget)]
    shown: Section = (
        Heading(text=f"time of a step{where}: {ms(budget.wall_ms)} ({seen}{mean})"),
        Table(
            indent=2,
            columns=(
                Column(name="phase", cells=tuple(row.phase for row in rows), align="left"),
                Column(name="critical rank", unit="ms", cells=tuple(number(row.critical_ms) for row in rows)),
                Column(name="share", cells=tuple(f"{row.critical_ms / budget.wall_ms:.1%}" for row in rows)),
                Column(name="median rank", unit="ms", cells=tuple(number(row.median_ms) for row in rows)),
                Column(
                    name="worst rank",
                    unit="ms",
                    cells=tuple((f"{number(row.worst_ms)} (rank {row.worst_rank})") for row in rows),
                ),
            ),
        ),
        *(Text(text=line, indent=2) for line in (*_lines(budget), *_network(report))),
    )
    predicted = prediction_blocks(report)
    return (shown, predicted) if predicted else (shown,)


def speed_data(report: Report) -> dict[str, Any]:
    """Return what a report says of speed. Empty if it says nothing, or is damaged there."""
    plain = report.data.get("speed")
    return plain if isinstance(plain, dict) else {}


def read_budget(report: Report) -> Budget | None:
    """Return the time budget in a report, or None if it has none.

    Raises:
        UserError: the report is damaged.
    """
    plain = speed_data(report).get("budget")
    try:
        return None if plain is None else decode(Budget, plain)
    except (WrongValue, TypeError) as error:
        raise UserError(f"the time budget in the report cannot be read: {error}") from error


def is_shown(row: PhaseRow, budget: Budget) -> bool:
    """Return whether a phase takes enough of the step on any rank."""
    return max(row.critical_ms, row.worst_ms) >= SHOWN_SHARE * budget.wall_ms


def _lines(budget: Budget) -> list[str]:
    shares = f"communication {budget.communication_share:.0%}, waiting for slower ranks {budget.waiting_share:.0%}"
    lines = [f"{shares} (median rank): scaling efficiency is at most {budget.efficiency_bound:.0%}"]
    if budget.overlap is not None:
        lines.append(f"backward hides about {budget.overlap:.0%} of the reduction")
    if budget.samples_per_s is not None:
        lines.append(f"{budget.samples_per_s:,.0f} samples/s over all ranks")
    if budget.own_ms >= SHOWN_SHARE * budget.wall_ms:
        lines.append(f"ddpdoctor's own checks of replicas take {ms(budget.own_ms)} a step more, and are not included")
    return lines


def _network(report: Report) -> list[str]:
    plain = speed_data(report).get("network")
    try:
        words = None if plain is None else network_words(decode(NetworkUse, plain))
    except (WrongValue, TypeError) as error:
        raise UserError(f"the use of the network in the report cannot be read: {error}") from error
    return [] if words is None else [words]


def network_words(use: NetworkUse) -> str | None:
    """Say what the network could carry and what the job uses of it, or nothing if one of them is unknown."""
    if use.limit_gb_s is None:
        return None
    return (
        f"the network could carry {use.limit_gb_s:.3g} GB/s ({use.source}); the reductions of this job use "
        f"{use.used_gb_s:.2g} GB/s on average ({format_about(use.step_bytes)} a step)"
    )


def number(value: float) -> str:
    """Return a number with about three digits, such as "12.3"."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ms(value: float) -> str:
    """Return a time in milliseconds, such as "12.3 ms"."""
    return f"{number(value)} ms"


STRAGGLER = "DD610"
SPEED = "DD8"
NAMED = f"{MARK}a rank that a finding about speed names"
PHASES = {
    "before_forward_ms": "before forward",
    "forward_ms": "forward",
    "between_ms": "between forward and backward",
    "backward_ms": "backward",
    "waited_ms": "waits for other ranks",
    "step_ms": "the whole step",
}
"""Names of the medians that a report has of each rank. The first four are without waiting."""


def speed_pictures(report: Report) -> tuple[Section, ...]:
    """Return a grid of phases by ranks if the user asked for speed or a rank is slow. Nothing if they are not known."""
    asked = bool(speed_data(report).get("asked"))
    budgets = _budget_pictures(report) if asked else ()
    slow = any(one.code == STRAGGLER for one in report.findings)
    return (*budgets, *(_pace_pictures(report) if asked or slow else ()))


def _budget_pictures(report: Report) -> tuple[Section, ...]:
    try:
        budget = read_budget(report)
    except UserError:
        return ()
    phases = [] if budget is None else [row for row in budget.phases if is_shown(row, budget)]
    if budget is None or not phases:
        return ()
    grid = Grid(
        title="time of a step by phase, in ms",
        rows=tuple(row.phase for row in phases),
        columns=("critical rank", "median rank", "worst rank"),
        cells=tuple(_budget_cells(row, budget) for row in phases),
        row_name="phase",
        column_name="rank",
        legend=("The darker, the more of the step.",),
    )
    return ((grid,),)


def _budget_cells(row: PhaseRow, budget: Budget) -> tuple[GridCell, ...]:
    ranks = {"worst": f" on rank {row.worst_rank}"}
    values = {"critical": row.critical_ms, "median": row.median_ms, "worst": row.worst_ms}
    return tuple(
        GridCell(
            text=number(value),
            about=f"{ms(value)}, {value / (budget.wall_ms or 1):.1%} of the step{ranks.get(name, '')}",
            level=linear_level(value, budget.wall_ms),
        )
        for name, value in values.items()
    )


def _pace_pictures(report: Report) -> tuple[Section, ...]:
    """Return the grid of phases by ranks. Of many ranks, those that compute for longest."""
    # A row that lacks one, as in a damaged report, is left out.
    rows = report.data.get("steps")
    paces: dict[int, Mapping[str, float]] = {}
    for row in rows if isinstance(rows, list) else ():
        rank: Any = row.get("rank") if isinstance(row, dict) else None
        if type(rank) is int and all(_is_number(row.get(key)) for key in PHASES):
            paces[rank] = row
    if len(paces) < 2:
        return ()
    slowest = sorted(paces, key=lambda rank: paces[rank]["waited_ms"] - paces[rank]["step_ms"])
    shown = {rank: paces[rank] for rank in sorted(slowest[:MAX_COLUMNS])}
    named = {rank for one in report.findings if one.code.startswith((STRAGGLER, SPEED)) for rank in one.ranks}
    longest = max(pace["step_ms"] for pace in shown.values())

    def name(ranks: Sequence[int]) -> str:
        return (MARK if named.intersection(ranks) else "") + format_numbers(ranks)

    grid = grid_by_member(
        "usual step by rank, in ms",
        [
            (label, {rank: _pace_cell(pace[key], longest) for rank, pace in shown.items()})
            for key, label in PHASES.items()
        ],
        shown,
        name,
        axes=("phase", "rank"),
        legend=(*((NAMED,) if named & shown.keys() else ()), *not_shown(len(paces) - len(shown), "rank")),
    )
    return ((grid,),)


def _pace_cell(value: float, longest: float) -> GridCell:
    return GridCell(text=number(value), about=ms(value), level=linear_level(value, longest))


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value)  # type: ignore[arg-type]


STEP = "step"
LIMIT = (
    "The intervals (95%) hold what varies within each run. Two runs of one job may differ by more: run A twice to see."
)


def comparison_content(report: Report) -> Content:
    """Return the content for two compared runs."""
    found = decode(SpeedComparison, report.data["comparison"])
    about = FactList(facts=(_compared_run("A", found.first), _compared_run("B", found.second)))
    shown = [one for one in found.phases if _is_shown(one, found)]
    rows = [*((one.phase, one.time) for one in shown), (STEP, found.step)]
    texts = [f"{one.name}: {one.first} in A, {one.second} in B" for one in found.unequal]
    title = "what else differs" if texts else "no other setting that was recorded differs"
    return Content(
        headline=verdict_of(found),
        about=((about,),),
        sections=(
            (
                Heading(text="time of a step, on the rank that the others wait for"),
                Table(
                    indent=2,
                    columns=(
                        Column(name="phase", cells=tuple(name for name, _ in rows), align="left"),
                        Column(name="A", unit="ms", cells=tuple(number(time.first_ms) for _, time in rows)),
                        Column(name="B", unit="ms", cells=tuple(number(time.second_ms) for _, time in rows)),
                        Column(name="B - A", unit="ms", cells=tuple(_signed(time.change_ms) for _, time in rows)),
                        Column(name="95% interval", unit="ms", cells=tuple(_interval(time) for _, time in rows)),
                        Column(name="changed", cells=tuple(_word(time) for _, time in rows), align="left"),
                    ),
                    tones={i: _tone(time) for i, (_, time) in enumerate(rows) if time.is_change},
                ),
            ),
            (Heading(text=title), *([items(texts, "  ")] if texts else [])),
        ),
        records=_records(found),
        remarks=(LIMIT,),
    )


def verdict_of(found: SpeedComparison) -> str:
    """Return what the comparison comes to, in one sentence."""
    step = found.step
    if step.is_change:
        way = "shorter" if step.change_ms < 0 else "longer"
        low, high = sorted(abs(value) / found.first.wall_ms for value in (step.low_ms, step.high_ms))
        share = f"{abs(step.change_ms) / found.first.wall_ms:.0%} ({low:.0%} to {high:.0%})"
        said = f"a step of B is {share} {way} than one of A{_cause(found)}"
    else:
        sure = step.low_ms > 0 or step.high_ms < 0
        what = "no difference of 1% or more" if sure else "no difference larger than the noise"
        said = f"{what}: a step takes {ms(step.first_ms)} in A and {ms(step.second_ms)} in B ({_range(found)})"
    a, b = found.first, found.second
    words = f"; A has {_ranks(a)}, B {_ranks(b)}" if a.ranks != b.ranks else ""
    changed = {one.name for one in found.unequal} & {"ranks", "rows of a rank's batch"}
    if changed and a.samples_per_s and b.samples_per_s:
        words += f"; A trains {a.samples_per_s:,.0f} samples/s, B {b.samples_per_s:,.0f}"
    return said + words


def _range(found: SpeedComparison) -> str:
    low, high = (value / found.first.wall_ms for value in (found.step.low_ms, found.step.high_ms))
    return f"{low:+.0%} to {high:+.0%}"


def _cause(found: SpeedComparison) -> str:
    """Name the phase that changed most in the direction of the step."""
    falls = found.step.change_ms < 0
    alike = [one for one in found.phases if one.time.is_change and (one.time.change_ms < 0) is falls]
    if not alike:
        return ", and no phase of it alone changed by more than the noise"
    most = max(alike, key=lambda one: abs(one.time.change_ms))
    way = "fell" if falls else "rose"
    return f": {most.phase} {way} from {number(most.time.first_ms)} to {ms(most.time.second_ms)}"


def _ranks(run: RunSpeed) -> str:
    return "an unknown number of ranks" if run.ranks is None else count_of(run.ranks, "rank")


def _compared_run(label: str, run: RunSpeed) -> FactEntry:
    samples = "" if run.samples_per_s is None else f", {run.samples_per_s:,.0f} samples/s"
    seen = f"{run.status}, {_ranks(run)}, {count_of(run.count, 'step')} of {ms(run.wall_ms)}{samples}"
    return FactEntry(label=label, texts=(f"{run.name}: {seen}", *([run.command] if run.command else [])))


def _is_shown(one: PhaseChange, found: SpeedComparison) -> bool:
    least_ms = SHOWN_SHARE * max(found.first.wall_ms, found.second.wall_ms)
    return max(one.time.first_ms, one.time.second_ms) >= least_ms


def _signed(value_ms: float) -> str:
    size = number(abs(value_ms))
    return size if not float(size) else ("+" if value_ms > 0 else "-") + size


def _interval(time: TimeChange) -> str:
    return f"{_signed(time.low_ms)} to {_signed(time.high_ms)}"


def _word(time: TimeChange) -> str:
    if not time.is_change:
        return ""
    return "shorter" if time.change_ms < 0 else "longer"


def _tone(time: TimeChange) -> Tone:
    return Tone.GOOD if time.change_ms < 0 else Tone.WARNING


def _records(found: SpeedComparison) -> Records:
    names = ("phase", "first_ms", "second_ms", "change_ms", "low_ms", "high_ms", "is_change")
    rows = [(one.phase, one.time) for one in found.phases] + [(STEP, found.step)]
    return Records(
        names=names,
        rows=tuple(
            (name, time.first_ms, time.second_ms, time.change_ms, time.low_ms, time.high_ms, time.is_change)
            for name, time in rows
        ),
    )


HEADS = ("about", "what", "A", "B")
ABSENT = "-"
MAX_CELL = 48
"""Longer values are cut in the table. JSON and CSV have more of them."""


def run_diff_content(report: Report) -> Content:
    """Return the content of the differences between two runs."""
    found = decode(RunDifferences, report.data["run_differences"])
    if not found.differences:
        sections: tuple[Section, ...] = ()
    else:
        rows = [(one.topic.value, one.name, _cut(one.first), _cut(one.second)) for one in found.differences]
        narrow = FactList(
            facts=tuple(
                FactEntry(
                    label=one.topic.value, texts=(one.name, f"A: {one.first or ABSENT}", f"B: {one.second or ABSENT}")
                )
                for one in found.differences
            )
        )
        table = replace(table_of(HEADS, rows, left=4), instead=(narrow,))
        sections = ((Heading(text="differences, the most telling first"), table),)
    return Content(
        headline=_most_telling(found),
        verb="diff",
        about=((FactList(facts=(_side("A", found.first), _side("B", found.second))),),),
        sections=(*sections, *_unknown(found)),
        records=Records(
            names=("topic", "name", "first", "second"),
            rows=tuple((one.topic.value, one.name, one.first, one.second) for one in found.differences),
        ),
    )


def _most_telling(found: RunDifferences) -> str:
    """Name the difference that tells most. The verdicts themselves are what is to be explained."""
    causes = [one for one in found.differences if one.topic not in {Topic.VERDICT, Topic.PACE}]
    if not found.differences:
        topics = ", ".join(found.compared) or "nothing"
        return f"no difference found (compared: {topics})"
    if not causes:
        return f"the runs differ only in {' and '.join(dict.fromkeys(one.topic.value for one in found.differences))}"
    first = causes[0]
    more = f", and {count_of(len(causes) - 1, 'more difference')}" if len(causes) > 1 else ""
    return f"the runs differ in {first.name}: {_shown(first.first)} in A, {_shown(first.second)} in B{more}"


def _side(label: str, run: ComparedRun) -> FactEntry:
    return FactEntry(label=label, texts=(f"{run.name}: {run.ended}", *([run.command] if run.command else [])))


def _unknown(found: RunDifferences) -> tuple[Section, ...]:
    if not found.not_compared:
        return ()
    return (
        (Text(text=f"not compared, because one run has no facts: {', '.join(found.not_compared)}", tone=Tone.SKIPPED),),
    )


def _shown(text: str) -> str:
    return _cut(text) or "not set"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"
