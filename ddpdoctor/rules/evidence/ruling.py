"""Decides what the evidence of a run amounts to: one cause, or what is lacking to name it.

The stronger source wins: an error of a rank itself or a line of the kernel, then calls that differ, then a circle,
then who is absent where others wait, then the network, then "all are inside". What may lie with ranks that were not
seen is no verdict.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model import evidence as ev
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.known_errors import ONLY_LOCAL
from ddpdoctor.model.words import grouped, name_list, rank_list, verb
from ddpdoctor.rules.answers import Answer, judged, passed, skipped, unknown
from ddpdoctor.rules.evidence import words
from ddpdoctor.rules.evidence.calls import WAITS, innermost, ranked
from ddpdoctor.rules.evidence.state import Ruling, RunState, find_roots, last_samples, lost_by, precedes
from ddpdoctor.rules.evidence.words import (
    KILLED,
    MOST_QUOTES,
    SAMPLE_AGAIN,
    collect,
    places,
    quote,
    quotes,
    steps_words,
    who_words,
)
from ddpdoctor.rules.progress.states import place_words
from ddpdoctor.rules.registry import also, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.rules.evidence.state import Root


_STATES = {
    ev.Doing.OWN: "is in its own code", ev.Doing.DATA: "waits for a DataLoader worker", ev.Doing.EXIT: "is exiting",
    ev.Doing.INIT: "is in init_process_group", ev.Doing.DEVICE: "waits for its device",
    ev.Doing.COLLECTIVE: "waits for others", ev.Doing.UNKNOWN: "is elsewhere",
}  # fmt: skip
_FIND_END = f"find out what ended the process or its host: its standard error, {KILLED}"
_LET_IT_END = (
    "do this work once before the job (a prepared data set, a filled cache), or let all ranks share it; else raise the "
    "limit: `init_process_group(timeout=timedelta(hours=2))`"
)
_SET_INTERFACE = "set NCCL_SOCKET_IFNAME on that host to an interface on the shared network (ip -br address)"
ALL_RANKS = "all ranks"  # what RAS's reader calls the communicator that has all ranks
_TELLING = frozenset({"ras-ahead", "ras-unnamed", "damaged"})  # notes that say why the cause cannot be told
# What only such errors say, with a quote of one.
_ONLY_SAID = {
    ev.Nature.PEER_LOST: "the evidence only has errors of ranks that lost another rank, not the failure itself",
    ev.Nature.TIMED_OUT: "a wait for other ranks timed out, but the evidence does not show which ones: {}",
    ev.Nature.STOPPED: "processes were told to stop, but the evidence does not show why: {}",
    ev.Nature.FOLLOWS: "the evidence only has reports of a failure, not the failure itself: {}",
}
MOST_REASONS = 12
_FROZEN = frozenset({"T", "t"})
# For faults of a machine: the kind of the rule of `check-env` that a user would look for.
_KINDS = {
    "shm": "shm", "version": "version-same", "interface": "ifname-exists", "duplicate-gpu": "dup-gpu",
    "port": "port-free", "disk": "disk", "wrong-data": "wrong-data",
    "nonfinite": "nonfinite-grad", "xid": "xid", "gpu-lost": "xid",
}  # fmt: skip
_ENDS_PROCESSES = frozenset({"oom", "node-failure"})  # faults of a machine by which processes die at once


class _Absence:
    """Ranks that did not come to where others wait, as ``absent`` says."""

    def __init__(self, state: RunState, ranks: list[int], absent: Sequence[ev.Absent], *, doubted: bool) -> None:
        self.state, self.ranks, self.absent = state, ranks, absent
        self.samples = samples = last_samples(state.facts)
        self.kind = "stuck"  # what became of them
        exiting = all(rank in samples and samples[rank].doing is ev.Doing.EXIT for rank in ranks)
        if exiting or all(state.of(rank, ev.Finished) for rank in ranks):
            self.kind = "early-exit"
        elif all(any(fact.dead for fact in absent if fact.who.rank == rank) for rank in ranks):
            self.kind = "killed"
        elif all(fact.in_init for fact in absent) and not any(rank in samples for rank in ranks):
            self.kind = "missing"
        self.late = any(fact.late for fact in absent) and self.kind == "stuck"
        # It is sure only if the absent rank is seen elsewhere in two samples, and not if ranks were not seen.
        # RAS speaks for all ranks.
        counted = all(fact.shown is ev.Shown.COUNTS for fact in absent)
        self.sure = Confidence.HIGH if all(len(state.samples_of(rank)) > 1 for rank in ranks) else Confidence.MEDIUM
        if doubted or not all(fact.certain for fact in absent) or (state.unseen and not counted):
            self.sure = Confidence.LOW
        self.waiters = sorted({rank for fact in absent for rank in fact.waiters} - set(ranks)) or [
            rank for rank in state.waiting if rank not in ranks
        ]
        loading = [rank for rank in ranks if rank in samples and samples[rank].doing is ev.Doing.DATA]
        by_pid = {fact.who.pid: fact for rank in loading for fact in state.of(rank, ev.Stacked) if fact.worker}
        self.workers = list(by_pid.values())[:MOST_QUOTES]
        of_workers = places((fact.who.rank or 0, innermost(fact.frames)) for fact in self.workers)
        frames = [(rank, innermost(samples[rank].frames)) for rank in ranks if rank in samples]
        self.where = (*places(frames), *dict.fromkeys(of_workers))
        self.busy = next((fact.busy for fact in absent if fact.busy is not None), None)

    def summary(self) -> str:
        ranks, waiters, them = self.ranks, self.waiters, verb(self.ranks, "it", "them")
        wait = f"{rank_list(waiters)} {verb(waiters, 'is', 'are')} waiting" if waiters else "other ranks are waiting"
        who = who_words(self.state, ranks)
        if self.kind == "killed":
            be = "may be" if self.sure is Confidence.LOW else verb(ranks, "is", "are")
            return f"{who} {be} gone: NCCL's RAS considers {them} dead; {wait}"
        at = ""
        if self.where and self.kind == "stuck":
            at = f"{verb(ranks, 'it is', 'they are')} {place_words(self.where[0])}, and "
        elif (busy := self.busy) is not None:
            at = f'the last it wrote is "{busy.task}{f" {busy.share} %" if busy.share is not None else ""}", and '
        did, perhaps = {
            "early-exit": ("exited before", "may have exited before"),
            "missing": ("never joined", "may not have joined"),
        }.get(self.kind, ("did not call", "may not have called"))
        if self.late:
            did, perhaps = "came too late to", "may have come too late to"
            wait = f"{rank_list(waiters) if waiters else 'other ranks'} had reached the time limit, waiting"
        target = "init_process_group" if self.absent[0].in_init else self.absent[0].operation.words()
        if self.sure is Confidence.LOW:
            return f"{who} {perhaps} {target}; {at}{wait}"
        return f"{who} {did} {target}; {at}{wait} for {them}"

    def evidence(self, weaker: Sequence[ev.Absent]) -> Iterator[str]:
        """Yield what the ranks do, what says so, at which lines the others wait, and how far the ranks had come."""
        state, samples = self.state, self.samples
        for rank in self.ranks:
            if (sample := samples.get(rank)) is not None:
                twice = " in every sample" if len(state.samples_of(rank)) > 1 else ""
                place = place_words(innermost(sample.frames))
                yield f"rank {rank} {_STATES[sample.doing]}, {place}{twice} ({quote(sample)})"
        for worker in self.workers:
            if (frame := innermost(worker.frames)) is not None and worker.who.pid is not None:
                yield f"the worker of rank {worker.who.rank} with pid {worker.who.pid} is {place_words(frame)}"
        yield from quotes(self.absent)
        yield from quotes([self.busy] if self.busy is not None else [])
        yield from (f"a weaker source disagrees: {said}" for said in quotes(weaker))
        yield from quotes(fact for fact in state.all(ev.Waiting) if fact.who.rank in self.waiters)
        enqueued = {fact.who.rank: fact.frames for fact in state.all(ev.Waiting) if fact.frames}
        stacks = {rank: samples[rank].frames if rank in samples else enqueued.get(rank, ()) for rank in self.waiters}
        lines = grouped((place_words(innermost(frames)), rank) for rank, frames in stacks.items() if frames)
        for place, those in lines.items():
            yield f"{rank_list(those)} {verb(those, 'waits', 'wait')} {place}"
        reached = []
        done: dict[tuple[int | None, str], int] = {}
        for fact in state.all(ev.Reached):
            key = (fact.who.rank, fact.group_words)
            done[key] = max(done.get(key, 0), fact.completed or 0)
        for fact in state.all(ev.Reached):
            if fact.who.rank in self.ranks and fact.enqueued is not None:
                if (fact.completed or 0) < fact.enqueued <= done[fact.who.rank, fact.group_words]:
                    continue  # another source says that the rank has completed it
                group = f" of {fact.group_words}" if fact.group_words else ""
                reached.append(f"rank {fact.who.rank} had {fact.done_words()} collective #{fact.enqueued}{group}")
        yield from list(dict.fromkeys(reached))[:MOST_QUOTES]
        yield from steps_words(state)

    def fix(self) -> str:
        who = rank_list(self.ranks)
        if self.kind == "killed":
            return _FIND_END
        if self.busy is not None and not self.where:
            return _LET_IT_END
        if self.late and not self.where:
            return (
                f"find out what {who} did before that call; if it may take so long, raise the limit: "
                "`init_process_group(timeout=timedelta(hours=2))`"
            )
        if self.workers and (frame := innermost(self.workers[0].frames)) is not None:
            return f"check what the DataLoader workers of {who} do {place_words(frame)}"
        if self.where:
            does = verb(self.ranks, "does", "do")
            return f"check what {who} {does} {place_words(self.where[0])}, and why the other ranks do not"
        its = "its" if len(self.ranks) == 1 else "their"
        return (
            f"find out what {who} did instead: {its} log and standard error; "
            f"{its} stack, if the job still runs, with `ddpdoctor attach` on {its} host"
        )


def find_absent(state: RunState) -> Ruling | None:
    """Return a ruling about ranks that are absent. Of sources that contradict each other the strongest counts."""
    absent = ranked(state.all(ev.Absent), ev.Absent)
    if not absent:
        return None
    samples = last_samples(state.facts)
    roots = [(rank, fact) for rank, fact in absent if not _waits(state, rank, fact, samples.get(rank))] or absent
    # A rank that waits for another one that is absent, and not that one for it, is no root.
    waited_by: dict[int, set[int]] = defaultdict(set)
    waits_for: dict[int, set[int]] = defaultdict(set)
    for rank, fact in roots:
        waited_by[rank] |= set(fact.waiters)
        for waiter in fact.waiters:
            waits_for[waiter] |= {rank} - {waiter}
    roots = [(rank, fact) for rank, fact in roots if not waits_for[rank] - waited_by[rank]] or roots
    strongest = max(fact.shown for _, fact in roots)
    ranks = sorted({rank for rank, fact in roots if fact.shown is strongest})
    others = {rank for rank, _ in roots} - set(ranks)
    sure = {rank for rank, fact in absent if fact.certain or fact.expected}
    unseen = [rank for rank in ranks if rank not in state.seen and rank not in sure]
    if unseen:
        reason = f"others wait for {rank_list(ranks)}, but there is no evidence from it, so the cause is unknown"
        return Ruling(reason=reason, collect=collect(state))
    elsewhere = {ev.Doing.OWN, ev.Doing.DATA, ev.Doing.EXIT}
    ranks = [rank for rank in ranks if rank in samples and samples[rank].doing in elsewhere] or ranks
    those = [fact for rank, fact in absent if rank in ranks]
    if all(fact.moves for fact in those):
        at = "; ".join(place_words(innermost(samples[rank].frames)) for rank in ranks if rank in samples)
        waits = f"others wait for {who_words(state, ranks)}, which moved between the samples ({at})"
        return Ruling(reason=f"{waits}: it may just be slow, or in an endless loop", collect=(SAMPLE_AGAIN,))
    weaker = [fact for rank, fact in roots if rank in others and not set(fact.waiters).isdisjoint(ranks)]
    one = _Absence(state, ranks, those, doubted=bool(weaker))
    problem = words.problem(
        state, one.summary(), one.evidence(weaker), confidence=one.sure, ranks=ranks, where=one.where, fix=one.fix()
    )  # fmt: skip
    return Ruling(kind=one.kind, problem=problem)


def _waits(state: RunState, rank: int, absent: ev.Absent, sample: ev.Stacked | None) -> bool:
    """Return whether a rank that did not come waits elsewhere for others."""
    if sample is not None:
        return sample.doing in WAITS
    # NCCL may not have launched what torch waits for: the device has not come to it.
    of_all = absent.shown is ev.Shown.COUNTS and absent.operation.group_words == ALL_RANKS
    waits = (fact for fact in state.of(rank, ev.Waiting) if not fact.in_init)
    return any(not (of_all and fact.timed_out and not fact.operation.group) for fact in waits)


def decide(state: RunState) -> Ruling:
    """Return what the evidence of a run amounts to."""
    if (state.all(ev.Finished) or state.moves) and not state.went_wrong:
        return Ruling()
    roots = find_roots(state)
    differ = [fact for fact in state.all(ev.Differ) if fact.certain]
    # A failure counts first if it came before ranks called different operations, and in the user's own code.
    first = roots[0].failed if roots else []
    own = (
        any(failure.operation is None and any(frame.user for frame in failure.frames) for failure in first) or not first
    )
    older = roots and own and not any(precedes(one, fact) for one in differ for fact in roots[0].facts)
    if differ and not older:
        return Ruling(kind="mismatch", problem=words.mismatch(state, differ))
    if roots and roots[0].is_plain:
        root = roots[0]
        killed = not root.failed and (any(process.signal for process in root.exited) or root.memory)
        machine = next((trouble.kind for trouble in root.troubles if trouble.kind not in _ENDS_PROCESSES), "")
        if machine and ((not root.failed and not root.exited) or machine == "port"):
            problem = words.machine(state, root)
            return Ruling(kind="crash", problem=replace(problem, kind=_KINDS.get(machine)))
        if any(trouble.kind == "node-failure" for trouble in root.troubles):
            killed = True
        problem = words.failure(state, root, roots[1:], killed=killed)
        return Ruling(kind="killed" if killed else "crash", problem=problem)
    ruling = next(_rulings(state, roots), None)
    return ruling or Ruling(reason=next(_reasons(state)), collect=collect(state))


def _rulings(state: RunState, roots: list[Root]) -> Iterator[Ruling]:
    """Yield what the evidence may amount to, if no failure stands out and no calls surely differ: the strongest first.

    Of several ranks that aborted without a word, all but one are victims for sure, and the one may be elsewhere. An
    error whose line stands alone, and which may report any other, comes late.
    """
    last = dict(ranked(state.all(ev.ProcessState), ev.ProcessState))
    frozen = [rank for rank, fact in last.items() if fact.letter in _FROZEN]
    if frozen and len(frozen) < len(last):
        yield Ruling(kind="stopped", problem=words.frozen(state, frozen))
    if circles := state.all(ev.Circle):
        yield Ruling(kind="deadlock", problem=words.circle(state, circles))
    root, absent = roots[0] if roots else None, find_absent(state)
    alone = root is not None and root.is_alone
    if absent is not None:
        one = absent.problem if absent.problem is not None and len(absent.problem.ranks) == 1 else None
        if root is not None and alone and not root.is_vague and not root.ranks and one is not None:
            root.ranks |= set(one.ranks)
            problem = words.failure(state, root, roots[1:], killed=False)
            waited = f"its line names no rank; {one.summary}"
            yield Ruling(kind="crash", problem=replace(problem, evidence=(*problem.evidence, waited)))
        yield absent
    if differ := [fact for fact in state.all(ev.Differ) if not fact.certain]:
        yield Ruling(kind="mismatch", problem=words.mismatch(state, differ))
    killed = root is not None and any(process.signal for process in root.exited) and not root.failed
    if root is not None and (not root.is_vague if alone else not killed or len(roots) == 1):
        ended = killed and not alone
        problem = words.failure(state, root, roots[1:], killed=ended)
        yield Ruling(kind="killed" if ended else "crash", problem=problem)
    yield from _network(state)
    if root is not None and alone:
        yield Ruling(kind="crash", problem=words.failure(state, root, roots[1:], killed=False))
    stopped, inside = state.all(ev.Stopped), state.all(ev.Inside)
    if stopped and not inside and not any(fact.timed_out for fact in state.all(ev.Waiting)):
        yield Ruling(kind="killed", problem=words.stopped(state, stopped))
    if whole := [fact for fact in inside if fact.complete]:
        yield Ruling(kind="transport", problem=words.inside(state, whole))
    lost = lost_by(state)
    if lost is not None and len(lost.facts) > 1:
        yield Ruling(kind="crash", problem=words.lost(state, lost))


def _network(state: RunState) -> Iterator[Ruling]:
    """Yield that hosts gave NCCL an address that leads only to themselves, or that connections failed."""
    addresses = {fact.who.host: fact.who.address for fact in state.facts if fact.who.host and fact.who.address}
    alone = {host: address for host, address in addresses.items() if address.startswith(ONLY_LOCAL)}
    waits = [fact for fact in state.all(ev.Waiting) if fact.in_init]
    links = [fact for fact in state.all(ev.Link) if not fact.victim]
    own = [fact for fact in links if fact.to.address in alone.values()]
    if alone and len(addresses) > 1 and len(own) == len(links) and (waits or own):
        hosts, shown = tuple(sorted(alone)), name_list(sorted(set(alone.values())))
        what = f"uses the address {shown}, which other hosts cannot reach: the wrong network interface"
        summary, said, sure = f"NCCL on {name_list(hosts)} {what}", quotes([*own, *waits]), Confidence.MEDIUM
        problem = words.problem(state, summary, said, confidence=sure, hosts=hosts, fix=_SET_INTERFACE)
        yield Ruling(kind="transport", problem=problem)
    if links:
        yield Ruling(kind="transport", problem=words.link(state, links))


def _reasons(state: RunState) -> Iterator[str]:
    """Yield why the evidence does not name a cause, the most exact first."""
    hints = state.all(ev.Hint)
    yield from (fact.words for fact in hints if fact.kind in _TELLING)
    if waiting := state.waiting:
        lacking = f"; there is no evidence from {rank_list(state.unseen)}" if state.unseen else ""
        yield f"{rank_list(waiting)} waited for other ranks, but the evidence does not show which ones{lacking}"
    yield from (fact.words for fact in hints if fact.kind == "told-to-dump")
    stuck = [fact for fact in hints if fact.kind == "watchdog-stuck"]
    ranks = sorted({rank for rank, _ in ranked(stuck, ev.Hint)})
    yield from (f"{rank_list(ranks)}: {fact.words}" if ranks else fact.words for fact in stuck[:1])
    failed = {fact.nature: fact for fact in reversed(state.all(ev.Failed))}
    yield from (said.format(words.quote(failed[one])) for one, said in _ONLY_SAID.items() if one in failed)
    if state.all(ev.Link):
        yield "the evidence only shows that the other side closed connections, not why"
    if state.all(ev.Exited):
        yield "the evidence only shows that ranks were stopped, not why"
    samples = last_samples(state.facts)
    if samples and all(sample.doing is ev.Doing.DATA for sample in samples.values()):
        yield f"{rank_list(samples)} {verb(samples, 'waits', 'wait')} for workers of a DataLoader"
    if state.all(ev.ProcessState):
        where = "no rank was seen to wait for another" if state.all(ev.Stacked) else "no stack of a rank was seen"
        yield f"there is no sign of progress, and {where}"
    lines = state.all(ev.ErrorLine)
    if state.all(ev.Moving) and not state.went_wrong and not lines:
        yield "the log ends while the job makes progress, so it is unknown whether it continued, ended or hung"
    if lines:
        more = f" (and {len(lines) - 1} more such lines)" if len(lines) > 1 else ""
        yield f"the log has an error that ddpdoctor does not know{more}, and no other failure: {words.quote(lines[-1])}"
    yield "no failure was found, but nothing shows that the job succeeded"


for code, kind in {
    "DD601": "stuck", "DD602": "mismatch", "DD603": "early-exit", "DD604": "crash", "DD605": "killed",
    "DD606": "stopped", "DD607": "missing", "DD608": "deadlock", "DD611": "transport",
}.items():  # fmt: skip

    @also(code)
    def check(state: RunState, kind: str = kind) -> Answer:
        ruling = state.ruling
        if ruling.kind == kind and ruling.problem is not None:
            return judged([ruling.problem])
        return passed() if not ruling.kind and not ruling.reason else skipped(ruling.kind or "the cause is unknown")


@rule("DD613", "cannot-tell", Severity.INFO, "The evidence does not show the cause")
def check_sufficient(state: RunState) -> Answer:
    """Say that the cause cannot be told from what was given, and what to collect."""
    ruling, lacking = state.ruling, state.evidence.lacking()
    more = [f"and {len(lacking) - MOST_REASONS} more reasons"] if len(lacking) > MOST_REASONS else []
    refused = (one.words(ranks) for one, ranks in state.refusals())
    notes = list(dict.fromkeys([*refused, *(fact.words for fact in state.all(ev.Hint) if fact.words)]))
    read = (*lacking[:MOST_REASONS], *more, *notes[:MOST_REASONS])
    return unknown("; ".join([ruling.reason, *ruling.collect, *read])) if ruling.reason else passed("; ".join(read))
