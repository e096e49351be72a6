"""Reads stacks: py-spy's text and JSON, pystack's, faulthandler's, and the folders of torch's debug server."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.foreign_frames import foreign_frame
from ddpdoctor.evidence.lines import split_line
from ddpdoctor.evidence.reader import Found
from ddpdoctor.evidence.stack_meaning import doing_of, is_agent, is_worker, operation_of
from ddpdoctor.model.evidence import MOST_RANKS, Hint, Size, Spot, Stacked, Who
from ddpdoctor.model.stacks import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import Document
    from ddpdoctor.model.evidence import Fact

MOST_FRAMES = 400
"""Our choice: deeper stacks are recursion."""
_MOST_BETWEEN = 500
"""Our choice: after so many lines without a stack, a file that began with stacks goes on as a log."""
_PROCESS = re.compile(r"Process (\d+): (.*)")
_RANK_BLOCK = re.compile(r"=== Rank (\d+): (?:https?://(\[[^\]]+\]|[^:/\s]+))?.*===")
_LABEL = re.compile(r"[=#>*-][=#>* -]*[^()]{0,60}\brank[ _:=-]?(\d+)[^()]{0,60}$", re.IGNORECASE)
"""What people print between the stacks: "=== rank 3 ===", "==> rank3.txt <==", "# rank 3"."""
_LOCAL_RANK = re.compile(r"--local[-_]rank[= ](\d+)")
_ANSWERED = re.compile(r"PARTIAL DATA: \d{1,7}/(\d{1,7}) workers responded")
_LACKING = re.compile(r"\s+Rank (\d+): (Timeout|ConnectionError|\w*Error|\w*Exception)")
_THREADS = (
    re.compile(r'Thread (?P<id>\d+|0x[0-9a-fA-F]+) \((?P<state>[a-z+]+)\)(?:: "(?P<name>[^"]*)")?'),  # py-spy
    re.compile(
        r"(?:Current thread|Thread) 0x(?P<hex>[0-9a-fA-F]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):"
    ),
    re.compile(
        r"Traceback for thread (?P<id>\d+) \((?P<name>[^)]*)\) \[(?P<state>[^\]]*)\] \(most recent call last\):"
    ),
)
_LAST_FIRST = 2
"""The place of the format, pystack's, whose frames come outermost first."""
_FRAMES = (
    re.compile(r'\s+(?:\(Python\) )?File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)'),
    re.compile(r"\s{1,7}(?P<function>\S.*?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)\s*$"),  # locals stand deeper
    re.compile(r'\s+\(C\) File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.+)'),
)


