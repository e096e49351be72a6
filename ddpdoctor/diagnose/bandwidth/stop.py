"""Finds the culprit of an unfinished bench with the same rules as `wrap`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.bandwidth.job import GONE, build_job, is_in_call
from ddpdoctor.diagnose.progress import judge_job
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.progress.evidence import waiters_words
from ddpdoctor.rules.progress.job_state import build_job_state

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench, Stop
    from ddpdoctor.model.findings import Finding

ROOTS = frozenset({"DD601", "DD602", "DD603", "DD604", "DD605", "DD606", "DD607", "DD608", "DD611"})
"""The findings that make sense for the bench."""
MOST_NAMED = 4
"""How many groups a summary names."""


def stop_findings(bench: Bench) -> tuple[Finding, ...]:
    """Return the causes of an unfinished bench, the first cause first, or nothing if it finished.

    For an interrupted bench, return only hangs that had lasted for the hang timeout.
    """
    stop = bench.stop
    if stop is None:
        return ()
    found = [one for one in judge_job(build_job(bench, stop)).findings if one.code in ROOTS]
    # If the rank that served the store is lost, the others cannot answer. Then only that rank's finding counts.
    explained = [one for one in found if not _is_silence(one, stop)]
    return tuple(_in_words_of_bench(one, bench, stop) for one in explained or found)


def _is_silence(finding: Finding, stop: Stop) -> bool:
    """Return whether ranks are blamed only because they did not answer."""
    return finding.code == "DD601" and not {one.rank for one in stop.positions} & set(finding.ranks)


def describe_rank(rank: int, stop: Stop) -> str:
    """Return one phrase for where a rank was, or how it had ended, when the bench stopped."""
    position = next((one for one in stop.positions if one.rank == rank), None)
    if position is None:
        return _describe_silent(str(rank), stop)
    if position.error is not None:
        return f"raised {position.error}"
    if position.phase == "end":
        return "finished"
    if is_in_call(position):
        return f"in {position.op}"
    return f"on its way into {position.op}" if position.inside else f"between calls, in phase {position.phase}"


def _describe_silent(rank: str, stop: Stop) -> str:
    end = next((one.ends[rank] for one in stop.positions if rank in one.ends), None)
    if end is not None:
        return end if end.startswith("exit") else f"killed by {end}"
    states = {one.states[rank] for one in stop.positions if rank in one.states}
    if states & GONE:
        return "gone"
    return "stopped" if states & {"T", "t"} else "did not answer"


def _in_words_of_bench(finding: Finding, bench: Bench, stop: Stop) -> Finding:
    if finding.code == "DD611":
        finding = _transport(finding, bench, stop)
    if _is_silence(finding, stop):
        finding = _silent(finding, bench, stop)
    if finding.code == "DD604":
        finding = replace(finding, fix=_crash_fix(finding, stop))
    return replace(finding, evidence=(*finding.evidence, *_at_words(stop)))


def _at_words(stop: Stop) -> list[str]:
    """Return what the bench was doing when it stopped, according to a rank in its last phase."""
    whats = [one.what for one in stop.positions if one.phase == stop.phase and one.what]
    return [f'the bench was in its phase "{stop.phase}"' + (f", at {whats[0]}" if whats else "")]


def _crash_fix(finding: Finding, stop: Stop) -> str:
    errors = [one.error or "" for one in stop.positions if one.rank in finding.ranks]
    if any("memory" in error.lower() for error in errors):
        return "choose a smaller --max-size, or free memory; this error caused those of the other ranks"
    return "look up this error (NCCL_DEBUG=INFO shows more of NCCL); it caused the errors of the other ranks"


def _silent(finding: Finding, bench: Bench, stop: Stop) -> Finding:
    """Rewrite a finding about ranks that did not answer. Their position is unknown."""
    waiting = waiters_words(build_job_state(build_job(bench, stop)), finding.ranks)
    verb = "does not respond anymore" if len(finding.ranks) == 1 else "do not respond anymore"
    seen = {int(rank) for one in stop.positions for rank in one.states}
    pids = [str(one.pid) for one in bench.members if one.rank in seen & set(finding.ranks)]
    down = "check that their hosts and the network to them are up: run ddpdoctor check-env on all hosts"
    return replace(
        finding,
        summary=f"{rank_list(finding.ranks)} {verb}" + (f"; {waiting}" if waiting else ""),
        evidence=_others(finding, bench, stop),
        fix=f"see what they are doing: py-spy dump --native --pid {' '.join(pids)}" if pids else down,
    )


def _others(finding: Finding, bench: Bench, stop: Stop) -> tuple[str, ...]:
    """Return where the other ranks were. Ranks in the same place share one phrase."""
    others = (member.rank for member in bench.members if member.rank not in finding.ranks)
    by_words = grouped((describe_rank(rank, stop), rank) for rank in others)
    return tuple(f"{rank_list(ranks)}: {words}" for words, ranks in by_words.items())


def _transport(finding: Finding, bench: Bench, stop: Stop) -> Finding:
    """Say which calls of the bench do not complete, and between which ranks."""
    at = {(one.group, one.what or one.op) for one in stop.positions if one.rank in finding.ranks}
    calls = [f"{rank_list(group)} {'is' if len(set(group)) == 1 else 'are'} in {what}" for group, what in sorted(at)]
    more = f"; {len(calls) - MOST_NAMED} more groups" if len(calls) > MOST_NAMED else ""
    fails = "it does not complete" if len(calls) == 1 else "none of these completes"
    hosts = dict.fromkeys(one.host for one in bench.members if one.rank in finding.ranks)
    return replace(
        finding,
        summary=f"{', '.join(calls[:MOST_NAMED])}{more}, but {fails}",
        fix=_transport_fix(len(hosts), bench.settings.backend),
    )


def _transport_fix(hosts: int, backend: str) -> str:
    if backend == "nccl":
        where = "test the network between these hosts (ddpdoctor check-env)" if hosts > 1 else "test the links"
        return f"{where}, and read the log with NCCL_DEBUG=INFO"
    if hosts > 1:
        return (
            "test the network between these hosts (ddpdoctor check-env on all of them): a firewall that drops packets, "
            "a link that is down, a wrong MTU, or a wrong GLOO_SOCKET_IFNAME"
        )
    return "check whether this host drops packets on the interface in GLOO_SOCKET_IFNAME"
