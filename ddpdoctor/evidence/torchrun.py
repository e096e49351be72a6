"""torchrun: its table of failures, its agent's lines, and the error files of ``@record``.

The texts are those of torch/distributed/elastic, from torch 1.9 to 2.13. Each node prints a table of its own.
"""

from __future__ import annotations

import json
import re
from calendar import timegm
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.errors import classify
from ddpdoctor.evidence.lines import time_of
from ddpdoctor.evidence.reader import Document, Found, quote
from ddpdoctor.evidence.tracebacks import HEADER, RaisedText, failure_facts, read_traceback, traceback_facts
from ddpdoctor.model.evidence import (
    MOST_RANKS,
    Exited,
    Failed,
    Finished,
    Nature,
    Restarted,
    Spot,
    Stopped,
    Time,
    Who,
)  # fmt: skip
from ddpdoctor.model.facts import signal_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

# A shell or a container says 128 + N for signal N.
_SHELL_SIGNALS = {128 + number: number for number in (6, 7, 9, 11, 15)}
_MOST_LINES = 400
_MOST_TABLES = 4096
_GATE = ("elastic", "exitcode", "Failures:", "Root Cause")
# How the lines of a process in a table begin, after two blanks or, if all lines of a paste have them, none.
_FIELDS = frozenset({"time", "host", "rank", "exit"})
_BLOCK = re.compile(r"^\s*\[(\d{1,7})\]:\s*$")
_FIELD = re.compile(r"^\s*(?P<name>time|host|rank|exitcode|error_file|traceback|msg) {0,10}: ?(?P<value>.*)$")
_RANK = re.compile(r"(?P<rank>\d{1,9}) \(local_rank: (?P<local>\d{1,9})\)")
_CODE = re.compile(r"(?P<code>-?\d{1,9}) \(pid: (?P<pid>\d{1,9})\)")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)_(\d\d):(\d\d):(\d\d)")
_FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,9})\) local_rank: (?P<local>\d{1,9}) \(pid: (?P<pid>\d{1,9})\)"
)
_CLOSING = re.compile(
    r"(?:Sending process (?P<pid>\d{1,9}) closing signal|Closing process (?P<old>\d{1,9}) via signal)"
    r" (?:Signals\.)?(?P<signal>SIG\w+)"
)
_FORCED = re.compile(
    r"Unable to shutdown process (?P<pid>\d{1,9}) via .{1,40}?, forcefully exiting via (?:Signals\.)?(?P<signal>SIG\w+)"
)
_DEATH = re.compile(r"Received (?:Signals\.)?(?P<signal>SIG\w+|\d{1,2}) death signal")
_RESTARTS = re.compile(r"(?P<left>\d{1,6})/(?P<most>\d{1,6}) attempts left;\s+will restart worker group")
# What stands in place of a traceback.
_NOTHING = ("To enable traceback see", "Signal ", "Process failed with exitcode", "<N/A>", "<NONE>")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,120}): (?P<message>.*)", re.DOTALL)


@dataclass(slots=True)
class _Block:
    """One process in a table."""

    line: Line
    root: bool
    fields: dict[str, str] = field(default_factory=dict)
    message: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Table:
    root: bool = False
    block: _Block | None = None


