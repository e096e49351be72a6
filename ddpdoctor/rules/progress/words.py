"""Evidence as sentences: what each rank does, who failed after the first, how far the ranks had come, and clues."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.facts import Life, Rank
from ddpdoctor.model.words import grouped, name_list, rank_list, verb
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.progress import states as st
from ddpdoctor.rules.progress.waits import Group, dim_words, group_words, reached

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.progress.job_state import JobState

NOTABLE_NS = 10_000_000_000  # our choice: shorter waits for a core are usual where several programs share a machine
# Most classes of ranks that are listed. If every rank does something else, more of them would not help.
MAX_CLASSES = 8
# A part of a call as it is written: "with MAX", "to rank 2", "8 bytes", "[16, 4]", "(train.py:31)", or a word.
_PART = re.compile(r"with \w+|(?:from|to) rank \d+|\d+ \w+|\[[^\]]*\]|\([^)]*\)|[^\s\[]+")
_DOING = {
    st.Activity.MISSING: ("never started", "never started"),
    st.Activity.ENDED: ("has exited with status 0", "have exited with status 0"),
    st.Activity.FAILED: ("has failed", "have failed"),
    st.Activity.STOPPED: ("is stopped", "are stopped"),
    st.Activity.SHUTTING_DOWN: ("has finished its script", "have finished their script"),
    st.Activity.INIT: ("waits in init_process_group", "wait in init_process_group"),
    st.Activity.NEW_GROUP: ("waits in new_group", "wait in new_group"),
    st.Activity.DATA: ("waits for its next batch", "wait for their next batch"),
    st.Activity.BACKWARD: ("computes in backward", "compute in backward"),
    st.Activity.USER: ("is in its own code", "are in their own code"),
}
_STATES = {"R": "running (R): it is computing or spinning", "S": "sleeping (S)", "D": "in uninterruptible sleep (D)"}


def doing_words(state: st.RankState, *, single: bool = True) -> str:
    wait = "waits" if single else "wait"
    if state.doing is st.Activity.NATIVE and state.call is not None:
        what = "backward (DDP's gradient reduction)" if state.call.op == "backward" else state.call.op
        return f"{wait} in {what}"
    if state.doing in (st.Activity.COLLECTIVE, st.Activity.PEER):
        return f"{wait} in {st.call_words(state.call)}{st.peer_words(state.call)}"
    if state.doing is st.Activity.USER and not state.rank.recorded:
        return "could not be inspected"
    if state.doing is st.Activity.SHUTTING_DOWN and state.error is not None:
        return f"{'ends' if single else 'end'} with {state.error.type}"
    return _DOING[state.doing][0 if single else 1]


def line_at(state: st.RankState) -> Frame | None:
    """Return the user's line that a rank is at: that of its call, else of its stack, else the last one seen."""
    if state.waiting and state.call is not None and state.call.site is not None:
        return state.call.site
    seen = st.lines_seen(state.rank.samples)
    if seen and state.doing not in (st.Activity.ENDED, st.Activity.FAILED, st.Activity.MISSING):
        return seen[0]
    return state.rank.last_place


def classes(job: JobState, numbers: Iterable[int]) -> list[str]:
    merged: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    numbers = tuple(numbers)
    groups = _mesh_groups(job, numbers)
    for number in numbers:
        state = job.states[number]
        frame = line_at(state)
        dim = groups[number].mesh_dim if number in groups else ""
        at = f", {st.line_of(frame)}" if frame is not None else ""
        merged[doing_words(state), doing_words(state, single=False), dim, at].append(number)
    ordered = sorted(merged.items(), key=lambda item: (-len(item[1]), item[1]))
    sentences = []
    for (single, many, _, at), ranks in ordered[:MAX_CLASSES]:
        inside = _mesh_words(job, ranks)
        waited = [job.states[n].since(job.time_ns) for n in ranks if job.states[n].waiting]
        lasting = st.seconds(max((value for value in waited if value is not None), default=None))
        tail = f", {lasting}" if lasting else ""
        sentences.append(f"{rank_list(ranks)} {verb(ranks, single, many)}{inside}{at}{tail}")
    left = sum(len(ranks) for _, ranks in ordered[MAX_CLASSES:])
    return [*sentences, f"{left} more ranks are at other lines"] if left else sentences


