"""The report of `check-consistency`: its steps, and what differs between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.trial import Trial
from ddpdoctor.model.words import count_of
from ddpdoctor.report import blocks as bl
from ddpdoctor.report.findings import count_findings
from ddpdoctor.report.lines import format_ranks
from ddpdoctor.report.verbs.job import consistency_pictures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.trial import GradientErrors


def error_ratio(one: GradientErrors) -> float:
    """Return how many times its rounding error a gradient is off."""
    return one.whole / one.rounding if one.rounding else float(bool(one.whole))


def reference_pictures(trial: Trial) -> Iterator[bl.Grid]:
    """Yield the grid of parameters by steps, the worst first. Nothing if there was no comparison."""
    steps = () if trial.reference is None else trial.reference.steps
    errors: dict[str, dict[int, GradientErrors]] = {}
    for at, step in enumerate(steps):
        for tensor in step.tensors:
            errors.setdefault(tensor.name, {})[at] = tensor
    if not errors:
        return
    worst = {name: max(map(error_ratio, by_step.values())) for name, by_step in errors.items()}
    names = sorted(errors, key=lambda name: -worst[name])
    shown = names[: bl.MAX_ROWS]
    highest = worst[names[0]]

    def cell(tensor: GradientErrors) -> bl.GridCell:
        scale, ratio = tensor.norm or 1, error_ratio(tensor)
        about = f"relative error {tensor.whole / scale:.1e}, rounding {tensor.rounding / scale:.1e}"
        return bl.GridCell(f"{ratio:.3g}", about=about, level=bl.log_level(max(ratio, 1.0), 1.0, highest))

    yield bl.grid_by_member(
        "how many times the rounding error DDP's gradient is off from that of one process",
        [(name, {at: cell(tensor) for at, tensor in errors[name].items()}) for name in shown],
        range(len(steps)),
        lambda those: ", ".join(f"step {steps[at].step}" for at in those),
        axes=("parameter", "step"),
        legend=bl.not_shown(len(names) - len(shown), "parameter"),
    )


WORST = 5  # how many parameters are shown, of those that differ most from one process
REFERENCE = "DD509"  # the rule that compares with one process
NAMES = {
    What.GRADIENT: "gradients, as the optimizer gets them",
    What.PARAMETER: "parameters",
    What.STATE: "optimizer state",
    What.BUFFER: "buffers, right after DDP has sent them",
}


def trial_content(report: Report) -> bl.Content:
    trial = decode(Trial, report.data["trial"])
    reference = trial.reference
    facts = []
    for stream in trial.consistency.streams if trial.consistency is not None else ():
        differences = {one.what: one for one in stream.differences}
        for what, words in NAMES.items():
            if what not in stream.kinds or (what is What.BUFFER) != (stream.clock is StreamClock.SYNC):
                continue
            if (difference := differences.get(what)) is None:
                how = "equal on all ranks" if len(stream.ranks) > 1 else "not compared: there is one rank"
            else:
                first = difference.splits[0]
                apart = len(first.sides) == len(stream.ranks) > 2
                sides = "no two ranks are equal" if apart else " | ".join(format_ranks(side) for side in first.sides)
                part = f" ({first.row.part})" if first.row.part else ""
                how = f"differ from step {difference.number} on: {difference.differing} of {difference.of}, first "
                how += f"{first.row.name}{part}: {sides}"
            facts.append(bl.FactEntry(words, (how,), tone=bl.Tone.PLAIN))
    title = bl.Heading(f"after each of {count_of(trial.settings.steps, 'step')}")
    sections: list[bl.Section] = [(title, bl.FactList(tuple(facts)))] if trial.consistency is not None else []
    if reference is not None and reference.steps:
        step = max(reference.steps, key=lambda one: max(map(error_ratio, one.tensors), default=0.0))
        samples = f" of {sum(step.samples)} samples" if all(step.samples) else ""
        against = "float64" if reference.float64 else "another order of the samples, because float64 was not possible"
        among = f", the worst of {len(reference.steps)} steps" if len(reference.steps) > 1 else ""
        more = len(step.tensors) - WORST
        rows = []
        for errors in sorted(step.tensors, key=lambda tensor: -error_ratio(tensor))[:WORST]:
            whole, rounding = errors.whole / (errors.norm or 1), errors.rounding / (errors.norm or 1)
            rows.append((errors.name, f"{whole:.1e}", f"{rounding:.1e}", f"{error_ratio(errors):.3g}"))
        heading = bl.Heading(f"DDP's gradient compared with one process on the whole batch{samples}")
        said = f"relative errors at step {step.step}{among}; rounding as measured against {against}"
        rest = bl.Text(f"and {more} more, with smaller errors relative to rounding", indent=2)
        table = bl.table_of(("", "error", "rounding", "times"), rows)
        sections.append((heading, bl.Text(said, indent=2), table, *([rest] if more > 0 else [])))
    if trial.rerun is not None and trial.rerun.step is None:
        sections.append((bl.Text("a second run with the same seed: equal bits on every rank"),))
    headline = "nothing was trained"
    if report.verdict is not None:
        headline = report.verdict.summary
    elif trial.consistency is not None:
        headline = f"the replicas stayed equal over {count_of(trial.settings.steps, 'step')}"
        if trial.reference is not None:
            judged = (check for check in report.checks if REFERENCE in {check.id, check.code})
            said = "the comparison with one process is inconclusive"
            if any(check.outcome is Outcome.PASSED for check in judged):
                said = "DDP's gradient equals that of one process"
            headline += f", {said}"
    return bl.Content(
        headline=headline,
        status=", ".join(filter(None, (count_of(len(trial.participants), "rank"), count_findings(report.findings)))),
        about=((bl.items(_about(trial)),),),
        sections=(*sections, *((bl.items([note], "to know: "),) for note in trial.notes)),
        several_hosts=len({participant.host for participant in trial.participants}) > 1,
        draw_pictures=lambda: (*consistency_pictures(trial.consistency, report.findings), *reference_pictures(trial)),
    )


def _about(trial: Trial) -> list[str]:
    hosts = ", ".join(dict.fromkeys(participant.host for participant in trial.participants))
    devices = " and ".join(dict.fromkeys(participant.device.partition(":")[0] for participant in trial.participants))
    first = trial.participants[0]
    ranks = count_of(len(trial.participants), "rank")
    tensors = trial.models[0].tensors
    buffers = sum(tensor.is_buffer for tensor in tensors)
    return [
        f"{ranks} on {hosts}; {trial.settings.backend} on {devices}, torch {first.torch}",
        f"model {trial.settings.model}: {count_of(len(tensors) - buffers, 'parameter')}, {count_of(buffers, 'buffer')}"
        + (f"; {trial.optimizer}" if trial.consistency is not None else ""),
        *([f"batch: {trial.batch}; loss: {trial.loss}"] if trial.consistency is not None else []),
    ]