class TorchrunReader:
    """Finds what torchrun's agent says about its ranks."""

    name = "torchrun"
    triggers = (b"elastic", b"xitcode", b"rror")

    def __init__(self) -> None:
        self._tables: dict[Hashable, _Table] = {}

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        table = self._tables.get(line.stream)
        if table is not None:
            return self._read_table(line, table)
        if (text[2:6] in _FIELDS or text[:4] in _FIELDS) and _FIELD.match(text) is not None:
            # The table of a paste that begins in its middle
            return self._read_table(line, self._open(line, _Table(block=_Block(line, root=False))))
        if not any(words in text for words in _GATE):
            return ()
        facts, title = _read_agent(line), text.strip().rstrip(":")
        if not facts and title in {"Failures", "Root Cause", "Root Cause (first observed failure)"}:
            self._open(line, _Table(root=title.startswith("Root Cause")))
        return facts

    def end(self) -> Iterable[Fact]:
        """Return the process that a table was about when the log ended."""
        found = [fact for table in self._tables.values() for fact in _block_facts(table.block)]
        self._tables.clear()
        return found

    def _open(self, line: Line, table: _Table) -> _Table:
        if len(self._tables) >= _MOST_TABLES:
            self._tables.clear()
        self._tables[line.stream] = table
        return table

    def _read_table(self, line: Line, table: _Table) -> list[Fact]:
        text = line.text
        block = table.block
        stripped = text.strip()
        if (begins := _BLOCK.match(text)) is not None:
            table.block = _Block(line, table.root)
            return _block_facts(block)
        if stripped.startswith(("Root Cause", "Failures:", "Other Failures")):
            table.root, table.block = stripped.startswith("Root Cause"), None
            return _block_facts(block)
        if begins is None and block is not None and self._take(block, text):
            return []
        if not stripped or stripped.startswith(("---", "<NO_OTHER")):
            table.block = None
            return _block_facts(block)
        # A table ends at its last border; torch before 1.11 has the root cause first, and a border after it.
        if stripped.startswith(("===", "***")) and (block is None or not table.root or block.fields):
            del self._tables[line.stream]
            return _block_facts(block)
        return _read_agent(line)

    def _take(self, block: _Block, text: str) -> bool:
        """Take a line of a process, or one of its traceback."""
        if block.message:
            if len(block.message) < _MOST_LINES and (text.startswith("  ") or not text):
                block.message.append(text.removeprefix("  "))
                return True
            return False
        match = _FIELD.match(text)
        if match is None:
            return False
        if match["name"] in {"traceback", "msg"}:
            block.message.append(match["value"])
        else:
            block.fields[match["name"]] = match["value"].strip()
        return True


def _read_agent(line: Line) -> list[Fact]:
    """Read a line of the agent's log."""
    text = line.text
    common: dict[str, Any] = {"spot": line.spot(), "time": time_of(line), "said": quote(text)}
    if (failed := _FAILED.search(text)) is not None:
        who = replace(line.who, local_rank=int(failed["local"]), pid=int(failed["pid"]))
        return [_exited(int(failed["code"]), who=who, first=True, **common)]
    if (stopped := _CLOSING.search(text) or _FORCED.search(text)) is not None:
        pid = int(stopped["pid"] or stopped["old"])
        who = replace(line.who, pid=pid)
        return [Exited(who=who, signal=stopped["signal"], by_launcher=True, **common)]
    # What concerns all ranks of a node
    if (death := _DEATH.search(text)) is not None:
        signal = death["signal"]
        name = signal_name(int(signal)) if signal.isdigit() else signal
        return [Stopped(who=line.who, by=name if name in {"SIGHUP", "SIGINT"} else "signal", **common)]
    if (restarts := _RESTARTS.search(text)) is not None:
        return [Restarted(who=line.who, attempt=int(restarts["most"]) - int(restarts["left"]) + 1, **common)]
    if "new nodes from group_rank" in text and "will restart worker group" in text:
        return [Restarted(who=line.who, **common)]
    if "worker group successfully finished" in text:
        return [Finished(who=line.who, **common)]
    return []


def _exited(code: int, **fields: Any) -> Exited:
    """Return the end of a process with an exit code as Python has it: -9 for signal 9."""
    number = -code if code < 0 else _SHELL_SIGNALS.get(code, 0)
    if number:
        return Exited(signal=signal_name(number), **fields)
    return Exited(code=code, **fields)


