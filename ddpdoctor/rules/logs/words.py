"""The sentences of findings from evidence: what is wrong, what shows it with file and line, and what to do."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.known_errors import SHM_FIX, find_known
from ddpdoctor.model.words import count_of, format_numbers, grouped, name_list, rank_list, verb
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.logs.calls import innermost
from ddpdoctor.rules.logs.state import last_samples, lost_by
from ddpdoctor.rules.progress.states import FINGERPRINTS, place_words, to_place
from ddpdoctor.rules.progress.words import calls_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpdoctor.model.known_errors import KnownError
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.logs.state import Lost, Root, RunState


EARLY = 3  # our choice: a job that fails at so low a number has not exchanged anything yet
_OTHERS = (
    "give the logs and flight recorder dumps of {those}: "
    "`ddpdoctor analyze LOGS... ~/.cache/torch/comm_lib_trace_rank_* /tmp/nccl_trace_rank_*` on every node"
)
_LOST = "give the log of {who} and the kernel log of its host: others lost their connection to it"
_RAS = "run `ncclras -v` twice, half a minute apart, while the job hangs (since NCCL 2.28.7: `ncclras -f json`)"
_OTHER_NODES = "run `ddpdoctor attach --folder DIR` on the nodes of {those}, then `ddpdoctor analyze` with all folders"
SAMPLE_AGAIN = "check again in a minute with `ddpdoctor attach` or py-spy: a rank that is just slow has moved by then"
_PENDING = (
    "with NCCL, stacks do not show which call a rank waits for in item() or synchronize(): next time use "
    "`ddpdoctor wrap`, or set TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/nccl_pipe_ TORCH_FR_BUFFER_SIZE=2000 (torch 2.15: "
    "and TORCH_DIST_USE_NCCL2=0), so that `ddpdoctor attach` can ask torch; or analyze the dumps of torch's timeout"
)
_RUNNING = "if the job is still running, run `ddpdoctor attach` on every node, or `py-spy dump --pid PID` for all ranks"
_WORKERS = "also take the stacks of the workers, twice: `py-spy dump --subprocesses --pid PID` for all ranks"
_FIRST = (
    "the first collectives never completed: start the job with NCCL_P2P_DISABLE=1; if that helps, disable PCIe ACS, "
    "and disable the IOMMU or set it to passthrough"
)
_NEWER = "torch 2.5 or newer records the group of each collective"
_INSIDE = (
    "collect on every node: `dmesg -T | grep -i xid`, `nvidia-smi -q`, while it hangs `ncclras -v` and "
    "`py-spy dump --native --pid PID` of all ranks, and a run with NCCL_DEBUG=INFO; "
    "test the links with `torchrun ... -m ddpdoctor allreduce-bench --pairs`"
)
_DUMPS = (
    "for the next run, set TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, "
    "so that each rank leaves a flight recorder dump"
)
KILLED = "`dmesg -T | grep -i kill` on the host, `sacct -j JOB -o JobID,State,ExitCode,MaxRSS`, `kubectl describe pod`"
_STDERR = "the standard error of each rank: `torchrun --redirects 3 --tee 3 ...`"


_STACKS = (
    "take the native stacks of all ranks twice, half a minute apart: `ddpdoctor attach`, or "
    "`py-spy dump --native --pid PID`; and the utilization of each GPU: `nvidia-smi`"
)
_OF_RAS = frozenset({"ras", "ras-ahead", "ras-unnamed", "damaged"})
MOST_QUOTES = 4
MOST_PLACES = 16
MOST_MESSAGE = 300
_VICTIM = "it may be a victim of another failure"  # for an end without a word
_MORE_MEMORY = "use less memory per rank (fewer loader workers, smaller batches), or raise the job's memory limit"
_LESS_DEVICE_MEMORY = "use less device memory: smaller batches, activation checkpointing, or sharded optimizer state"
_FULL = "; usually /dev/shm is full, or a mapped file was truncated"
_NATIVE = frozenset({"SIGSEGV", "SIGFPE", "SIGILL", "SIGABRT"})
_FIND_NATIVE = (
    "native code failed in a library or an extension: `python -X faulthandler` shows the line, and a core "
    "file (`ulimit -c unlimited`, gdb) shows the library"
)
_FIND_SENDER = f"find out who sent the signal: {KILLED}, the scheduler's log"
_KEEP_STDERR = (
    "save the standard error of that rank: `torchrun --redirects 3 --tee 3 ...`, or decorate main with @record"
)
_FIND_STOPPER = "find out who stopped it (a time limit, the scheduler, a user, another node's launcher): `sacct -j JOB`"
_SAME_CALLS = (
    "make the same calls with equal shapes and dtypes on all ranks; look for branches that depend on the rank or its "
    "data"
)
_SAME_ORDER = "call the collectives of all groups in the same order on all ranks; use batch_isend_irecv for exchanges"
_STOPS = {
    "time limit": ("time limit", "request more time, or save checkpoints and resume from them"),
    "preemption": ("preemption", "save checkpoints at the scheduler's warning signal, and requeue the job"),
    "requeue": ("requeue", "save checkpoints, and resume from them"),
    "SIGHUP": (
        "SIGHUP, because the terminal or ssh session that started it was closed",
        "start it in tmux or screen, with nohup and setsid, or as a batch job",
    ),
    "SIGINT": (
        "SIGINT (Ctrl-C)",
        "if it was stopped because it hung, next time run `ddpdoctor attach` before stopping it",
    ),
}
_STATES = {
    lf.Doing.OWN: "is in its own code", lf.Doing.DATA: "waits for a DataLoader worker", lf.Doing.EXIT: "is exiting",
    lf.Doing.INIT: "is in init_process_group", lf.Doing.DEVICE: "waits for its device",
    lf.Doing.COLLECTIVE: "waits for others", lf.Doing.UNKNOWN: "is elsewhere",
}  # fmt: skip
_FIND_END = f"find out what ended the process or its host: its standard error, {KILLED}"
_LET_IT_END = (
    "do this work once before the job (prepare the data set, fill the cache), or split it across all ranks; else raise "
    "the limit: `init_process_group(timeout=timedelta(hours=2))`"
)


def collect(state: RunState) -> tuple[str, ...]:
    """Return what to collect, as instructions, the most useful first."""
    if state.all[lf.Moving] and not state.went_wrong:
        return (_RUNNING,)  # nothing but how it went on is lacking
    known = [find_known(f"{failure.type}: {failure.message}") for failure in state.all[lf.Failed]]
    found = [error.fix for error in known if error is not None and error.nature == "follows"]
    found = list(dict.fromkeys([*found, *(refused.remedy for refused, _ in state.refusals() if refused.remedy)]))
    looked = bool(state.all[lf.ProcessState])
    unseen = state.unseen
    lost = lost_by(state)
    if lost is not None and lost.rank not in state.seen:
        found.append(_LOST.format(who=f"rank {lost.rank}" if lost.rank is not None else lost.host))
    whole = any(fact.complete for fact in state.all[lf.Inside])
    if unseen:
        found.append((_OTHER_NODES if looked else _OTHERS).format(those=f"the other ranks ({rank_list(unseen)})"))
    elif state.world is None and not whole:
        found.append(_OTHERS.format(those="all other ranks"))
    limits = [fact for fact in state.all[lf.Waiting] if fact.timed_out]
    numbered = [fact for fact in limits if fact.operation.seq is not None]
    lacking = (
        (whole or ((state.waiting or state.all[lf.Link]) and not unseen), _INSIDE),
        (any(fact.kind in _OF_RAS for fact in state.all[lf.Hint]), _RAS),
        (limits and not state.run.dumps, _DUMPS),
        (numbered and not any(fact.operation.group_words for fact in numbered), _NEWER),
        (numbered and all((fact.operation.seq or 0) < EARLY for fact in numbered), _FIRST),
        (any(fact.doing is lf.Doing.DATA for fact in state.all[lf.Stacked]), _WORKERS),
        (state.all[lf.Exited], _STDERR),
        (state.all[lf.Exited], KILLED),
        (state.all[lf.Stacked] and (whole or not looked), _STACKS),
        (not looked and not limits and not state.all[lf.Stacked], _RUNNING),
    )
    found += [text for lacks, text in lacking if lacks]
    return tuple(found) or ((SAMPLE_AGAIN, _PENDING) if looked else (_RUNNING,))


def quote(fact: lf.Fact) -> str:
    """Return a fact's place and text: "job.log:12: ..."."""
    line = f":{fact.spot.line}" if fact.spot.line is not None and fact.said else ""
    return f"{fact.spot.source}{line}" + (f": {FINGERPRINTS.sub('', fact.said)}" if fact.said else "")


