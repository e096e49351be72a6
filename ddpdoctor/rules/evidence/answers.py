"""The rules of DD6xx, asked about the evidence of a job that nobody watched."""

from __future__ import annotations

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, judged, passed, skipped, unknown
from ddpdoctor.rules.evidence.collecting import about
from ddpdoctor.rules.evidence.state import RunState  # noqa: TC001 - the registry reads the annotation's name
from ddpdoctor.rules.registry import also, rule


def _answer(kind: str, state: RunState) -> Answer:
    ruling = state.ruling
    if ruling.kind == kind and ruling.problem is not None:
        return judged([ruling.problem])
    return passed() if not ruling.kind and not ruling.reason else skipped(ruling.kind or "the cause is unknown")


@also("DD601")
def find_stuck(state: RunState) -> Answer:
    """Report a rank that did not come to where others wait."""
    return _answer("stuck", state)


@also("DD602")
def find_mismatch(state: RunState) -> Answer:
    """Report ranks that made different calls."""
    return _answer("mismatch", state)


@also("DD603")
def find_early_exit(state: RunState) -> Answer:
    """Report a rank that ended well while others wait for it."""
    return _answer("early-exit", state)


@also("DD604")
def find_crash(state: RunState) -> Answer:
    """Report the rank that failed by itself."""
    return _answer("crash", state)


@also("DD605")
def find_killed(state: RunState) -> Answer:
    """Report the rank that was killed, and the job that was stopped from outside."""
    return _answer("killed", state)


@also("DD606")
def find_stopped(state: RunState) -> Answer:
    """Report the rank whose process is frozen."""
    return _answer("stopped", state)


@also("DD607")
def find_missing(state: RunState) -> Answer:
    """Report the rank that never came to the start."""
    return _answer("missing", state)


@also("DD608")
def find_deadlock(state: RunState) -> Answer:
    """Report ranks that wait for each other."""
    return _answer("deadlock", state)


@also("DD611")
def find_transport(state: RunState) -> Answer:
    """Report the network, or a collective that all have entered."""
    return _answer("transport", state)


@rule("DD613", "cannot-tell", Severity.INFO, "The evidence does not show the cause")
def check_sufficient(state: RunState) -> Answer:
    """Say that the cause cannot be told from what was given, and what to collect."""
    ruling = state.ruling
    read = about(state)
    return unknown("; ".join([ruling.reason, *ruling.collect, *read])) if ruling.reason else passed("; ".join(read))