def _block_facts(block: _Block | None) -> list[Fact]:
    """Return what a table says about one process."""
    if block is None:
        return []
    code = _CODE.search(block.fields.get("exitcode", ""))
    rank = _RANK.search(block.fields.get("rank", ""))
    named = block.fields.get("host", "")
    host = named if named and not named.startswith("localhost") else block.line.who.host
    who = replace(block.line.who, host=host, pid=int(code["pid"]) if code is not None else None)
    if rank is not None and int(rank["rank"]) < MOST_RANKS:
        who = replace(who, rank=int(rank["rank"]), local_rank=int(rank["local"]))
    time = _time(block.fields.get("time", ""), host or block.line.source)
    common: dict[str, Any] = {"who": who, "spot": block.line.spot(), "time": time}
    if code is None:  # the table was cut off before the exit status: a rank failed, and how is not told
        if who.rank is None or not {"host", "time"} <= block.fields.keys():
            return []
        first = " first on its node" if block.root else ""
        message = f"torchrun's table says that rank {who.rank} failed{first}, and is cut off before the exit status"
        return [Failed(type="ChildFailedError", message=message, nature=Nature.FOLLOWS, said=message, **common)]
    exit_code = int(code["code"])
    said = quote(f"rank {who.rank} (local_rank: {who.local_rank}) exitcode: {block.fields['exitcode']}")
    by_launcher = exit_code == -15 and not block.root
    exited = _exited(exit_code, first=block.root, by_launcher=by_launcher, said=said, **common)
    return [*_message_facts("\n".join(block.message), **common), exited]


def _message_facts(message: str, *, who: Who, spot: Spot, time: Time | None) -> list[Fact]:
    """Return what a traceback or message says that torchrun took from an error file."""
    if HEADER in message:
        text = read_traceback(message.splitlines())
        if text is not None:
            return traceback_facts(text, who=who, spot=spot, time=time)
    match = _RAISED.match(message.strip())
    if match is None or message.strip().startswith(_NOTHING):
        return []
    raised = RaisedText(type=match["type"], lines=match["message"].splitlines() or [""])
    reading = classify(raised.type, raised.message)
    return failure_facts(raised, (), reading, who=who, spot=spot, time=time)


def _time(text: str, clock: str) -> Time | None:
    """Return the time of a table: whole seconds, in the zone of the node."""
    match = _TIME.search(text)
    if match is None:
        return None
    try:
        return Time(seconds=timegm((*map(int, match.groups()), 0, 0, 0)), clock=clock)
    except ValueError:
        return None


class ErrorFileReader:
    """Reads the ``error.json`` that ``@record`` writes for a rank."""

    name = "torchrun error file"

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file begins as an error file does: JSON lines of a log have a message too."""
        begin = head.lstrip()[:64]
        if not re.match(rb'\{\s*"(?:message|errorCode)"\s*:', begin):
            return False
        if b'"py_callstack"' in head or b'"extraInfo"' in head:
            return b'}\n{"' not in head
        return isinstance(_parse(head), dict) and not set(_parse(head)) - {"message", "errorCode", "timestamp"}

    def read(self, document: Document) -> Found:
        """Return the failure of the rank, whose local rank the path tells."""
        content = _parse(document.body)
        said = content.get("message") if isinstance(content, dict) else None
        if said is None:
            return Found(problem="cut off" if document.cut or content is None else "not an error file of torchrun")
        spot = Spot(source=document.source)
        extra = said.get("extraInfo") if isinstance(said, dict) else None
        extra = extra if isinstance(extra, dict) else {}
        # The files of one attempt are those of one agent, and thus of one host.
        attempt = document.source.rpartition("/")[0].rpartition("/")[0] or document.source
        seconds = extra.get("timestamp")
        clock = f"{document.who.host or attempt}, epoch"
        digits = str(seconds)
        time = Time(seconds=int(digits), clock=clock) if digits.isdigit() and len(digits) < 12 else None
        short = said.get("message", "") if isinstance(said, dict) else said
        callstack = extra.get("py_callstack", "")
        message = callstack if isinstance(callstack, str) and HEADER in callstack else short
        facts = _message_facts(str(message), who=document.who, spot=spot, time=time)
        return Found(facts=facts, lines=document.body.count(b"\n") + 1)


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
