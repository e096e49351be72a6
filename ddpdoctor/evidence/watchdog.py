"""ProcessGroupNCCL's watchdog: time limits, how far a rank has come, stacks of collectives. torch 2.0 to 2.15.

The texts are those of ProcessGroupNCCL.cpp of each release, and of nccl2's. "[Rank 2]" in them is a rank in a group:
the one that made the process's first work. "[rank2]:" before them is the global rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.errors import classify, named_cause, numbers
from ddpdoctor.evidence.lines import begins_run, origin_of, quote
from ddpdoctor.evidence.stacks import foreign_frame
from ddpdoctor.model.evidence import (
    MOST_RANKS,
    Absent,
    Differ,
    Failed,
    Hint,
    Link,
    Nature,
    Operation,
    Reached,
    Seen,
    Shown,
    Size,
    Waiting,
    Who,
)  # fmt: skip
from ddpdoctor.model.words import op_type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from ddpdoctor.evidence.lines import Line
    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.stacks import Frame

# Finds the rank and the process group in a line of ProcessGroupNCCL

DEFAULT_GROUP = "default_pg"  # torch's name for the default group
_GROUP = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<name>[^\s(\]]{1,200}?)\s?(?:\((?P<desc>[^)]{0,200})\))? Rank (?P<rank>\d{1,9})\]"
)
# The same for nccl2.
_GROUP2 = re.compile(r"\[TC\](?:\[rank=(?P<rank>-?\d{1,9})\])?(?:\[name=(?P<name>[^\]]{0,200})\])?")
_RANK = re.compile(r"\[Rank (\d{1,9})\]")


@dataclass(frozen=True, slots=True)
class NcclGroup:
    """A group as a line names it, and the rank of the writer in it."""

    key: str
    words: str
    rank: int | None


def group_of(text: str) -> NcclGroup | None:
    """Return the group that a head names, or None."""
    match = _GROUP.search(text) or _GROUP2.search(text)
    if match is None:
        return None
    fields = match.groupdict()
    name, desc = fields["name"] or "", fields.get("desc") or ""
    rank = int(fields["rank"]) if fields["rank"] is not None and 0 <= int(fields["rank"]) < MOST_RANKS else None
    if DEFAULT_GROUP in {desc, name} or (name == "0" and not desc):
        return NcclGroup("", DEFAULT_GROUP, rank)
    kind = "PG GUID" if "PG GUID" in match[0] else "PG" if name else ""
    return NcclGroup(name, f"{kind} {name} ({desc})" if desc else f"{kind} {name}".strip(), rank)


def writer_of(line: Line, group: NcclGroup | None) -> Hashable:
    """Return an identity of the writing process: its global rank, or else its rank in some group."""
    if line.who.rank is not None:
        return line.who.rank
    spoken = _RANK.search(line.text)
    rank = int(spoken[1]) if spoken is not None else group.rank if group is not None else None
    return (line.stream, rank)


def who_of(line: Line, group: NcclGroup | None) -> Who:
    """Return the rank that a line is about. The rank in the default group is the global rank."""
    who = line.who
    if group is not None:
        rank = group.rank if who.rank is None and group.words == DEFAULT_GROUP else who.rank
        return replace(who, rank=rank, group=group.key, group_rank=group.rank)
    spoken = _RANK.search(line.text)
    if who.rank is None and spoken is not None and int(spoken[1]) < MOST_RANKS:
        return replace(who, group_rank=int(spoken[1]))
    return who


# Reads single lines of ProcessGroupNCCL: dump signals, a stuck watchdog, a lost store


# A larger number is that of memory that was never set, as torch 2.3 prints it for a group that completed nothing.
MOST_WORKS = 10**9
_DUMP = re.compile(
    r"Received a dump signal due to a collective timeout from .{0,600}?"
    r"Last enqueued NCCL work: (?P<enqueued>-?\d{1,20}).{1,120}?last completed NCCL work: (?P<completed>-?\d{1,20})"
)
_SOURCE = re.compile(r"due to a collective timeout from {1,2}rank (?P<rank>\d{1,9})\b")
_OPTIONS = re.compile(
    r"initialization options: ?size: (?P<size>\d{1,9}), global rank: (?P<rank>\d{1,9})"
    r"(?:.{0,400}?PG Name: (?P<name>[^\s,]{1,200}))?"
)
_NO_GIL = "Could not acquire GIL within"
_STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d{1,9}) seconds|Heartbeat monitor timed out!")


def work_number(digits: str | None) -> int | None:
    """Return a number of a work; 0 for none yet (-1), None for memory that was never set."""
    if digits is None or abs(int(digits)) > MOST_WORKS:
        return None
    return max(int(digits), 0)


def _dump_signal(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    """Read how far the default group has come: the numbers are its own, whatever group timed out."""
    numbers = _DUMP.search(line.text)
    if numbers is None:
        return _seen(line, group)
    who = replace(who_of(line, group), group="", group_rank=None)
    enqueued, completed = work_number(numbers["enqueued"]), work_number(numbers["completed"])
    source = _SOURCE.search(line.text)
    found: list[Fact] = [
        Reached(
            group_words=DEFAULT_GROUP, enqueued=enqueued, completed=completed,
            told_by=int(source["rank"]) if source is not None else None, **origin_of(line, who),
        )
    ]  # fmt: skip
    if "from this local rank" in line.text:
        found.append(Waiting(operation=Operation(), timed_out=True, **origin_of(line, who)))
    elif source is not None:
        words = f"rank {source['rank']} ran into the time limit of a collective, as other ranks were told"
        found.append(Hint(words=words, kind="told-to-dump", **origin_of(line, who)))
    return found


def _options(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    """Read which rank starts a group, and how many ranks the group has."""
    options = _OPTIONS.search(line.text)
    if options is None or not int(options["rank"]) < MOST_RANKS or not 0 < int(options["size"]) <= MOST_RANKS:
        return _seen(line, group)
    is_default = options["name"] in {"0", DEFAULT_GROUP} if options["name"] else group is None or not group.key
    key = "" if is_default else options["name"] or (group.key if group is not None else "")
    who = replace(who_of(line, group), rank=int(options["rank"]), group="", group_rank=None)
    return [
        Seen(**origin_of(line, who)),
        Size(ranks=int(options["size"]), group=key, **origin_of(line, replace(who, rank=None))),
    ]


def _stuck(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    common = origin_of(line, who_of(line, group))
    if _NO_GIL in line.text:
        return [Hint(words="a thread held the GIL when torch wanted to end the process", kind="gil", **common)]
    stuck = _STUCK.search(line.text)
    if stuck is None:
        return ()
    long = f" for {stuck['seconds']} s" if stuck["seconds"] else ""
    words = f"torch's watchdog thread was stuck{long}: a call of CUDA or NCCL does not return, or the GIL is held"
    return [Hint(words=words, kind="watchdog-stuck", **common)]


def _store_gone(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    problem = "the job's store did not answer any more: the process that serves it, rank 0 or its agent, had ended"
    fix = "look for what ended rank 0 and its launcher first"
    to = Who(rank=0)
    return [Link(to=to, problem=problem, fix=fix, victim=True, **origin_of(line, who_of(line, group)))]


def _failure(line: Line, group: NcclGroup | None, error: str | None = None) -> list[Failed]:
    error = line.text if error is None else error
    reading = classify("", error)
    return [Failed(
        **origin_of(line, who_of(line, group)), message=quote(error), nature=reading.nature, peers=reading.peers,
        type=next((kind for kind in ("CUDA error", "HIP error") if kind in error), "NCCL error"),
        peer_hosts=reading.peer_hosts, memory=reading.memory,
    )]  # fmt: skip


def _seen(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    return [Seen(**origin_of(line, who_of(line, group)))]


_NOTES: dict[str, Callable[[Line, NcclGroup | None], Iterable[Fact]]] = {
    "initialization options:": _options,
    "Received a dump signal": _dump_signal,
    "watchdog got stuck for": _stuck,
    "Heartbeat monitor timed out!": _stuck,
    _NO_GIL: _stuck,
    'Failed to check the "should dump" flag on TCPStore': _store_gone,
    'TCPStore check for dump key "': _store_gone,
    "Found key in store: NCCLABORTEDCOMM": _failure,  # what torch before 2.2 says of another rank
    "Observed flight recorder dump signal": _seen,
}

# The desync report of ProcessGroupNCCL (TORCH_NCCL_DESYNC_DEBUG, or TORCH_DISTRIBUTED_DEBUG=DETAIL). Group ranks

_RANKS = r"\[(?P<ranks>\d[\d, ]{0,100000})\]"
_BEGINS = re.compile(r"- \[(?P<rank>\d{1,9})\] Timeout at collective: (?P<op>\w{1,60}), #(?P<seq>\d{1,12})")
_NEVER = re.compile(rf"ranks {_RANKS} are the lagging ranks that caused this timeout")
_INSIDE = re.compile(rf"{_RANKS} joined but didn't finish collective #(?P<seq>\d{{1,12}})")
_BEHIND = re.compile(
    rf"{_RANKS} finished collective #(?P<done>\d{{1,12}}), but didn't join collective #(?P<seq>\d{{1,12}})"
)
_NUMBER = re.compile(r"^\s*#(?P<seq>\d{1,12}) (?P<state>started|finished) ranks:")
_STATE = re.compile(rf"^\s*{_RANKS} (?P<state>started|finished) (?P<op>\w{{1,60}})")
_NEAR = 4  # a report belongs to a head with a group if it starts within this many lines
_MOST_REPORTS = 64
_LONGEST = 2000  # our choice: no report has this many lines, including lines of other processes in between


@dataclass(slots=True)
class _Report:
    rank: int
    operation: Operation
    line: Line
    seq: int = 0  # the number of the snapshot's part that is being read
    # The ranks inside an operation, by its number and name.
    started: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)


class DesyncReports:
    """Reads the reports of all ranks in one stream of lines."""

    def __init__(self) -> None:
        self.open: dict[Hashable, _Report] = {}
        self.group: tuple[int, str, str] = (-_NEAR, "", "")
        """The line of the last head with a group, and that group: a report begins in the next line."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        if "Timeout at collective: " in text and (begins := _BEGINS.search(text)) is not None:
            near = line.number - self.group[0] <= _NEAR
            key, words = self.group[1:] if near else ("", "")
            operation = Operation(
                op=op_type_name(begins["op"]), seq=int(begins["seq"]), group=key, group_words=words
            )  # fmt: skip
            found = self._close(line.stream)
            if len(self.open) < _MOST_REPORTS:
                self.open[line.stream] = _Report(int(begins["rank"]), operation, line)
            return found
        report = self.open.get(line.stream)
        if report is None:
            return ()
        own = report.operation
        if (never := _NEVER.search(text)) is not None:
            return _absent(line, report, never["ranks"], own)
        if (behind := _BEHIND.search(text)) is not None:
            seq = int(behind["seq"])  # only the operation in the report is known by name
            at = own if own.seq == seq else Operation(seq=seq, group=own.group, group_words=own.group_words)
            return _absent(line, report, behind["ranks"], at)
        if (inside := _INSIDE.search(text)) is not None:
            # Ranks inside the lowest number are suspects only if another has passed it.
            is_passed = own.seq is not None and int(inside["seq"]) < own.seq
            return _absent(line, report, inside["ranks"], own, certain=False) if is_passed else ()
        if (number := _NUMBER.search(text)) is not None:
            report.seq = int(number["seq"]) if number["state"] == "started" else 0
        elif (state := _STATE.search(text)) is not None:
            if report.seq and state["state"] == "started":
                report.started.setdefault(report.seq, {})[state["op"]] = numbers(state["ranks"])
        elif line.number - report.line.number > _LONGEST:
            return self._close(line.stream)
        return ()

    def end(self) -> Iterable[Fact]:
        """Return the facts of snapshots that the log cuts off."""
        return [fact for stream in list(self.open) for fact in self._close(stream)]

    def _close(self, stream: Hashable) -> list[Fact]:
        """Return in which calls the ranks of a snapshot differ."""
        report = self.open.pop(stream, None)
        if report is None:
            return []
        own, line = report.operation, report.line
        found: list[Fact] = []
        for seq, sides in report.started.items():
            ordered = sorted(sides.items(), key=lambda side: -len(side[1]))
            if len(ordered) < 2:
                continue
            is_plain = len(ordered[0][1]) > len(ordered[1][1])
            found.append(Differ(
                spot=line.spot(), time=line.time, said=quote(line.text),
                sides=tuple((ranks, replace(own, op=op_type_name(op), seq=seq)) for op, ranks in ordered),
                odd=tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks)) if is_plain else None,
                aspect="operation", settled=True,
            ))  # fmt: skip
        return found


