"""Decides what the evidence of a run shows: one cause, or what is missing to name it.

The stronger source wins: an error of a rank itself or a line of the kernel, then calls that differ, then a circle,
then who is absent where others wait, then the network, then "all are inside". A cause that may lie with
unseen ranks is not a verdict.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.known_errors import ONLY_LOCAL
from ddpdoctor.model.words import name_list, rank_list, verb
from ddpdoctor.rules.answers import Answer, judged, passed, skipped, unknown
from ddpdoctor.rules.logs import words
from ddpdoctor.rules.logs.calls import WAITS, innermost
from ddpdoctor.rules.logs.state import Ruling, RunState, find_roots, last_samples, lost_by, precedes
from ddpdoctor.rules.progress.states import place_words
from ddpdoctor.rules.registry import also, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.rules.logs.state import Root


_SET_INTERFACE = "set NCCL_SOCKET_IFNAME on that host to an interface on the shared network (ip -br address)"
ALL_RANKS = "all ranks"  # what RAS's reader calls the communicator that has all ranks
_TELLING = frozenset({"ras-ahead", "ras-unnamed", "damaged"})  # notes that say why the cause cannot be told
# What only such errors say, with a quote of one.
_ONLY_SAID = {
    lf.Nature.PEER_LOST: "the evidence only has errors of ranks that lost another rank, not the failure itself",
    lf.Nature.TIMED_OUT: "a wait for other ranks timed out, but the evidence does not show which ones: {}",
    lf.Nature.STOPPED: "processes were told to stop, but the evidence does not show why: {}",
    lf.Nature.FOLLOWS: "the evidence only has reports of a failure, not the failure itself: {}",
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


def find_absent(state: RunState) -> Ruling | None:
    """Return a ruling about absent ranks. If sources contradict each other, the strongest counts."""
    absent = [(fact.who.rank, fact) for fact in state.all[lf.Absent] if fact.who.rank is not None]
    if not absent:
        return None
    samples = last_samples(state.facts)
    roots = [(rank, fact) for rank, fact in absent if not _is_waiting(state, rank, fact, samples.get(rank))] or absent
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
        reason = f"others wait for {rank_list(ranks)}, which the evidence does not cover, so the cause is unknown"
        return Ruling(reason=reason, collect=words.collect(state))
    elsewhere = {lf.Doing.OWN, lf.Doing.DATA, lf.Doing.EXIT}
    ranks = [rank for rank in ranks if rank in samples and samples[rank].doing in elsewhere] or ranks
    those = [fact for rank, fact in absent if rank in ranks]
    if all(fact.moves for fact in those):
        at = "; ".join(place_words(innermost(samples[rank].frames)) for rank in ranks if rank in samples)
        waits = f"others wait for {words.who_words(state, ranks)}, which moved between the samples ({at})"
        return Ruling(reason=f"{waits}: it may just be slow, or in an endless loop", collect=(words.SAMPLE_AGAIN,))
    weaker = [fact for rank, fact in roots if rank in others and not set(fact.waiters).isdisjoint(ranks)]
    absence = words.Absence(state, ranks, those, doubted=bool(weaker))
    return Ruling(kind=absence.kind, problem=absence.problem(weaker))


def _is_waiting(state: RunState, rank: int, absent: lf.Absent, sample: lf.Stacked | None) -> bool:
    """Return whether an absent rank waits elsewhere for others."""
    if sample is not None:
        return sample.doing in WAITS
    # NCCL may not have launched what torch waits for: the device has not come to it.
    of_all = absent.shown is lf.Shown.COUNTS and absent.operation.group_words == ALL_RANKS
    waits = (fact for fact in state.of(rank, lf.Waiting) if not fact.in_init)
    return any(not (of_all and fact.timed_out and not fact.operation.group) for fact in waits)


def decide(state: RunState) -> Ruling:
    """Return what the evidence of a run shows."""
    if (state.all[lf.Finished] or state.moves) and not state.went_wrong:
        return Ruling()
    roots = find_roots(state)
    differ = [fact for fact in state.all[lf.Differ] if fact.certain]
    # A failure counts first if it came before ranks called different operations, and in the user's own code.
    first = roots[0].failed if roots else []
    own = (
        any(failure.operation is None and any(frame.user for frame in failure.frames) for failure in first) or not first
    )
    older = roots and own and not any(precedes(report, fact) for report in differ for fact in roots[0].facts)
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
    return ruling or Ruling(reason=next(_unsure_reasons(state)), collect=words.collect(state))


def _rulings(state: RunState, roots: list[Root]) -> Iterator[Ruling]:
    """Yield what the evidence may amount to, if no failure stands out and no calls surely differ: the strongest first.

    Of several ranks that aborted without a word, all but one are victims for sure, and the one may be elsewhere. An
    error whose line stands alone, and which may report any other, comes late.
    """
    last = {fact.who.rank: fact for fact in state.all[lf.ProcessState] if fact.who.rank is not None}
    frozen = [rank for rank, fact in last.items() if fact.letter in _FROZEN]
    if frozen and len(frozen) < len(last):
        yield Ruling(kind="stopped", problem=words.frozen(state, frozen))
    if circles := state.all[lf.Circle]:
        yield Ruling(kind="deadlock", problem=words.circle(state, circles))
    root, absent = roots[0] if roots else None, find_absent(state)
    alone = root is not None and root.is_alone
    if absent is not None:
        absence = absent.problem if absent.problem is not None and len(absent.problem.ranks) == 1 else None
        if root is not None and alone and not root.is_vague and not root.ranks and absence is not None:
            root.ranks |= set(absence.ranks)
            problem = words.failure(state, root, roots[1:], killed=False)
            waited = f"its line names no rank; {absence.summary}"
            yield Ruling(kind="crash", problem=replace(problem, evidence=(*problem.evidence, waited)))
        yield absent
    if differ := [fact for fact in state.all[lf.Differ] if not fact.certain]:
        yield Ruling(kind="mismatch", problem=words.mismatch(state, differ))
    killed = root is not None and any(process.signal for process in root.exited) and not root.failed
    if root is not None and (not root.is_vague if alone else not killed or len(roots) == 1):
        ended = killed and not alone
        problem = words.failure(state, root, roots[1:], killed=ended)
        yield Ruling(kind="killed" if ended else "crash", problem=problem)
    yield from _network_rulings(state)
    if root is not None and alone:
        yield Ruling(kind="crash", problem=words.failure(state, root, roots[1:], killed=False))
    stopped, inside = state.all[lf.Stopped], state.all[lf.Inside]
    if stopped and not inside and not any(fact.timed_out for fact in state.all[lf.Waiting]):
        yield Ruling(kind="killed", problem=words.stopped(state, stopped))
    if whole := [fact for fact in inside if fact.complete]:
        yield Ruling(kind="transport", problem=words.inside(state, whole))
    lost = lost_by(state)
    if lost is not None and len(lost.facts) > 1:
        yield Ruling(kind="crash", problem=words.lost(state, lost))


def _network_rulings(state: RunState) -> Iterator[Ruling]:
    """Yield that hosts gave NCCL an address that leads only to themselves, or that connections failed."""
    addresses = {fact.who.host: fact.who.address for fact in state.facts if fact.who.host and fact.who.address}
    alone = {host: address for host, address in addresses.items() if address.startswith(ONLY_LOCAL)}
    waits = [fact for fact in state.all[lf.Waiting] if fact.in_init]
    links = [fact for fact in state.all[lf.Link] if not fact.victim]
    own = [fact for fact in links if fact.to.address in alone.values()]
    if alone and len(addresses) > 1 and len(own) == len(links) and (waits or own):
        hosts, shown = tuple(sorted(alone)), name_list(sorted(set(alone.values())))
        what = f"uses the address {shown}, which other hosts cannot reach: the wrong network interface"
        summary, said, sure = f"NCCL on {name_list(hosts)} {what}", words.quotes([*own, *waits]), Confidence.MEDIUM
        problem = words.problem(state, summary, said, confidence=sure, hosts=hosts, fix=_SET_INTERFACE)
        yield Ruling(kind="transport", problem=problem)
    if links:
        yield Ruling(kind="transport", problem=words.link(state, links))


def _unsure_reasons(state: RunState) -> Iterator[str]:
    """Yield why the evidence does not name a cause, the most exact first."""
    hints = state.all[lf.Hint]
    yield from (fact.words for fact in hints if fact.kind in _TELLING)
    if waiting := state.waiting:
        lacking = f"; evidence is missing from {rank_list(state.unseen)}" if state.unseen else ""
        yield f"{rank_list(waiting)} waited for other ranks, but the evidence does not show which ones{lacking}"
    yield from (fact.words for fact in hints if fact.kind == "told-to-dump")
    stuck = [fact for fact in hints if fact.kind == "watchdog-stuck"]
    ranks = sorted({fact.who.rank for fact in stuck if fact.who.rank is not None})
    yield from (f"{rank_list(ranks)}: {fact.words}" if ranks else fact.words for fact in stuck[:1])
    failed = {fact.nature: fact for fact in reversed(state.all[lf.Failed])}
    yield from (said.format(words.quote(failed[nature])) for nature, said in _ONLY_SAID.items() if nature in failed)
    if state.all[lf.Link]:
        yield "the evidence only shows that the other side closed connections, not why"
    if state.all[lf.Exited]:
        yield "the evidence only shows that ranks were stopped, not why"
    samples = last_samples(state.facts)
    if samples and all(sample.doing is lf.Doing.DATA for sample in samples.values()):
        yield f"{rank_list(samples)} {verb(samples, 'waits', 'wait')} for workers of a DataLoader"
    if state.all[lf.ProcessState]:
        where = "no rank was seen to wait for another" if state.all[lf.Stacked] else "no stack of a rank was seen"
        yield f"no sign of progress, and {where}"
    lines = state.all[lf.ErrorLine]
    if state.all[lf.Moving] and not state.went_wrong and not lines:
        yield "the log ends while the job makes progress, so it is unknown whether it continued, ended or hung"
    if lines:
        more = f" (and {len(lines) - 1} more such lines)" if len(lines) > 1 else ""
        yield f"the log has an error unknown to ddpdoctor{more}, and no other failure: {words.quote(lines[-1])}"
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
    """Report that the given evidence does not show the cause, and what to collect."""
    ruling, lacking = state.ruling, state.logs.lacking()
    more = [f"and {len(lacking) - MOST_REASONS} more reasons"] if len(lacking) > MOST_REASONS else []
    refused = (refusal.words(ranks) for refusal, ranks in state.refusals())
    notes = list(dict.fromkeys([*refused, *(fact.words for fact in state.all[lf.Hint] if fact.words)]))
    read = (*lacking[:MOST_REASONS], *more, *notes[:MOST_REASONS])
    return unknown("; ".join([ruling.reason, *ruling.collect, *read])) if ruling.reason else passed("; ".join(read))
