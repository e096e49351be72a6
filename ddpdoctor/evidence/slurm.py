"""What Slurm writes into a job's log, and its accounting, ``sacct``: how a job and its steps ended."""

from __future__ import annotations

import re
from calendar import timegm
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.frameworks import SIGNALS, begins_run
from ddpdoctor.evidence.reader import LineReader, quote
from ddpdoctor.model.evidence import Exited, Finished, Stopped, Time, Trouble, Who
from ddpdoctor.model.launch import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact


MOST_TASKS = 65_536
MEMORY_FIX = "ask for more memory (sbatch --mem or --mem-per-cpu), or use less: fewer loader workers, smaller batches"
_TASKS = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>Out Of Memory|Terminated|Killed|Aborted|"
    r"Segmentation fault|Bus error|Floating point exception|Illegal instruction|Interrupt|Hangup|Quit|"
    r"Exited with exit code (?P<code>\d+))"
)
_SIGNALS = {
    "Out Of Memory": "SIGKILL", "Terminated": "SIGTERM", "Killed": "SIGKILL", "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL", "Interrupt": "SIGINT", "Hangup": "SIGHUP", "Quit": "SIGQUIT",
}  # fmt: skip
_OOM_EVENT = re.compile(r"Detected (?P<count>\d+) oom[-_]kill events?(?:\(s\))? in (?P<step>(?:StepId=|step )[\w.+]+)")
_OOM_LIMIT = re.compile(
    r"(?:[Ss]tep|[Jj]ob|StepId=)\s?[\w.]+ (?:task \d+ )?exceeded (?:\w+ )?memory limit"
    r"|Exceeded (?:job|step) memory limit"
)
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) (?P<id>[\w.+]+) ON (?P<host>[\w.-]+) CANCELLED AT (?P<time>[\dT:-]+)"
    r"(?: DUE TO (?P<why>[A-Z _]+))?"
)
_NODE = re.compile(r"srun: error: Node failure on (?P<hosts>[\w.,\[\]-]+)")
_STEP_ENDS = ("Job step aborted", "CANCELLED AT", "Terminating StepId", "First task exited", "Sent SIGKILL")
_STOPPED = {
    "TIME LIMIT": "time limit", "PREEMPTION": "preemption", "JOB REQUEUE": "requeue", "TIME_LIMIT": "time limit",
}  # fmt: skip


class SlurmReader(LineReader):
    """Reads the lines of srun and slurmstepd."""

    name = "Slurm"
    triggers = (b"slurmstepd: ", b"srun: error", b"Job step aborted", b"First task exited")

    def __init__(self) -> None:
        self._stopping = False
        """Whether Slurm is ending the step. It then also ends the remaining tasks."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of one line."""
        text = line.text
        if "srun: " not in text and "slurmstepd" not in text:
            if self._stopping and begins_run(text):
                self._stopping = False
            return ()
        facts = list(self._facts(line))
        if any(words in text for words in _STEP_ENDS):
            self._stopping = True
        return facts

    def _facts(self, line: Line) -> Iterator[Fact]:
        text, spot, said = line.text, line.spot(), quote(line.text)
        if (found := _TASKS.search(text)) is not None:
            yield from self._tasks(found, line)
        elif _OOM_EVENT.search(text) or _OOM_LIMIT.search(text):
            found = _OOM_EVENT.search(text)
            where = f" in {found['step'].removeprefix('StepId=').removeprefix('step ')}" if found is not None else ""
            yield Trouble(
                who=Who(host=line.who.host, address=line.who.address), spot=spot, time=line.time, said=said,
                kind="oom", fix=MEMORY_FIX,
                problem=f"Slurm's memory limit was reached{where}, and the kernel killed a process for it",
            )  # fmt: skip
        elif (found := _CANCELLED.search(text)) is not None:
            yield _cancelled(found, line)
        elif (found := _NODE.search(text)) is not None:
            try:
                hosts = expand_hosts(found["hosts"].rstrip(",."))
            except ValueError:
                hosts = (found["hosts"],)
            for host in hosts:
                yield Trouble(
                    who=Who(host=host), spot=spot, time=line.time, said=said, kind="node-failure",
                    problem="Slurm lost the node", fix=NODE_FIX,
                )  # fmt: skip

    def _tasks(self, found: re.Match[str], line: Line) -> Iterator[Fact]:
        """Yield the end of each task. A task that a signal ends while Slurm ends the step is not at fault."""
        how, code = found["how"], int(found["code"]) if found["code"] else None
        signal = _SIGNALS.get(how, "")
        if code is not None and code > 128 and code - 128 in SIGNALS:
            signal, code = SIGNALS[code - 128], None
        if code == 0:
            return
        told = signal == "SIGTERM" or (signal == "SIGKILL" and self._stopping and how != "Out Of Memory")
        for task in _numbers(found["tasks"]):
            yield Exited(
                who=Who(host=found["host"], task=task), spot=line.spot(), time=line.time, said=quote(line.text),
                code=code, signal=signal, by_launcher=told, memory=how == "Out Of Memory",
            )  # fmt: skip


NODE_FIX = "sinfo -R and scontrol show node say why; exclude the node (sbatch --exclude) and start again"


def _cancelled(found: re.Match[str], line: Line) -> Fact:
    why = (found["why"] or "").strip()
    time = line.time or _time(found["time"], found["host"])
    spot, said = line.spot(), quote(line.text)
    if "NODE FAIL" in why:  # the host in the line is the one that runs the step's script, not the one that failed
        problem = "Slurm ended the job because a node failed, which it does not name here"
        fix = f"sacct -j {found['id'].partition('.')[0]} -o JobID,State,NodeList; {NODE_FIX}"
        return Trouble(spot=spot, time=time, said=said, kind="node-failure", problem=problem, fix=fix)
    by = next((words for text, words in _STOPPED.items() if text in why), "cancelled")
    return Stopped(spot=spot, time=time, said=said, by=by)


def _time(text: str, host: str) -> Time | None:
    numbers = [int(one) for one in re.findall(r"\d+", text)[:6]]
    try:
        return Time(seconds=timegm((*numbers, 0, 0, 0)), clock=host) if len(numbers) == 6 else None
    except (ValueError, OverflowError):
        return None


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of "0-3,7" or "[0-3,7]"."""
    left = MOST_TASKS
    for part in text.strip("[]").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(part) > 20:
            continue
        for number in range(int(first), min(int(last or first), int(first) + left) + 1):
            yield number
            left -= 1


_HEAD = re.compile(r"^\s*JobID(?:Raw)?\b.*\bState\b")
_STOPPED_STATES = {"TIMEOUT": "time limit", "PREEMPTED": "preemption", "REQUEUED": "requeue", "DEADLINE": "time limit"}


class SacctReader(LineReader):
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
        values = text.split("|") if "|" in text else [text[start:end] for start, end in self._places]
        fields = dict(zip(self._names, (value.strip() for value in values), strict=False))
        fields["JobID"] = fields.get("JobID") or fields.get("JobIDRaw") or ""
        if not fields["JobID"][:1].isdigit():
            self._names = []
            return ()
        return tuple(self._row(fields, line))

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
    stopped = next((words for name, words in _STOPPED_STATES.items() if state.startswith(name)), "")
    digits = code.partition(":")[2]
    signal = SIGNALS.get(int(digits), "") if digits.isdigit() and len(digits) < 4 else ""
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
