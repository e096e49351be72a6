"""DD606 and DD607: a process that is frozen, and a rank or node that never came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import name_list, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.causes import clues_of
from ddpdoctor.rules.progress.clues import fix_of, sentences
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.node_findings import judge_missing_nodes
from ddpdoctor.rules.progress.nodes import CHECK, failing, hosts_of_nodes, never_came, node_words, ranks_of, reach_fix, reached_words
from ddpdoctor.rules.progress.places import places_held_up
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.words import verb

if TYPE_CHECKING:
    from ddpdoctor.model.facts import NodeSeen, Rank


@rule("DD606", "stopped", Severity.ERROR, "The process of a rank is frozen")
def check_stopped(job: JobState) -> Answer:
    """Report a process that is frozen: by SIGSTOP, by a debugger, or in the kernel."""
    if job.cause not in (Cause.HANG, Cause.NONE, Cause.CONFLICT):
        return skipped(job.cause.value)
    frozen = tuple(n for n in job.living if job.states[n].doing is Activity.STOPPED)
    if not frozen:
        return passed()
    blamed = tuple(n for n in frozen if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(frozen)} made progress just now")
    if not job.waits.waiters and not set(job.living) <= job.quiet:
        return unknown(f"{rank_list(frozen)} {verb(frozen, 'is', 'are')} stopped, but no rank is waiting yet")
    return _stopped(job, blamed)


def _stopped(job: JobState, blamed: tuple[int, ...]) -> Answer:
    ranks = [job.rank(n) for n in blamed]
    where = tuple(place for rank in ranks for place in places_held_up(rank, waits_for_child=False)[:1])
    traced = [rank.traced_by for rank in ranks if rank.traced_by]
    asleep = any(rank.proc_state == "D" for rank in ranks)
    how = f"held by a debugger (process {traced[0]})" if traced else f"stopped (state {ranks[0].proc_state})"
    waiters = say.waiters_words(job, blamed)
    clues = {n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]} if asleep else {}
    finding = Problem(
        confidence=Confidence.MEDIUM if asleep else Confidence.HIGH,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        step=say.step_of(job, blamed),
        summary=f"{say.who(job, blamed)} {verb(blamed, 'is', 'are')} {how}" + (f"; {waiters}" if waiters else ""),
        evidence=(
            *sentences(clues),
            *say.process_words(job, blamed),
            *say.others(job, blamed),
            *say.progress_words(job, blamed),
        ),
        fix=fix_of((clue for found in clues.values() for clue in found), _stopped_fix(job, blamed, asleep=asleep)),
    )
    lasting = job.waits.waiters and all(_is_frozen_for_good(job, rank) for rank in ranks)
    return judged([finding], certain=job.stands_still(blamed), may_resume=not lasting)


def _is_frozen_for_good(job: JobState, rank: Rank) -> bool:
    """Return whether a process has been stopped for the whole hang timeout and no debugger can continue it.

    Sleep in the kernel (D) does not count: it ends when the device or the file server answers, however late.
    """
    if rank.proc_state != "T" or rank.traced_by or rank.frozen_since_ns is None:
        return False
    return job.time_ns - rank.frozen_since_ns >= job.timeout_ns


def _stopped_fix(job: JobState, blamed: tuple[int, ...], *, asleep: bool) -> str:
    ranks = [job.rank(n) for n in blamed]
    if any(rank.traced_by for rank in ranks):
        return "detach the debugger, or continue the process in it"
    if asleep:
        return "check dmesg, and the device or file system that it reads"
    hosts = say.hosts_of(job, blamed)
    by_host = [(f"on {host}: ", [rank for rank in ranks if rank.host == host]) for host in hosts] or [("", ranks)]
    return "; ".join(f"{where}kill -CONT {' '.join(str(rank.pid) for rank in those)}" for where, those in by_host)


@rule("DD607", "missing", Severity.ERROR, "A rank or node never joined")
def check_missing(job: JobState) -> Answer:
    """Report ranks that have no process while others wait for them."""
    if job.cause is Cause.NONE and not job.states and (job.facts.nnodes > 1 or job.facts.members is not None):
        return judge_missing_nodes(job)
    if job.cause not in (Cause.HANG, Cause.NONE):
        return skipped(job.cause.value)
    absent = job.waits.absent
    in_init = any(state.doing is Activity.INIT for state in job.states.values())
    if not absent or (not job.sees_all and not in_init):
        return passed()
    if not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
    return _missing(job, absent)


def _missing(job: JobState, absent: tuple[int, ...]) -> Answer:
    asked = job.facts.local_ranks_expected
    seen = [
        *say.classes(job, job.waits.waiters),
        f"the world size is {job.world}, and {len(job.states)} ranks were seen",
    ]
    seen += [f"the launcher on this node starts {asked} ranks"] if asked is not None else []
    doubled = _duplicates(job)
    alone = job.sees_all
    absent_nodes = [node for node in never_came(job.facts) if set(ranks_of(job.facts, (node,), ())) & set(absent)]
    finding = Problem(
        confidence=Confidence.HIGH if alone else Confidence.LOW,
        ranks=absent,
        hosts=hosts_of_nodes(absent_nodes),
        summary=f"{rank_list(absent)} never joined; {rank_list(job.waits.waiters)} "
        f"{verb(job.waits.waiters, 'is', 'are')} waiting for all {job.world} ranks"
        + "".join(f"; {sentence}" for sentence in doubled[:1]),
        evidence=(*seen, *doubled, *_node_words(job, absent_nodes), *reached_words(job.facts.reached)),
        fix=_missing_fix(job, absent_nodes, alone=alone, doubled=bool(doubled)),
    )
    certain = alone and job.stands_still(())
    return judged([finding], certain=certain, may_resume=bool(never_came(job.facts)))


def _node_words(job: JobState, absent_nodes: list[NodeSeen]) -> list[str]:
    return [
        f"no message from {node_words(job.facts, (node,))}" + (f": {node.why}" if node.why else "")
        for node in absent_nodes[: say.MAX_CLASSES]
    ]


def _missing_fix(job: JobState, absent_nodes: list[NodeSeen], *, alone: bool, doubled: bool) -> str:
    if doubled:
        return "give each process its own rank: pass RANK, which the launcher sets, to rank="
    if absent_nodes:
        hosts = hosts_of_nodes(absent_nodes)
        where = f" on {name_list(hosts)}" if hosts else ""
        return f"check that the job was started{where} with the same endpoint and world size; {CHECK}"
    if alone:
        return "start as many ranks as the world size (--nproc-per-node, --nnodes, or world_size= in the script)"
    bad = failing(job.facts.reached)
    if bad is not None:
        return reach_fix(bad, job.facts.host or "this node")
    return f"check that the other nodes were started with the same endpoint and number of nodes; {CHECK}"


def _duplicates(job: JobState) -> list[str]:
    """Return the rank numbers that more than one process of the same attempt has taken."""
    taken: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for rank in job.facts.ranks:
        if rank.pid is not None:
            taken.setdefault((rank.attempt, rank.rank), set()).add((rank.host, rank.pid))
    several = len({rank.host for rank in job.facts.ranks}) > 1
    return [
        f"{len(found)} processes use rank {number}: "
        + ", ".join(f"{pid} on {host}" if several else str(pid) for host, pid in sorted(found))
        for (_, number), found in sorted(taken.items())
        if len(found) > 1
    ]
