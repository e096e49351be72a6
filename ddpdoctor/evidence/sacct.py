"""Slurm's accounting, ``sacct``: how a job and its steps ended. Its table has columns, or fields between "|"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.evidence.slurm import MEMORY_FIX, NODE_FIX, signal_of
from ddpdoctor.model.evidence import Exited, Finished, Stopped, Trouble, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_HEAD = re.compile(r"^\s*JobID(?:Raw)?\b.*\bState\b")
_STOPPED = {"TIMEOUT": "time limit", "PREEMPTED": "preemption", "REQUEUED": "requeue", "DEADLINE": "time limit"}


class SacctReader:
    """Reads the tables of ``sacct``."""

    name = "sacct"
    triggers = (b"ExitCode",)

    def __init__(self) -> None:
        self._names: list[str] = []
        self._places: list[tuple[int, int]] = []
        """Where the columns are, in a table without "|"."""
        self._reported: set[tuple[str, str]] = set()

    def read(self, line: Line) -> Iterable[Fact]:
        """Return what one row of a table says, if it is not said of the same job before."""
        if not self._names and "JobID" not in line.text:
            return ()
        text = line.raw_prefix + line.text  # the number of a job looks like a label
        if _HEAD.match(text):
            self._names, self._places, self._reported = re.findall(r"[A-Za-z]+", text), [], set()
            return ()
        if not self._names:
            return ()
        if set(text.strip()) == {"-", " "}:
            self._places = [(found.start(), found.end()) for found in re.finditer("-+", text)]
            return ()
        fields = self._fields(text)
        if fields is None:
            self._names = []
            return ()
        return tuple(self._row(fields, line))

    def end(self) -> Iterable[Fact]:
        """Return nothing, because no fact needs a second row."""
        return ()

    def _fields(self, text: str) -> Mapping[str, str] | None:
        if "|" in text:
            values = text.split("|")
        elif self._places:
            values = [text[start:end] for start, end in self._places]
        else:
            return None
        fields = dict(zip(self._names, (value.strip() for value in values), strict=False))
        job = fields.get("JobID") or fields.get("JobIDRaw") or ""
        return {**fields, "JobID": job} if job[:1].isdigit() else None

    def _row(self, fields: Mapping[str, str], line: Line) -> Iterator[Fact]:
        job, state = fields["JobID"].partition(".")[0], fields.get("State", "")
        code = fields.get("ExitCode", "")
        common: dict[str, Any] = {"spot": line.spot(), "said": quote(" ".join((line.raw_prefix + line.text).split()))}
        is_step = "." in fields["JobID"]
        for fact in _facts(job, state, code, common):
            if is_step and isinstance(fact, Finished):
                continue  # a step may end well in a job that does not
            key = (job, type(fact).__name__)
            if key not in self._reported:
                self._reported.add(key)
                yield fact


def _facts(job: str, state: str, code: str, common: dict[str, Any]) -> Iterator[Fact]:
    """Yield what a state and an exit code such as "0:15" say: a status, and a signal."""
    stopped = next((words for name, words in _STOPPED.items() if state.startswith(name)), "")
    signal = signal_of(code.partition(":")[2])
    if state.startswith("OUT_OF_ME"):
        problem = f"Slurm says that job {job} ran out of memory"
        yield Trouble(kind="oom", problem=problem, fix=MEMORY_FIX, **common)
    elif state.startswith("NODE_FAIL"):
        problem = f"Slurm says that a node of job {job} failed, which it does not name here"
        yield Trouble(kind="node-failure", problem=problem, fix=NODE_FIX, **common)
    elif stopped:
        yield Stopped(by=stopped, **common)
    elif state.startswith("CANCELLED") or signal == "SIGTERM":
        yield Stopped(by="signal" if state.startswith("FAILED") else "cancelled", **common)
    elif state.startswith("FAILED") and signal:
        yield Exited(who=Who(), signal=signal, **common)
    elif state == "COMPLETED" and code.startswith("0:0"):
        yield Finished(**common)