def quotes(facts: Iterable[lf.Fact]) -> list[str]:
    found = list(dict.fromkeys(quote(fact) for fact in facts if fact.said))
    more = [f"... and {len(found) - MOST_QUOTES} more such lines"] if len(found) > MOST_QUOTES else []
    return found[:MOST_QUOTES] + more


def who_words(state: RunState, ranks: Iterable[int], hosts: Sequence[str] = ()) -> str:
    """Return "rank 5 on k02", "k02" or "a rank that the log does not name"."""
    numbers = sorted(set(ranks))
    if not numbers:
        return f"a process on {name_list(hosts)}" if hosts else "an unknown rank"
    names = state.hosts_of(numbers) or tuple(hosts)
    return rank_list(numbers) + (f" on {name_list(names)}" if names else "")


def places(ranks_frames: Iterable[tuple[int, Frame | None]]) -> tuple[Place, ...]:
    """Return one place for each rank whose line is known."""
    return tuple(
        to_place(rank, frame) for rank, frame in sorted(ranks_frames, key=lambda pair: pair[0]) if frame is not None
    )


def problem(state: RunState, summary: str, said: Iterable[str], *, ranks: Iterable[int] = (), **more: Any) -> Problem:
    """Return a problem of ranks on their hosts, unless ``more`` names others."""
    ranks, evidence = tuple(ranks), [*said]
    if state.world is not None and state.seen:  # of how many ranks there is evidence
        some = f"{len(state.seen)} of {state.world} ranks; missing: ranks {format_numbers(state.unseen)}"
        evidence.append(f"evidence from {some if state.unseen else f'all {state.world} ranks'}")
    fields: dict[str, Any] = {"hosts": state.hosts_of(ranks), **more}
    return Problem(summary=summary, ranks=ranks, evidence=tuple(evidence), **fields)