def all_classes(job: JobState, blamed: Iterable[int]) -> list[str]:
    return [*classes(job, blamed), *others(job, blamed)]


def others(job: JobState, blamed: Iterable[int]) -> list[str]:
    return classes(job, [n for n in sorted(job.states) if n not in set(blamed)])


def waiters_words(job: JobState, blamed: Sequence[int], whom: str = "") -> str:
    """Return "ranks 0 and 2 are waiting for it in all_reduce", by mesh dimension, or nothing if no rank waits."""
    waiters = [n for n in job.waits.waiters if n not in set(blamed)]
    if not waiters:
        return ""
    whom = whom or ("it" if len(blamed) == 1 else "them")
    groups = _mesh_groups(job, waiters)
    direct = [n for n, group in groups.items() if set(group.members) & set(blamed)]
    if direct:
        # "rank 1 is waiting for it in all_reduce of the tp group; ranks 2 and 3 are waiting behind rank 1"
        dims = sorted({dim_words(groups[n]) for n in direct})
        ops = sorted({job.states[n].op for n in direct})
        what = f"in {ops[0]} of" if len(ops) == 1 else "in"
        text = f"{rank_list(direct)} {verb(direct, 'is', 'are')} waiting for {whom} {what} the {name_list(dims)} group"
        text += "s" if len(dims) > 1 else ""
        rest = [n for n in waiters if n not in direct]
        behind = f"; {rank_list(rest)} {verb(rest, 'is', 'are')} waiting behind {rank_list(direct)}" if rest else ""
        return f"{text}{behind}"
    ops = sorted({job.states[n].op for n in waiters})
    where = f" in {ops[0]}" if len(ops) == 1 else ""
    return f"{rank_list(waiters)} {verb(waiters, 'is', 'are')} waiting for {whom}{where}"


def progress_words(job: JobState, blamed: Iterable[int]) -> list[str]:
    said: dict[str, list[int]] = defaultdict(list)
    for number in list(blamed)[:MAX_CLASSES]:
        rank = job.ranks[number]
        if _done_words(rank):
            said[f"completed {_done_words(rank)}"].append(number)
        if rank.last_progress_ns is not None and rank.life is Life.RUNNING:
            still = f"{{}} made no progress {st.seconds(job.time_ns - rank.last_progress_ns)}".rstrip()
            starved = f", and waited for a core {st.seconds(rank.starved_ns)}" if rank.starved_ns >= NOTABLE_NS else ""
            said[still + starved].append(number)
    return [f"{rank_list(numbers)} {words.format(verb(numbers, 'has', 'have'))}" for words, numbers in said.items()]


def counts_words(job: JobState, numbers: Iterable[int]) -> list[str]:
    had: dict[str, list[int]] = defaultdict(list)
    for rank in (job.ranks[n] for n in numbers):
        kinds = rank.recent_calls.counts.items()
        backwards = sum(count for kind, count in kinds if kind.op == "backward")
        had[_done_words(rank) or f"{backwards} recorded backwards"].append(rank.rank)
    if len(had) < 2:
        return []
    ordered = sorted(had.items(), key=lambda item: item[1])[:MAX_CLASSES]
    return [f"{rank_list(ranks)} completed {counts}" for counts, ranks in ordered]


def _done_words(rank: Rank) -> str:
    counts = {"optimizer steps": rank.steps, "batches": rank.batches}
    return " and ".join(f"{count} {what}" for what, count in counts.items() if count)


