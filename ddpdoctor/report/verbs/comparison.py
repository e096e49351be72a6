"""The content of `report --compare`: what a step takes in two runs, phase by phase, and what else differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.speed_comparison import SpeedComparison
from ddpdoctor.report.blocks import Column, Content, FactEntry, FactList, Heading, Records, Table, Tone, items
from ddpdoctor.report.time_budget import SHOWN_SHARE, ms, number

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.speed_comparison import PhaseChange, RunSpeed, TimeChange
    from ddpdoctor.report.blocks import Section

STEP = "step"
LIMIT = (
    "The intervals (95%) hold what varies within each run. Two runs of one job may differ by more: run A twice to see."
)


def comparison_content(report: Report) -> Content:
    """Return the content for two compared runs."""
    found = decode(SpeedComparison, report.data["comparison"])
    about = FactList(facts=(_side("A", found.first), _side("B", found.second)))
    return Content(
        headline=verdict_of(found),
        about=((about,),),
        sections=(
            (Heading(text="time of a step, on the rank that the others wait for"), _table(found)),
            *_settings(found),
        ),
        records=_records(found),
        remarks=(LIMIT,),
    )


def verdict_of(found: SpeedComparison) -> str:
    """Return what the comparison comes to, in one sentence."""
    step = found.step
    if step.is_change:
        way = "shorter" if step.change_ms < 0 else "longer"
        share = _size(step, found.first.wall_ms)
        said = f"a step of B is {share} {way} than one of A{_cause(found)}"
    else:
        sure = step.low_ms > 0 or step.high_ms < 0
        what = "no difference of 1% or more" if sure else "no difference larger than the noise"
        said = f"{what}: a step takes {ms(step.first_ms)} in A and {ms(step.second_ms)} in B ({_range(found)})"
    return said + _besides(found)


def _size(step: TimeChange, wall_ms: float) -> str:
    """Return how large a change is, without its sign, such as "12% (9% to 15%)"."""
    low, high = sorted(abs(value) / wall_ms for value in (step.low_ms, step.high_ms))
    return f"{abs(step.change_ms) / wall_ms:.0%} ({low:.0%} to {high:.0%})"


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


def _besides(found: SpeedComparison) -> str:
    """Say what makes steps of the two runs unequal in the first place."""
    a, b = found.first, found.second
    words = f"; A has {_ranks(a)}, B {_ranks(b)}" if a.ranks != b.ranks else ""
    changed = {one.name for one in found.unequal} & {"ranks", "rows of a rank's batch"}
    if changed and a.samples_per_s and b.samples_per_s:
        words += f"; A trains {a.samples_per_s:,.0f} samples/s, B {b.samples_per_s:,.0f}"
    return words


def _ranks(run: RunSpeed) -> str:
    return "an unknown number of ranks" if run.ranks is None else count_of(run.ranks, "rank")


def _side(label: str, run: RunSpeed) -> FactEntry:
    samples = "" if run.samples_per_s is None else f", {run.samples_per_s:,.0f} samples/s"
    seen = f"{run.status}, {_ranks(run)}, {count_of(run.count, 'step')} of {ms(run.wall_ms)}{samples}"
    return FactEntry(label=label, texts=(f"{run.name}: {seen}", *([run.command] if run.command else [])))


def _table(found: SpeedComparison) -> Table:
    shown = [one for one in found.phases if _is_shown(one, found)]
    rows = [*((one.phase, one.time) for one in shown), (STEP, found.step)]
    return Table(
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
    )


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


def _settings(found: SpeedComparison) -> tuple[Section, ...]:
    texts = [f"{one.name}: {one.first} in A, {one.second} in B" for one in found.unequal]
    title = "what else differs" if texts else "no other setting that was recorded differs"
    return ((Heading(text=title), *([items(texts, "  ")] if texts else [])),)


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