def _absent(line: Line, report: _Report, ranks: str, operation: Operation, *, certain: bool = True) -> list[Fact]:
    own = report.operation
    waiters = (report.rank,) if not own.group else ()
    common: dict[str, Any] = {"spot": line.spot(), "time": line.time, "said": quote(line.text)}
    return [
        Absent(
            who=Who(rank=rank) if not own.group else Who(group=own.group, group_rank=rank),
            operation=operation, waiters=waiters, certain=certain, expected=True, shown=Shown.WORDS, **common,
        )
        for rank in numbers(ranks)
    ]  # fmt: skip


_MOST_OPEN = 20_000
_MOST_FRAMES = 200
_MOST_TRACES = 64
_TAIL_LINES = 8
_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d{1,20}), )?(?:OpType=(?P<op>\w{1,60})(?=[,)])|(?<=, )OpT?y?p?e?=?\w{0,60}$)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,200})\])?"
    r"(?:, NumelIn=(?P<numel_in>\d{1,20}), NumelOut=(?P<numel_out>\d{1,20})(?=[,)]))?"
    r"(?:, Timeout\(ms\)=(?P<limit>\d{1,20}))?"
)
_STATUS = re.compile(
    r"(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): (?P<seq>\d{1,20})"
    r".{1,40}?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,20})"
    r".{1,120}?last completed (?:NCCL )?work: (?P<completed>-?\d{1,20})"
)
_RAN = re.compile(r" ran for (?P<ran>\d{1,15}) milliseconds before timing out")
_FRAME = re.compile(r"^\s*#(?P<number>\d{1,4}) (?P<function>.{1,200}?) from (?P<file>.{1,1000}):(?P<line>\d{1,8})\s*$")
_DIED = re.compile(r"atchdog thread terminated with exception: (?P<error>.*)")
_ABORTED = re.compile(r"Aborting process on rank (?P<rank>\d{1,9}) due to (?P<error>.*)")
# What people write where they leave out lines.
_ELIDED = re.compile(
    r"\W*(?:\.{3,}|…|\. \. \.)\W*|\W*(?:\d{1,9} )?(?:more )?(?:lines? |logs? |output )?"
    r"(?:snip(?:ped)?|truncated|omitted|elided|skipped|cut(?: off)?)\W*|\W{2,}\d{0,9} ?(?:more )?lines\W{2,}",
    re.IGNORECASE,
)
_LONGEST_MARK = 60
_C10D = "torch/distributed/distributed_c10d.py"
_TIMED_OUT = ("Watchdog caught collective operation timeout", "timed out in blocking wait")