@dataclass(slots=True)
class _Thread:
    name: str
    id: int | None
    state: str
    outermost_first: bool
    frames: list[Frame] = field(default_factory=list)

    def add(self, frame: Frame) -> None:
        if len(self.frames) < MOST_FRAMES:
            self.frames.append(frame)

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The frames, outermost first."""
        return tuple(self.frames if self.outermost_first else reversed(self.frames))


@dataclass(slots=True)
class _Process:
    """One look at one process."""

    who: Who
    line: int
    threads: list[_Thread] = field(default_factory=list)
    parent: int | None = None

    def main_thread(self) -> _Thread | None:
        """Return the main thread: by its name or id, else the one that runs a script, else the last."""
        there = [thread for thread in self.threads if thread.frames]
        for thread in there:
            if thread.name == "MainThread" or (thread.id is not None and thread.id == self.who.pid):
                return thread
        scripts = [thread for thread in there if thread.stack[0].function == "<module>"]
        return next(iter((scripts or there)[-1:]), None)


class StackReader:
    """Reads files of stacks in text form. Several processes, and several looks at them, may stand in one file."""

    name = "stacks"

    def recognizes(self, head: bytes) -> bool:
        """Return whether the file begins with a process and its threads, or with blocks of the debug server."""
        if b"Fatal Python error: " in head:
            return False  # the end of a rank, in its log
        text = head[:8192].decode("utf-8", "replace")
        lines = [split_line(raw, 1, "").text for raw in text.split("\n")[:200]]
        if any(_RANK_BLOCK.match(line) for line in lines):
            return True
        if any(map(_PROCESS.match, lines)) and any(line.startswith("Python v") for line in lines):
            return True
        threads = sum(any(pattern.match(line) for pattern in _THREADS) for line in lines)
        frames = sum(any(pattern.match(line) for pattern in _FRAMES) for line in lines)
        full = [line for line in lines if line.strip()]
        return threads > 0 and frames > 0 and 2 * (threads + frames) > len(full) - 6

    def read(self, document: Document) -> Found:
        """Return the main thread of each process."""
        processes, facts, lines = _parse(document)
        return Found(facts=[*facts, *_facts_of(processes, document.source)], log_from=lines + 1)


class JsonStackReader:
    """Reads the output of ``py-spy dump --json``."""

    name = "stacks"

    def recognizes(self, head: bytes) -> bool:
        """Return whether it is a list of threads with frames."""
        start = head.lstrip()[:4096]
        return start.startswith(b"[") and b'"thread_id"' in start and b'"frames"' in start

    def read(self, document: Document) -> Found:
        """Return the main thread of each process."""
        try:
            threads = json.loads(document.body)
            return Found(facts=list(stacks_of_json(threads, document.who, document.source)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return Found(problem=f"damaged ({type(error).__name__})")


def stacks_of_json(threads: list[dict[str, Any]], who: Who, source: str) -> list[Stacked]:
    """Return the stack of the main thread of each process in py-spy's JSON.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is damaged.
    """
    return _facts_of(_from_json(threads, who), source)


def _from_json(threads: list[dict[str, Any]], who: Who) -> list[_Process]:
    by_pid: dict[int, _Process] = {}
    for one in threads:
        pid = int(one["pid"])
        process = by_pid.setdefault(pid, _Process(replace(who, pid=pid), 1))
        state = ("active" if one.get("active") else "idle") + ("+gil" if one.get("owns_gil") else "")
        thread = _Thread(str(one.get("thread_name") or ""), one.get("os_thread_id"), state, outermost_first=False)
        for frame in one["frames"]:
            file = str(frame.get("short_filename") or frame["filename"])
            file = str(frame["filename"]) if "/" not in file else file
            thread.add(foreign_frame(file, int(frame.get("line") or 0), str(frame["name"])))
        process.threads.append(thread)
    return list(by_pid.values())


def _parse(document: Document) -> tuple[list[_Process], list[Fact], int]:
    """Return the processes, what else is said about ranks, and the number of the last line of the stacks."""
    processes: list[_Process] = []
    facts: list[Fact] = []
    current = _Process(document.who, 1)
    label = document.who
    last = 0
    text = io.TextIOWrapper(io.BytesIO(document.body), "utf-8", "replace", newline="\n")
    for number, raw in enumerate(text, 1):
        if number - last > _MOST_BETWEEN:
            break
        line = split_line(raw, number, document.source, document.who).text.rstrip()
        if match := _RANK_BLOCK.match(line) or _LABEL.match(line):
            label = replace(document.who, rank=_rank(match[1]), host=_host(match))
            current = _begin(processes, current, label, number)
        elif match := _PROCESS.match(line):
            current = _begin(processes, current, _named(label, match), number)
        elif match := _ANSWERED.match(line):
            facts.append(Size(spot=Spot(source=document.source, line=number), ranks=int(match[1])))
        elif match := _LACKING.match(line):
            facts.append(_lacking(match, document.source, number))
        elif line.startswith("Parent Process ") and line[15:].partition(":")[0].isdigit():
            current.parent = int(line[15:].partition(":")[0])
        elif not _read_line(current, line):
            continue
        last = number
    _begin(processes, current, label, 0)
    return processes, facts, last


def _begin(processes: list[_Process], current: _Process, who: Who, number: int) -> _Process:
    if current.threads:
        processes.append(current)
    return _Process(who, number)


def _named(label: Who, match: re.Match[str]) -> Who:
    local = _LOCAL_RANK.search(match[2])
    return replace(label, pid=int(match[1]), local_rank=int(local[1]) if local else label.local_rank)


def _rank(digits: str) -> int | None:
    return int(digits) if int(digits[:9]) < MOST_RANKS else None


def _host(match: re.Match[str]) -> str:
    host = match.groups()[1] if len(match.groups()) > 1 else ""
    return host if host and host not in {"localhost", "127.0.0.1"} else ""


def _lacking(match: re.Match[str], source: str, number: int) -> Hint:
    why = "its GIL is held" if match[2] == "Timeout" else "it is dead"
    rank = int(match[1])
    words = f"rank {rank} did not answer torch's debug server ({match[2]}): {why}"
    return Hint(who=Who(rank=rank), spot=Spot(source=source, line=number), words=words, kind="no-answer")


def _read_line(process: _Process, line: str) -> bool:
    """Take a line of a thread or a frame; return whether it is one."""
    for place, pattern in enumerate(_THREADS):
        if match := pattern.match(line):
            named = match.groupdict()
            digits = named.get("id") or ""
            thread = int(digits) if digits.isdigit() else None
            state = named.get("state") or ""
            process.threads.append(_Thread(named.get("name") or "", thread, state, place == _LAST_FIRST))
            return True
    match = next((found for pattern in _FRAMES if (found := pattern.match(line))), None)
    if match is not None and process.threads:
        process.threads[-1].add(_frame(match["file"], match["line"], match["function"].strip()))
    return match is not None


def _frame(file: str, line: str | None, function: str) -> Frame:
    """Return a frame. One of a library in C has no line, and is nobody's own code."""
    if line is None:
        return Frame(file=file, line=0, function=function, user=False)
    return foreign_frame(file, int(line), function)


def _facts_of(processes: Iterable[_Process], source: str) -> list[Stacked]:
    """Return the stacks of ranks' main threads. A process without a name of its own is numbered by its pid."""
    found = []
    those = [process for process in processes if not _is_of_launcher(process)]
    pids = {process.who.pid for process in those}
    order = _pid_order(those)
    for process in those:
        thread = process.main_thread()
        if thread is None:
            continue
        stack = thread.stack
        who = replace(process.who, rank=order.get(process.who.pid, process.who.rank))
        found.append(
            Stacked(
                who=who,
                spot=Spot(source=source, line=process.line),
                doing=doing_of(stack),
                frames=stack,
                state=thread.state,
                operation=operation_of(stack),
                worker=is_worker(stack) or (process.parent is not None and process.parent in pids),
            )
        )
    return found


def _is_of_launcher(process: _Process) -> bool:
    thread = process.main_thread()
    return thread is not None and is_agent(thread.stack)


def _pid_order(processes: Iterable[_Process]) -> dict[int | None, int]:
    """Return ranks by pid if no process in the file is named: a launcher starts ranks in order."""
    own = [one for one in processes if (thread := one.main_thread()) is not None and not is_worker(thread.stack)]
    pids = sorted({process.who.pid for process in own if process.who.pid is not None})
    named = any(one.who.rank is not None or one.who.local_rank is not None for one in own)
    return {} if named or len(pids) < 2 else {pid: at for at, pid in enumerate(pids)}
