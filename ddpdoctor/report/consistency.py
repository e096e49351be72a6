"""The report of `check-consistency` as text: what was compared, and what one process says; then findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.trial import Trial
from ddpdoctor.report.checkup import add_untold
from ddpdoctor.report.findings import add_finding, count_findings
from ddpdoctor.report.page import Page, draw, plural
from ddpdoctor.report.ranks import format_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.consistency import Difference, Stream
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.reference import GradientErrors, ReferenceStep

VERB = "check-consistency"
WORST = 5
"""Parameters that are shown of those that differ most from one process."""
NAMES = {
    What.GRADIENT: "gradients, as the optimizer gets them",
    What.PARAMETER: "parameters",
    What.STATE: "optimizer state",
    What.BUFFER: "buffers, right after DDP has sent them",
}


def is_trial(report: Report) -> bool:
    """Return whether a report is one of a model that was trained for this."""
    return report.data.get("verb") == VERB and "trial" in report.data


def render_trial(report: Report, *, width: int | None, colour: bool, run_dir: Path | None, cwd: Path | None) -> str:
    """Render the report; ``width`` None is for what is no terminal and wraps nothing. Raises ``UserError``."""
    trial = read_trial(report)
    page = Page(width=width, cwd=cwd)
    for line in _head(trial):
        page.add(line)
    if trial.consistency is not None:
        _add_table(page, f"after each of {plural(trial.settings.steps, 'step')}", _compared(trial.consistency.streams))
    _add_reference(page, trial)
    _add_rerun(page, trial)
    for note in trial.notes:
        page.gap()
        page.add(note, first="to know: ")
    if any(check.outcome.value in {"inconclusive", "crashed"} for check in report.checks):
        page.gap()
    add_untold(page, report.checks)
    for finding in reversed(report.findings):
        add_finding(page, finding, several=len({one.host for one in trial.participants}) > 1)
    page.gap()
    page.add(_closing_line(report, trial, run_dir))
    return draw(page.lines, colour=colour)


def read_trial(report: Report) -> Trial:
    """Return the trial that a report holds. Raises ``UserError`` where it is damaged."""
    try:
        return decode(Trial, report.data["trial"])
    except WrongValue as error:
        raise UserError(f"the report cannot be read: trial{error}") from error


def _head(trial: Trial) -> list[str]:
    hosts = ", ".join(dict.fromkeys(one.host for one in trial.participants))
    devices = " and ".join(dict.fromkeys(one.device.partition(":")[0] for one in trial.participants))
    first = trial.participants[0]
    ranks = plural(len(trial.participants), "rank")
    tensors = trial.models[0].tensors
    buffers = sum(one.is_buffer for one in tensors)
    return [
        f"{ranks} on {hosts}; {trial.settings.backend} on {devices}, torch {first.torch}",
        f"model {trial.settings.model}: {plural(len(tensors) - buffers, 'parameter')}, {plural(buffers, 'buffer')}"
        + (f"; {trial.optimizer}" if trial.consistency is not None else ""),
        *([f"batch: {trial.batch}; loss: {trial.loss}"] if trial.consistency is not None else []),
    ]


def _compared(streams: tuple[Stream, ...]) -> list[tuple[str, str]]:
    return [
        (words, _how(next((one for one in stream.differences if one.what is what), None), stream))
        for stream in streams
        for what, words in NAMES.items()
        if what in stream.kinds and (what is What.BUFFER) == (stream.clock is StreamClock.SYNC)
    ]


def _how(difference: Difference | None, stream: Stream) -> str:
    if difference is None:
        return "equal on all ranks" if len(stream.ranks) > 1 else "not compared: there is one rank"
    first = difference.splits[0]
    apart = len(first.sides) == len(stream.ranks) > 2
    sides = "no two ranks are equal" if apart else " | ".join(format_ranks(side) for side in first.sides)
    part = f" ({first.row.part})" if first.row.part else ""
    return (
        f"differ from step {difference.number} on: {difference.differing} of {difference.of}, first "
        f"{first.row.name}{part}: {sides}"
    )


def _add_table(page: Page, title: str, rows: list[tuple[str, str]]) -> None:
    page.gap()
    page.add(title, style="bold")
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        page.add(text, first=f"  {name.ljust(width)}  ", style="" if text.startswith("equal") else "bold", styled=0)


def _add_reference(page: Page, trial: Trial) -> None:
    reference = trial.reference
    if reference is None or not reference.steps:
        return
    step = max(reference.steps, key=_worst_ratio)
    samples = f" of {sum(step.samples)} samples" if all(step.samples) else ""
    page.gap()
    page.add(f"DDP's gradient beside that of one process on the whole batch{samples}", style="bold")
    against = "float64" if reference.float64 else "another order of the samples, as float64 could not be had"
    among = f", the worst of {len(reference.steps)} steps" if len(reference.steps) > 1 else ""
    page.add(f"relative errors at step {step.step}{among}; rounding as measured against {against}", first="  ")
    worst = sorted(step.tensors, key=lambda one: -_ratio(one))[:WORST]
    width = max((len(one.name) for one in worst), default=0)
    page.add(f"  {'':{width}}     error  rounding     times", whole=True)
    for one in worst:
        error, rounding = (f"{value / (one.norm or 1):9.1e}" for value in (one.whole, one.rounding))
        page.add(f"  {one.name:{width}} {error} {rounding} {_ratio(one):9.3g}", whole=True)
    if len(step.tensors) > WORST:
        page.add(f"and {len(step.tensors) - WORST} more, whose errors are explained better", first="  ")


def _add_rerun(page: Page, trial: Trial) -> None:
    if trial.rerun is not None and trial.rerun.step is None:
        page.gap()
        page.add("a second run with the same seed: the same bits on every rank")


def _worst_ratio(step: ReferenceStep) -> float:
    return max(map(_ratio, step.tensors), default=0.0)


def _ratio(one: GradientErrors) -> float:
    return one.whole / one.rounding if one.rounding else float(bool(one.whole))


def _closing_line(report: Report, trial: Trial, run_dir: Path | None) -> str:
    found = count_findings(report.findings)
    words = [found] if found else []
    if report.verdict is not None:
        words.append(report.verdict.summary)
    else:
        words.append(_healthy(trial, report))
    where = "" if run_dir is None else f"; report in {run_dir}"
    return f"ddpdoctor: {plural(len(trial.participants), 'rank')}, {': '.join(words)}{where}"


def _healthy(trial: Trial, report: Report) -> str:
    if trial.consistency is None:
        return "nothing was trained"
    parts = [f"the replicas stayed equal over {plural(trial.settings.steps, 'step')}"]
    checks: dict[str, Any] = {check.id: check.outcome.value for check in report.checks}
    if trial.reference is not None:
        passed = checks.get("reference-gradient") == "passed"
        parts.append("DDP's gradient is that of one process" if passed else "the reference could not be told")
    return ", ".join(parts)