def process_words(job: JobState, blamed: Iterable[int]) -> list[str]:
    said: dict[str, list[int]] = defaultdict(list)
    found = []
    for number in list(blamed)[:MAX_CLASSES]:
        rank = job.ranks[number]
        if rank.proc_state is not None and rank.life is Life.RUNNING:
            words = _STATES.get(rank.proc_state, f"in state {rank.proc_state}")
            # To the nearest tenth of a core, so that equal ranks share a sentence.
            share = f", at about {round(rank.cpu_share, 1):.0%} of a core" if rank.cpu_share is not None else ""
            said[words + share].append(number)
        if rank.recorded and not rank.answered and rank.samples and rank.samples[-1].by == "signal":
            found.append(f"no thread of rank {number} can get the GIL: a C call is holding it")
        if rank.lost:
            found.append(f"the record of rank {number} is incomplete: {rank.lost}")
    several = len(hosts_of(job, job.states)) > 1
    states = []
    for words, numbers in said.items():
        ranks = [job.ranks[n] for n in numbers]
        pids = ", ".join(f"{rank.pid} on {rank.host}" if several else str(rank.pid) for rank in ranks)
        states.append(f"{verb(numbers, 'process', 'processes')} {pids} {verb(numbers, 'is', 'are')} {words}")
    return states + found


def handled_words(job: JobState, blamed: Iterable[int]) -> list[str]:
    errors = ((number, job.ranks[number].handled) for number in list(blamed)[:MAX_CLASSES])
    return [
        f"rank {number} is handling a {error.type} raised {st.place_words(st.innermost_user(error.frames))}: "
        f"{st.first_line(error.message)}"
        for number, error in errors
        if error is not None
    ]


def cascade_words(failures: Iterable[st.Failure], blamed: Iterable[int], also: str = " as well") -> list[str]:
    """Return which other ranks failed, and with what; texts that differ only in numbers appear once."""
    # ``also`` is empty if the blamed ranks did not fail themselves.
    merged = grouped(
        ((f", in {f.call.op}" if f.call is not None else "", st.without_numbers(how_words(f))), f)
        for f in failures
        if f.rank.rank not in set(blamed)
    )
    return [
        f"{rank_list(f.rank.rank for f in group)} failed{also}{where}: {how_words(group[0])}"
        for (where, _), group in list(merged.items())[:MAX_CLASSES]
    ]


def how_words(failure: st.Failure) -> str:
    rank = failure.rank
    if rank.ended_by_thread is not None and failure.error is None:
        place = rank.ended_by_thread.place
        how = rank.signal or f"exit status {rank.exit_code}"
        return f"a time limit of the script ended it ({how})" + (f" {st.place_words(place)}" if place else "")
    if failure.error is not None:
        text = st.FINGERPRINTS.sub("", st.first_line(failure.error.message))
        return f"{failure.error.type}: {text}" if text else failure.error.type
    if rank.life is Life.SIGNALED and failure.call is not None and failure.call.device_state and failure.timed_out:
        return f"{rank.signal} after torch's timeout, as the NCCL watchdog does"
    if rank.life is Life.SIGNALED:
        return rank.signal or "a signal"
    return f"exit status {rank.exit_code}" if rank.exit_code is not None else "unknown reason"


def calls_apart(sides: Iterable[tuple[str, str]]) -> str:
    """Return in which parts the calls of sides differ: "all_reduce of float32: [3] on rank 0, [9] on rank 1".

    A side is a call and its ranks. Empty if they differ in the operation or its line.
    """
    written = [(what, _PART.findall(what), ranks) for what, ranks in sides]
    if len({(parts[0], len(parts)) for _, parts, _ in written}) != 1:
        return ""
    apart = [len(set(each)) > 1 for each in zip(*(parts for _, parts, _ in written), strict=True)]
    told = [(" ".join(compress(parts, apart)), ranks) for _, parts, ranks in written]
    if not any(apart) or any("(" in what for what, _ in told):
        return ""
    left_out = iter(apart)
    alike = " ".join(_PART.sub(lambda part: "" if next(left_out) else part[0], written[0][0]).split())
    said = [f"{what} on {ranks}" for what, ranks in told[:MAX_CLASSES]]
    said += [f"and {len(told) - len(said)} others"] if len(told) > len(said) else []
    return f"{alike.removesuffix(' of').replace(' of (', ' (')}: {', '.join(said)}"


