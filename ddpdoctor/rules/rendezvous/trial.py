"""DD221: whether a real start works if everything it needs works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.rendezvous.large import is_black_hole, say_size
from ddpdoctor.rules.rendezvous.meeting import Meeting, first_few, say_duration
from ddpdoctor.rules.rendezvous.mesh import failure_of
from ddpdoctor.rules.rendezvous.store import fails

if TYPE_CHECKING:
    from ddpdoctor.model.reaching import StartTrial

STAGES = {
    "store": "the store was not reached",
    "init_process_group": "init_process_group did not return",
    "all_reduce": "the first all_reduce did not complete",
    "result": "the all_reduce gave a wrong sum",
}


@rule(
    "DD221",
    "start-trial",
    Severity.ERROR,
    "A real start with torch fails for an unknown reason",
    after=("mtu",),
    group=CheckGroup.NETWORK,
)
def check_start_trial(meeting: Meeting) -> Answer:
    """Report that `init_process_group` and an all-reduce fail between the nodes although all they need works."""
    trials = meeting.rendezvous.trials
    if not trials:
        return skipped("no start was tested")
    failed = [trial for trial in trials if not trial.ok]
    worked = f"{len(trials) - len(failed)} of {len(trials)} nodes started and reduced a tensor"
    if not failed:
        return passed(worked)
    reason = _known_reason(meeting)
    if reason:
        return skipped(f"a real start fails, as expected: {reason}")
    return judged([_finding(meeting, failed)], worked)


def _known_reason(meeting: Meeting) -> str:
    """Return why a start cannot work according to other checks, or "" if they found nothing."""
    found = next((f"{f.code} {f.kind}" for f in meeting.found if f.severity is Severity.ERROR), "")
    if found:
        return found
    if any(visit.store_view is not None and fails(visit.store_view) for visit in meeting.arrived()):
        return "not all nodes reach the store"
    if any(failure_of(pair) is not None for pair in meeting.rendezvous.pairs):
        return "not all nodes can connect to each other"
    stalled = next((pair.large for pair in meeting.rendezvous.pairs if pair.large and is_black_hole(pair)), None)
    return f"a payload of {say_size(stalled.size_bytes)} stalls" if stalled is not None else ""


def _finding(meeting: Meeting, failed: list[StartTrial]) -> Problem:
    hosts = meeting.names(trial.node for trial in failed)
    stage = STAGES.get(failed[0].stage, "it failed")
    whole = len(failed) == len(meeting.rendezvous.trials)
    return Problem(
        summary=f"a real start with torch fails on {'all hosts' if whole else name_list(hosts)}: {stage}, "
        "although the store and all connections work",
        hosts=hosts,
        evidence=first_few(
            f"{meeting.name(trial.node)}, after {say_duration(trial.duration_s)}: {trial.error or trial.stage}"
            for trial in failed
        ),
        fix=(
            "env | grep -E '^(GLOO|TP|USE_LIBUV|TORCH)' on each host lists variables that change how torch connects: "
            "unset them"
        ),
        confidence=Confidence.MEDIUM if whole else Confidence.HIGH,
    )