_COMMON = ("who", "spot", "time", "said")


@dataclass(slots=True)
class _Wait:
    """A wait that timed out. Later lines give its group and its stack."""

    fact: Waiting
    grouped: bool
    frames: list[Frame] = field(default_factory=list)

    @property
    def is_bare(self) -> bool:
        """Only the number of the operation is known."""
        return not self.fact.operation.op and self.fact.operation.seq is not None

    def done(self) -> Waiting:
        if not self.frames:
            return self.fact
        operation = self.fact.operation
        if any(one.function == "barrier" and one.file.endswith(_C10D) for one in self.frames):
            operation = replace(operation, made_by="barrier")
        return replace(self.fact, frames=tuple(reversed(self.frames)), operation=operation)


@dataclass(slots=True)
class _Tail:
    """An error of the watchdog, whose further lines say more about it."""

    fact: Failed
    left: int = _TAIL_LINES
    words: bool = False  # whether the next line has NCCL's message


class WatchdogReader:
    """Finds messages of ProcessGroupNCCL about collectives that do not end."""

    name = "NCCL watchdog"
    triggers = (b"NCCL", b"imeout")

    def __init__(self) -> None:
        self._open: dict[Hashable, list[_Wait]] = {}
        self._count = 0
        self._traces: list[tuple[Hashable, _Wait]] = []
        """The stacks that are being read, innermost frame first, by their streams: their lines have no prefix."""
        self._tail: _Tail | None = None
        self._said: set[Hashable] = set()
        self._desync = DesyncReports()

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        found: list[Fact] = []
        if len(text) < _LONGEST_MARK and _ELIDED.fullmatch(text):
            return [Hint(spot=line.spot(), words="the log lacks lines in its middle", kind="elided")]
        if self._traces and "#" in text and self._read_frame(line):
            return ()
        if self._tail is not None:
            found += self._read_tail(line)
        if (self._open or self._said or self._desync.open) and begins_run(text):
            return [*found, *self.end()]
        found += self._desync.read(line)
        if ("NCCL" in text or "atchdog" in text or "[TC]" in text) and " NCCL INFO " not in text:
            found += self._read_own(line)
        return found

    def end(self) -> Iterable[Fact]:
        """Return the facts that still wait for later lines."""
        found: list[Fact] = [self._tail.fact] if self._tail is not None else []
        found += [wait.done() for waits in self._open.values() for wait in waits]
        found += self._desync.end()
        self._open.clear()
        self._traces.clear()
        self._said.clear()
        self._count = 0
        self._tail = None
        return found

    def _read_own(self, line: Line) -> list[Fact]:
        text = line.text
        group = group_of(text)
        if group is not None:
            self._desync.group = (line.number, group.key, group.words)
        if any(words in text for words in _TIMED_OUT):
            last = "terminated with exception" in text or "Aborting process" in text
            return [*self._read_timeout(line, group), *(_end(line, group) if last else ())]
        if (status := _STATUS.search(text)) is not None:
            writer = writer_of(line, group)
            waits = self._open.get(writer, [])
            seq = work_number(status["seq"])
            wait = next((one for one in waits if one.fact.operation.seq == seq and not one.grouped), None)
            if wait is not None and group is not None:
                _join(wait, line, group)
            elif group is not None and line.who.rank is not None and (writer, seq) not in self._said:
                self._said.add((writer, seq))  # the line of the limit itself is lacking
                operation = Operation(seq=seq, group=group.key, group_words=group.words)
                limit = Waiting(**origin_of(line, who_of(line, group)), operation=operation, timed_out=True)
                self._open.setdefault(writer, []).append(_Wait(fact=limit, grouped=True))
                self._count += 1
            return self._reached(line, group, status)
        if (aborted := _ABORTED.search(text)) is not None:  # nccl2 ends a process: a time limit, or an error
            if "timeout" not in aborted["error"]:
                return [*_failure(line, group, aborted["error"])]
            if self._is_said(writer_of(line, group), Operation()):
                return _end(line, group)
            operation = Operation(group=group.key, group_words=group.words) if group is not None else Operation()
            limit = Waiting(**origin_of(line, who_of(line, group)), operation=operation, timed_out=True)
            return [limit, *_end(line, group)]
        notes = (read for words, read in _NOTES.items() if words in text)
        return self._read_end(line, group) or [fact for read in [*notes][:1] for fact in read(line, group)]

    def _read_end(self, line: Line, group: NcclGroup | None) -> list[Fact]:
        """Read the lines that complete a fact of earlier lines."""
        text = line.text
        if "Stack trace of the failed collective" in text:
            found = "not found" not in text
            writer = writer_of(line, group)
            # A line without any rank may continue the wait that was opened last in its stream.
            same = (one for one in reversed(self._open) if isinstance(one, tuple) and one[0] == line.stream)
            waits = self._open.get(writer) or self._open.get(next(same, None), [])
            wait = next((one for one in reversed(waits) if not one.frames), None)
            if found and wait is not None:
                self._traces = [*self._traces[-_MOST_TRACES:], (line.stream, wait)]
            return [] if found else self._close(writer, grouped_only=True)
        if "taking the entire process down" in text:
            return self._close(writer_of(line, group), grouped_only=True)
        if (died := _DIED.search(text)) is not None:  # an error that the watchdog found
            writer, error = writer_of(line, group), died["error"]
            closed = self._close(writer, grouped_only=True)
            if error.strip() and (writer, error) not in self._said:
                self._said.add((writer, error))
                self._tail = _Tail(_failure(line, group, error)[0])
            return closed
        return []

    # time limits

    def _read_timeout(self, line: Line, group: NcclGroup | None) -> list[Fact]:
        work = _WORK.search(line.text)
        writer = writer_of(line, group)
        if work is None and "NCCL operation timed out" not in line.text:
            return []  # cut off
        operation, limit_s = _operation(work)
        waits = self._open.get(writer, [])
        key = attrgetter("seq", "op", "numel_in", "numel_out")
        same = next((one for one in waits if key(one.fact.operation) == key(operation)), None)
        bare = next((one for one in waits if one.fact.operation.seq == operation.seq and one.is_bare), None)
        if bare is not None:
            known = bare.fact.operation
            operation = replace(operation, group=known.group, group_words=known.group_words)
            bare.fact = replace(bare.fact, operation=operation, limit_s=limit_s)
            return self._close(writer, only=bare) if "terminated with exception" in line.text else []
        if same is not None:
            if group is None or same.grouped:
                return []
            _join(same, line, group)
            return self._close(writer, only=same)
        if self._is_said(writer, operation):
            return []
        self._said.add((writer, operation.seq))
        ran = _RAN.search(line.text)
        fact = Waiting(
            **origin_of(line, who_of(line, group)),
            operation=operation, timed_out=True, limit_s=limit_s,
            ran_s=int(ran["ran"]) / 1000 if ran is not None else None,
        )  # fmt: skip
        wait = _Wait(fact=fact, grouped=group is not None)
        if group is not None:
            _join(wait, line, group)
        if work is None or "terminated with exception" in line.text:
            return [wait.fact]
        self._open.setdefault(writer, []).append(wait)
        self._count += 1
        return list(self.end()) if self._count > _MOST_OPEN else []

    def _is_said(self, writer: Hashable, operation: Operation) -> bool:
        """Return whether this fact is known: each error repeats the text of the previous one."""
        key = (writer, operation.seq, operation.op, operation.numel_in)
        known = key in self._said
        if len(self._said) > 10 * _MOST_OPEN:
            self._said.clear()
        self._said.add(key)
        return known

    def _reached(self, line: Line, group: NcclGroup | None, numbers: re.Match[str]) -> list[Fact]:
        key, words = (group.key, group.words) if group is not None else ("", "")
        enqueued, completed = work_number(numbers["enqueued"]), work_number(numbers["completed"])
        said = (writer_of(line, group), key, words, enqueued, completed)
        if said in self._said:
            return []
        self._said.add(said)
        return [
            Reached(
                **origin_of(line, who_of(line, group)),
                group=key, group_words=words, enqueued=enqueued, completed=completed,
            )
        ]  # fmt: skip

    def _close(self, writer: Hashable, *, only: _Wait | None = None, grouped_only: bool = False) -> list[Fact]:
        """Return the waits of a rank that are complete."""
        waits = self._open.get(writer, [])
        full = [one for one in waits if one.grouped and not one.is_bare] if grouped_only else waits
        done = [one for one in full if only is None or one is only]
        left = [one for one in waits if not any(one is other for other in done)]
        if left:
            self._open[writer] = left
        else:
            self._open.pop(writer, None)
        self._count -= len(done)
        self._traces = [trace for trace in self._traces if not any(trace[1] is one for one in done)]
        return [one.done() for one in done]

    # stacks

    def _read_frame(self, line: Line) -> bool:
        match = _FRAME.match(line.text)
        if match is None:
            return False
        number = int(match["number"])
        fitting = [(stream, wait) for stream, wait in self._traces if len(wait.frames) == number]
        own = [wait for stream, wait in fitting if stream == line.stream]
        wait = next(reversed(own or [wait for _, wait in fitting]), None)
        if wait is not None and number < _MOST_FRAMES:
            wait.frames.append(foreign_frame(match["file"], int(match["line"]), match["function"]))
        return True

    def _read_tail(self, line: Line) -> list[Fact]:
        """Read on: NCCL's own words follow "Last error:"."""
        tail = self._tail
        assert tail is not None
        text = line.text.strip()
        tail.left -= 1
        ends = text.startswith(("[", "frame #", "Exception raised from", "Traceback")) or not tail.left
        if ends:
            self._tail = None
            return [tail.fact]
        if (
            tail.words
            and (cause := named_cause(text, {name: getattr(tail.fact, name) for name in _COMMON})) is not None
        ):
            self._tail = None
            return [cause, replace(tail.fact, nature=Nature.FOLLOWS, peers=(), peer_hosts=())]
        tail.words = text.startswith("Last error:")
        if "NCCL" in tail.fact.type and text and "CUDA kernel" not in text:
            message = f"{tail.fact.message} {text}"
            reading = classify("", message)
            tail.fact = replace(
                tail.fact, message=quote(message), nature=reading.nature, memory=reading.memory,
                peers=reading.peers, peer_hosts=reading.peer_hosts,
            )  # fmt: skip
        return []