def problem_of(job: JobState, ranks: tuple[int, ...], summary: str, **fields: Any) -> Problem:
    """Return a problem of ranks, with their hosts and their step; ``fields`` are the other fields of ``Problem``."""
    if "step" not in fields:  # the optimizer step that they were in, counted from 0, if any were seen
        steps = [job.ranks[n].steps for n in ranks if n in job.states]
        fields["step"] = min(steps) if any(steps) else None
    return Problem(ranks=ranks, hosts=hosts_of(job, ranks), summary=summary, **fields)


def hosts_of(job: JobState, blamed: Iterable[int]) -> tuple[str, ...]:
    if job.facts.nnodes <= 1 and job.facts.members is None:
        return ()
    return tuple(sorted({job.ranks[n].host for n in blamed if n in job.states}))


def who(job: JobState, ranks: Iterable[int]) -> str:
    """Return "rank 3", and in a job of several nodes "rank 3 on node1"."""
    ranks = tuple(ranks)
    hosts = hosts_of(job, ranks)
    return f"{rank_list(ranks)} on {name_list(hosts)}" if hosts else rank_list(ranks)


def _mesh_groups(job: JobState, ranks: Iterable[int]) -> dict[int, Group]:
    """Return the mesh group that each rank waits in, without those that wait in none or in the group of all ranks."""
    groups = {n: job.positions[n].group for n in ranks if n in job.positions}
    return {n: group for n, group in groups.items() if group.mesh_dim and len(group.members) < job.world}


def _mesh_words(job: JobState, ranks: Iterable[int]) -> str:
    """Return " in the dp group (ranks 1 and 3) for rank 3"; for several groups of a dimension, one phrase for all."""
    inside = _mesh_groups(job, ranks)
    if not inside:
        return ""
    groups = set(inside.values())
    late = set()  # the members that have not come to the collective
    for position in {job.positions[n] for n in inside}:
        for n in position.group.members:
            seq = reached(job.states[n], position.group.name) if n in job.states else 0
            late |= {n} if seq is not None and position.seq is not None and seq < position.seq else set()
    first = min(groups, key=lambda group: group.members)
    where = group_words(first, job.world) if len(groups) == 1 else f"their {dim_words(first)} groups"
    return f" in {where}" + (f" for {rank_list(late)}" if late else "")


@dataclass(frozen=True, slots=True)
class Clue:
    """One observation. ``said`` is the text after "rank 1: "; the fix replaces that of the finding."""

    said: str
    fix: str = ""


def sentences(found: Mapping[int, Iterable[Clue]]) -> list[str]:
    merged = grouped((clue.said, number) for number, clues in found.items() for clue in clues)
    return [f"{rank_list(numbers)}: {said}" for said, numbers in merged.items()]


def fix_of(clues: Iterable[Clue], default: str) -> str:
    return next((clue.fix for clue in clues if clue.fix), default)


def find_owner(job: JobState, host: str, pid: int | None, command: str) -> tuple[str, str]:
    """Return what a process of a host is to the job, as "a child of rank 0", and the same with details."""
    if pid is None:
        name = "a process on another host or in another container"
        return name, name
    for number in sorted(job.states):
        rank = job.ranks[number]
        if rank.host == host and pid in {rank.pid, *(child.pid for child in rank.children)}:
            name = f"rank {number}" if rank.pid == pid else f"a child of rank {number}"
            return name, f"{name} (process {pid})"
    return f"process {pid}", f"process {pid} ({command})" if command else f"process {pid}"