class Absence:
    """Ranks that did not reach where others wait, according to ``absent``."""

    def __init__(self, state: RunState, ranks: list[int], absent: Sequence[lf.Absent], *, doubted: bool) -> None:
        self.state, self.ranks, self.absent = state, ranks, absent
        self.samples = samples = last_samples(state.facts)
        self.kind = "stuck"  # what became of them
        exiting = all(rank in samples and samples[rank].doing is lf.Doing.EXIT for rank in ranks)
        if exiting or all(state.of(rank, lf.Finished) for rank in ranks):
            self.kind = "early-exit"
        elif all(any(fact.dead for fact in absent if fact.who.rank == rank) for rank in ranks):
            self.kind = "killed"
        elif all(fact.in_init for fact in absent) and not any(rank in samples for rank in ranks):
            self.kind = "missing"
        self.late = any(fact.late for fact in absent) and self.kind == "stuck"
        # It is sure only if the absent rank is seen elsewhere in two samples, and not if ranks were not seen.
        # RAS speaks for all ranks.
        counted = all(fact.shown is lf.Shown.COUNTS for fact in absent)
        self.sure = Confidence.HIGH if all(len(state.samples_of(rank)) > 1 for rank in ranks) else Confidence.MEDIUM
        if doubted or not all(fact.certain for fact in absent) or (state.unseen and not counted):
            self.sure = Confidence.LOW
        self.waiters = sorted({rank for fact in absent for rank in fact.waiters} - set(ranks)) or [
            rank for rank in state.waiting if rank not in ranks
        ]
        loading = [rank for rank in ranks if rank in samples and samples[rank].doing is lf.Doing.DATA]
        by_pid = {fact.who.pid: fact for rank in loading for fact in state.of(rank, lf.Stacked) if fact.worker}
        self.workers = list(by_pid.values())[:MOST_QUOTES]
        of_workers = places((fact.who.rank or 0, innermost(fact.frames)) for fact in self.workers)
        frames = [(rank, innermost(samples[rank].frames)) for rank in ranks if rank in samples]
        self.where = (*places(frames), *dict.fromkeys(of_workers))
        self.busy = next((fact.busy for fact in absent if fact.busy is not None), None)

    def problem(self, weaker: Sequence[lf.Absent]) -> Problem:
        more: dict[str, Any] = {"confidence": self.sure, "where": self.where, "fix": self._fix()}
        return problem(self.state, self._summary(), self._evidence(weaker), ranks=self.ranks, **more)

    def _summary(self) -> str:
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
            at = f'its last output is "{busy.task}{f" {busy.share} %" if busy.share is not None else ""}", and '
        did, perhaps = {
            "early-exit": ("exited before", "may have exited before"),
            "missing": ("never joined", "may not have joined"),
        }.get(self.kind, ("did not call", "may not have called"))
        if self.late:
            did, perhaps = "arrived too late for", "may have arrived too late for"
            wait = f"{rank_list(waiters) if waiters else 'other ranks'} had timed out waiting"
        target = "init_process_group" if self.absent[0].in_init else self.absent[0].operation.words()
        if self.sure is Confidence.LOW:
            return f"{who} {perhaps} {target}; {at}{wait}"
        return f"{who} {did} {target}; {at}{wait} for {them}"

    def _evidence(self, weaker: Sequence[lf.Absent]) -> Iterator[str]:
        """Yield what the ranks do, its source, the lines where the others wait, and how far the ranks got."""
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
        yield from quotes(fact for fact in state.all[lf.Waiting] if fact.who.rank in self.waiters)
        enqueued = {fact.who.rank: fact.frames for fact in state.all[lf.Waiting] if fact.frames}
        stacks = {rank: samples[rank].frames if rank in samples else enqueued.get(rank, ()) for rank in self.waiters}
        lines = grouped((place_words(innermost(frames)), rank) for rank, frames in stacks.items() if frames)
        for place, those in lines.items():
            yield f"{rank_list(those)} {verb(those, 'waits', 'wait')} {place}"
        reached = []
        done: dict[tuple[int | None, str], int] = {}
        for fact in state.all[lf.Reached]:
            key = (fact.who.rank, fact.group_words)
            done[key] = max(done.get(key, 0), fact.completed or 0)
        for fact in state.all[lf.Reached]:
            if fact.who.rank in self.ranks and fact.enqueued is not None:
                if (fact.completed or 0) < fact.enqueued <= done[fact.who.rank, fact.group_words]:
                    continue  # another source says that the rank has completed it
                group = f" of {fact.group_words}" if fact.group_words else ""
                reached.append(f"rank {fact.who.rank} had {fact.done_words()} collective #{fact.enqueued}{group}")
        yield from list(dict.fromkeys(reached))[:MOST_QUOTES]
        yield from steps_words(state)

    def _fix(self) -> str:
        who = rank_list(self.ranks)
        if self.kind == "killed":
            return _FIND_END
        if self.busy is not None and not self.where:
            return _LET_IT_END
        if self.late and not self.where:
            return (
                f"find out what {who} did before that call; if that has to take so long, raise the limit: "
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


def failure(state: RunState, root: Root, others: Sequence[Root], *, killed: bool) -> Problem:
    ranks = tuple(sorted(root.ranks))
    hosts = tuple(sorted(root.hosts)) or state.hosts_of(ranks)
    stacks = [failure.frames for failure in root.failed] + [process.frames for process in root.exited]
    frame = next((found for frames in stacks if (found := innermost(frames)) is not None), None)
    who = who_words(state, ranks, hosts)
    known = find_known(f"{root.failed[0].type}: {root.failed[0].message}") if root.failed else None
    victims = victim_words(state, ranks)
    said = [f"{known.means} (at fault: {known.fault})"] if known is not None else []
    said += [*quotes(root.facts), *_unsure_words(state, root), *steps_words(state), *victims]
    said += [f"later or unrelated: {quote(others[0].facts[0])}"] if others else []
    summary = _killed_words(root, who) if killed else _failed_words(root, who, frame)
    fix = _failure_fix(root, known, killed=killed, frame=frame, followed=bool(victims or others))
    sure, where = _sureness(state, root, others), places((rank, frame) for rank in ranks)
    return problem(state, summary, said, confidence=sure, ranks=ranks, hosts=hosts, where=where, fix=fix)


def _failed_words(root: Root, who: str, frame: Frame | None) -> str:
    if not root.failed:
        codes = sorted({process.code for process in root.exited if process.code is not None})
        troubles = "; ".join(dict.fromkeys(trouble.problem for trouble in root.troubles))
        status = f"exited with status {', '.join(map(str, codes))}, but the evidence does not show why: {_VICTIM}"
        return f"{who}: {troubles}" if troubles else f"{who} {status}"
    error = root.failed[0]
    at = f" {place_words(frame)}" if frame is not None else ""
    message = error.message.strip().splitlines()[0][:MOST_MESSAGE] if error.message.strip() else ""
    if error.alone and not root.exited:
        found = ": ".join(filter(None, (error.type, message)))
        return f"{who} reported an error: {found}" if root.ranks or root.hosts else f"the log has an error: {found}"
    worker = " in a worker of its DataLoader" if error.in_worker else ""
    raised = f"raised {error.type}" if error.type else "reported an error"
    return f"{who} {raised}{worker}{at}" + (f": {message}" if message else "")


def _killed_words(root: Root, who: str) -> str:
    signals = sorted({process.signal for process in root.exited if process.signal})
    lost = next((trouble for trouble in root.troubles if trouble.kind == "node-failure"), None)
    if lost is not None:
        return f"{who}: {lost.problem}"
    by = f" by {', '.join(signals)}" if signals else ""
    why = "; it ran out of memory" if root.memory else _FULL if signals == ["SIGBUS"] else ""
    if not root.is_plain:
        why = f"; {_VICTIM}: torch's watchdog ends ranks that waited too long this way"
    trouble = next((cause.problem for cause in root.troubles if cause.kind != "oom"), "")
    return f"{who} {'were' if len(root.ranks) > 1 else 'was'} killed{by}{why}" + (f"; {trouble}" if trouble else "")


def _sureness(state: RunState, root: Root, others: Sequence[Root]) -> Confidence:
    if not root.is_plain:
        return Confidence.MEDIUM if root.failed and root.exited and not root.is_vague else Confidence.LOW
    if (others and not root.is_first) or (root.failed and root.is_vague and find_known(root.failed[0].said)):
        return Confidence.MEDIUM
    if root.failed and not root.exited and not any(failure.frames for failure in root.failed) and len(state.seen) < 2:
        return Confidence.MEDIUM  # one line of a log that has more
    told = (root.ranks and not state.numbered_by) or (root.hosts and not root.ranks) or state.world == 1
    return Confidence.HIGH if told else Confidence.MEDIUM


def _unsure_words(state: RunState, root: Root) -> list[str]:
    """Report where a rank's number comes from, and what an error line alone does not show."""
    number = state.numbered_by if root.ranks else ""
    holds = "each task is one rank" if "task" in number else "all ranks are on one host"
    taken = [f"the rank was taken from {number}, which is right only if {holds}"] if number else []
    if not root.is_alone:
        return taken
    whose = "" if root.ranks else "whose error it is, "
    line = "no traceback and no exit status belong to this line"
    return [f"{line}, so {whose}where it was raised and whether it ended the job is unknown", *taken]


def _failure_fix(root: Root, known: KnownError | None, *, killed: bool, frame: Frame | None, followed: bool) -> str:
    if known is not None:
        return (
            f"{known.fix}; {KILLED}" if root.failed[0].in_worker and "Killed" in root.failed[0].message else known.fix
        )
    if root.memory:
        return _MORE_MEMORY if killed else _LESS_DEVICE_MEMORY
    fix = next((trouble.fix for trouble in root.troubles if trouble.fix), "")
    if not fix and any(process.signal == "SIGBUS" for process in root.exited):
        fix = SHM_FIX
    if fix or killed:
        native = any(process.signal in _NATIVE for process in root.exited)
        return fix or (_FIND_NATIVE if native else _FIND_SENDER)
    if root.failed and (root.is_alone or frame is None):
        return "look in the whole log for this line, for the traceback above it and for an earlier error of any rank"
    caused = "; it caused the errors of the other ranks" if followed else ""
    return f"fix the error {place_words(frame)}{caused}" if root.failed else _KEEP_STDERR


def victim_words(state: RunState, blamed: Iterable[int]) -> list[str]:
    words = {
        lf.Nature.PEER_LOST: "lost another rank",
        lf.Nature.TIMED_OUT: "timed out while waiting",
        lf.Nature.STOPPED: "was told to stop",
    }
    told = [(words[fact.nature], fact.who.rank) for fact in state.all[lf.Failed] if fact.nature in words]
    told += [(words[lf.Nature.TIMED_OUT], limit.who.rank) for limit in state.all[lf.Waiting] if limit.timed_out]
    spared = set(blamed)
    victims = grouped((did, rank) for did, rank in told if rank is not None and rank not in spared)
    return [f"{rank_list(ranks)} {did} as a consequence" for did, ranks in victims.items()]


def machine(state: RunState, root: Root) -> Problem:
    trouble = root.troubles[0]
    ranks, hosts = tuple(sorted(root.ranks)), tuple(sorted(root.hosts))
    where = f"{name_list(hosts)}: " if hosts else f"{rank_list(ranks)}: " if ranks else ""
    said, fix = quotes(root.facts), trouble.fix or "check the kernel log of that host: `dmesg -T`"
    more: dict[str, Any] = {"severity": Severity.ERROR, "confidence": Confidence.MEDIUM, "hosts": hosts, "fix": fix}
    return problem(state, where + trouble.problem, [*said, *victim_words(state, ranks)], ranks=ranks, **more)


def mismatch(state: RunState, differ: Sequence[lf.Differ]) -> Problem:
    sides = _joined_sides(differ)
    # The ranks of the minority, or of all sides if no side has more ranks than the next.
    most = len(sides[0][1]) if sides else 0
    minority = {rank for _, ranks in sides[1:] for rank in ranks} - set(sides[0][1] if sides else ())
    named = {rank for fact in differ for rank in fact.odd or ()}
    everyone = {rank for _, ranks in sides for rank in ranks}
    outvoted = minority if len(sides) > 1 and most > len(sides[1][1]) else everyone
    odd = tuple(sorted(named or outvoted))
    # That ranks differ is sure if all are certain. Who is wrong is not, if no side is blamed alone.
    by_world = state.world is not None and 2 * most > state.world
    settled = all(by_world if fact.settled is None else fact.settled for fact in differ)
    sure = Confidence.HIGH if settled else Confidence.LOW
    if not all(fact.certain for fact in differ):
        sure = Confidence.LOW
    elif not odd or len(odd) == sum(len(ranks) for _, ranks in sides):
        sure = Confidence.MEDIUM
    lines = {}
    for rank in odd[:MOST_PLACES]:  # where a rank waits or failed
        stacks = [fact.frames for fact in state.of(rank, lf.Stacked)]
        stacks += [fact.frames for fact in state.of(rank, lf.Waiting)]
        stacks += [fact.frames for fact in state.of(rank, lf.Failed)]
        lines[rank] = next((innermost(frames) for frames in stacks if frames), None)
    named_sides = [(what, rank_list(ranks) if ranks else "a rank") for what, ranks in sides]
    certain = sure is not Confidence.LOW or all(fact.certain for fact in differ)
    unsettled = sure is Confidence.LOW and certain
    doubt = f"; {rank_list(odd)} may be at fault, but too few ranks are known to tell" if unsettled else ""
    aspects = list(dict.fromkeys(fact.aspect for fact in differ if fact.aspect))
    differ_in = [f"they differ in: {', '.join(aspects)}"] if aspects else []
    summary = f"the ranks {'made' if certain else 'may have made'} different calls: "
    summary += "; ".join(f"{who}: {what}" for what, who in named_sides)
    if apart := calls_apart(named_sides):
        summary = f"the ranks {'disagree' if certain else 'may disagree'} about {apart}"
    said = (*quotes(differ), *differ_in, *victim_words(state, odd))
    where = places(lines.items())
    return problem(state, summary + doubt, said, confidence=sure, ranks=odd, where=where, fix=_SAME_CALLS)


def _joined_sides(differ: Sequence[lf.Differ]) -> list[tuple[str, list[int]]]:
    """Return each call with the ranks that made it, the one of most ranks first. Pairs of two ranks are joined.

    For one call of a rank, the most detailed source counts: a dump, not the watchdog's line.
    """
    made: dict[tuple[int | None, str, int | None], str] = {}
    for fact in differ:
        for numbers, operation in fact.sides:
            what = operation.words()
            if not what.startswith("barrier"):
                shape = f" of {list(operation.shape)}" if operation.shape is not None else ""
                count = f" of {operation.numel_in} elements" if operation.numel_in is not None and not shape else ""
                dtype = f" {operation.dtype}" if operation.dtype else ""
                backward = " in backward" if operation.made_by == "backward" else ""
                what = f"{what}{count}{shape}{dtype}{backward}"
            for rank in numbers or (None,):
                key = (rank, operation.group_words or operation.group, operation.seq)
                made[key] = max(made.get(key, ""), what, key=lambda text: (text.startswith("barrier"), len(text)))
    ranks: dict[str, set[int]] = defaultdict(set)
    for (rank, *_), what in made.items():
        ranks[what] |= set() if rank is None else {rank}
    return sorted(((what, sorted(those)) for what, those in ranks.items()), key=lambda side: (-len(side[1]), side[1]))


def circle(state: RunState, circles: Sequence[lf.Circle]) -> Problem:
    links = circles[0].links
    ranks = tuple(sorted({rank for circle in circles for link in circle.links for rank in (link[0], link[2])}))
    way = "; ".join(f"rank {rank} is waiting in {call.words()} for rank {other}" for rank, call, other in links[:6])
    summary = f"{rank_list(ranks)} are waiting for each other: {way}"
    return problem(state, summary, quotes(circles), confidence=Confidence.MEDIUM, ranks=ranks, fix=_SAME_ORDER)


def frozen(state: RunState, ranks: list[int]) -> Problem:
    samples = last_samples(state.facts)
    pids = sorted({fact.who.pid for rank in ranks for fact in state.of(rank, lf.ProcessState) if fact.who.pid})
    where = " ".join(map(str, pids)) if pids else "PID"
    others_wait = bool(set(state.waiting) - set(ranks)) or any(
        sample.doing is lf.Doing.COLLECTIVE for rank, sample in samples.items() if rank not in ranks
    )
    on = f" on {name_list(state.hosts_of(ranks))}" if pids and state.hosts_of(ranks) else ""
    summary = f"{who_words(state, ranks)}: the process is stopped (state T); the others are waiting for it"
    fix = f"continue it: `kill -CONT {where}`{on}; find out who stopped it: a debugger, Ctrl-Z, a suspended job"
    sure = Confidence.HIGH if others_wait else Confidence.MEDIUM
    lines = places((rank, innermost(samples[rank].frames)) for rank in ranks if rank in samples)
    return problem(state, summary, (), confidence=sure, ranks=ranks, where=lines, fix=fix)


def link(state: RunState, links: Sequence[lf.Link]) -> Problem:
    targets: dict[str, list[lf.Link]] = defaultdict(list)
    for link in links:
        far = state.host_of(link.to)
        targets[(link.who.host if link.local else far) or link.who.host].append(link)
    host, those = max(targets.items(), key=lambda item: len(item[1]))
    local = any(link.local for link in those)
    named = bool(host) and (local or len({link.who.host for link in those}) > 1)
    first, who = those[0], those[0].who
    speaker = who.host or who.address or (f"rank {who.rank}" if who.rank is not None else "a host")
    said, hosts = (*quotes(links), *victim_words(state, ())), (host,) if named else ()
    summary = f"{speaker}: {first.problem}"
    return problem(state, summary, said, confidence=Confidence.MEDIUM, hosts=hosts, fix=first.fix)


def lost(state: RunState, peer: Lost) -> Problem:
    ranks = (peer.rank,) if peer.rank is not None else ()
    hosts = (peer.host,) if peer.host else ()
    summary = (
        f"{who_words(state, ranks, hosts)} may have ended first: {len(peer.facts)} other processes lost their "
        "connection to it, and it reports no lost connection; the reason is unknown"
    )
    said, fix = (*quotes(peer.facts), *victim_words(state, ranks)), "; ".join(collect(state))
    return problem(state, summary, said, confidence=Confidence.LOW, ranks=ranks, hosts=hosts, fix=fix)


def stopped(state: RunState, facts: Sequence[lf.Stopped]) -> Problem:
    by, fix = _STOPS.get(facts[0].by, (facts[0].by, _FIND_STOPPER))
    summary = f"the job was stopped from outside: {by}; no earlier failure was found"
    return problem(state, summary, (*quotes(facts), *steps_words(state)), fix=fix)


def inside(state: RunState, facts: Sequence[lf.Inside]) -> Problem:
    call = facts[0]
    limits = quotes(fact for fact in state.all[lf.Waiting] if fact.timed_out)
    said = (*quotes(facts), *limits, "no rank is behind, so the faulty link or device is unknown")
    summary = (
        f"all {count_of(len(call.ranks), 'rank')} are in the same {call.operation.words()}, "
        "but it does not complete: the network or a rank's device may be at fault"
    )
    return problem(state, summary, said, confidence=Confidence.LOW, fix="; ".join(collect(state)))


def steps_words(state: RunState) -> list[str]:
    logged = [fact for fact in state.all[lf.Moving] if fact.step is not None]
    if not logged:
        return []
    last = max(logged, key=lambda fact: fact.step or 0)
    return [f"the last logged step: {last.step} ({quote(last)})"]
