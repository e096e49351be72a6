"""Says in a line what was found of the replicas of a job that ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.consistency import Consistency, StreamClock, What
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.report.page import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.findings import Finding, Report

_NOUNS = {
    What.PARAMETER: "parameters",
    What.GRADIENT: "gradients",
    What.BUFFER: "buffers",
    What.STATE: "optimizer state",
}
_BEST_FIRST = (StreamClock.STEP, StreamClock.FORWARD, StreamClock.END, StreamClock.SYNC)


def replica_words(report: Report) -> str | None:
    """Return how often replicas were compared and how that came out; None where they were not, or findings say it.

    Raises:
        UserError: the report is damaged.
    """
    consistency = _read(report)
    if consistency is None or any(map(_says_it, report.findings)):
        return None
    compared = [stream for stream in consistency.streams if stream.compared and stream.model > 0]
    if not compared:
        return None
    told = _checks(compared)
    differing = dict.fromkeys(one.what for stream in compared for one in stream.differences)
    if not differing:
        return f"replicas equal: {told}"
    nouns = " and ".join(_NOUNS[what] for what in differing)
    return f"replicas compared: {told}; {nouns} differ, and no rule holds that for wrong"


def _says_it(finding: Finding) -> bool:
    return finding.code.startswith("DD50") and finding.severity is not Severity.INFO


def _checks(streams: Sequence[Stream]) -> str:
    """Say how often and how far, by the clock that counts best: others look at the same tensors."""
    clock = next(clock for clock in _BEST_FIRST if any(stream.clock is clock for stream in streams))
    those = [stream for stream in streams if stream.clock is clock]
    last = max(stream.last_number or 0 for stream in those)
    until = {StreamClock.STEP: f"up to optimizer step {last}", StreamClock.END: "at the end"}
    checks = plural(sum(stream.compared for stream in those), "check")
    models = len({(stream.group, stream.ranks, stream.model) for stream in those})
    parts = [
        *([plural(models, "model")] if models > 1 else []),
        plural(sum(stream.tensors for stream in those), "tensor"),
        plural(len({rank for stream in those for rank in stream.ranks}), "rank"),
    ]
    return f"{checks} {until.get(clock, f'up to backward {last}')} ({', '.join(parts)})"


def _read(report: Report) -> Consistency | None:
    plain = report.data.get("consistency")
    try:
        return None if plain is None else decode(Consistency, plain)
    except WrongValue as error:
        raise UserError(f"what the report says of replicas cannot be read: {error}") from error