def _end(line: Line, group: NcclGroup | None) -> list[Fact]:
    """Return that the watchdog ends its process here: the last line that a rank writes."""
    return [Hint(words="", kind="watchdog-ended", **origin_of(line, who_of(line, group)))]


def _operation(work: re.Match[str] | None) -> tuple[Operation, float | None]:
    """Return the operation of a "WorkNCCL(…)", and its time limit in seconds."""
    if work is None:
        return Operation(), None
    shape = tuple(map(int, re.findall(r"\d+", work["shape"]))) if work["shape"] is not None else None
    operation = Operation(
        op=op_type_name(work["op"] or ""), seq=work_number(work["seq"]), shape=shape,
        numel_in=int(work["numel_in"]) if work["numel_in"] else None,
        numel_out=int(work["numel_out"]) if work["numel_out"] else None,
    )  # fmt: skip
    return operation, int(work["limit"]) / 1000 if work["limit"] else None


def _join(wait: _Wait, line: Line, group: NcclGroup) -> None:
    """Say in which group a wait is."""
    operation = replace(wait.fact.operation, group=group.key, group_words=group.words)
    who = replace(wait.fact.who, rank=who_of(line, group).rank, group=group.key, group_rank=group.rank)
    wait.fact, wait.grouped = replace(wait.fact, who=who, operation=operation), True
