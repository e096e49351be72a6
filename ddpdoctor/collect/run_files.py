"""Reads each file of a run folder: what the agent, the watcher and others wrote."""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.collect.bounded import ask_one
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.proc import read_environment
from ddpdoctor.collect.recorded import read_lacks, read_record, whole_or_0
from ddpdoctor.collect.system import ReadingPlan, System, read_node
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.facts import ControlFlow, NcclLine, Statement
from ddpdoctor.model.pictures import SourceExcerpt
from ddpdoctor.model.tuning import TrialRecord, TrialStop, TriedBlock
from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage.files import check_json, make_folder, parse_json, read_end, read_plain, write_whole
from ddpdoctor.recorder.storage.ring_reading import parse_group_json
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpdoctor.model.facts import BeforeCall, HelperError, HostCauses, Job, ProcessCauses

Kind = TypeVar("Kind")
# The errors for a file that is missing, cannot be opened, or has the wrong content.
DAMAGED = (OSError, ValueError, OverflowError, RecursionError, WrongValue)
MAX_TEXT_BYTES = 16 * 2**20  # our choice: the stacks of a process with 100 threads take 100 KiB
FOLDERS = ("rings", "prints", "evidence", "nccl", "nodes", "gathered")
MOST_ATTEMPTS = 2**16  # our choice: no launcher restarts a job more often
MACHINE_NAME = "machine.json"
# The facts that decide how data travel between ranks. Reading them imports no torch and gives the GPUs no work.
SECTIONS = frozenset(
    {"conf_files", "gpus", "kernel_log", "limits", "names", "network", "pci", "rdma", "stuck_processes"}
)
MACHINE_LIMIT_S = 6.0  # Our choice: a healthy node takes one second to read. A section that hangs is reported as such.
CONTROL_FLOW_NAME = "control_flow.json"
MAX_FILES = 64
MAX_SOURCE_BYTES = 2 * 2**20
_KINDS = {
    "FunctionDef": "function", "AsyncFunctionDef": "function", "AsyncFor": "for", "ExceptHandler": "except",
    **{name: name.lower() for name in ("If", "For", "While", "Try", "Continue", "Break", "Return")},
}  # fmt: skip
SOURCE_NAME = "source.json"  # in a run folder: the ``SourceExcerpt`` of its latest verdict
AROUND = 2  # lines before and after the blamed one
MAX_WIDTH = 200  # our choice: longer lines are cut
SOURCE_LIMIT_S = 2.0  # our choice: the file may be on a server that does not answer, which may be why the job hangs
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_KEY_ENDS = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_HIDDEN_KEY = "<part of a private key>"
NCCL_FOLDER = "nccl"  # in the run folder
MOST_BYTES = 256 * 1024  # of a log's end; our choice: a warning is one line, and old ones no longer matter
MOST_FILES = 1024
MOST_LINES = 8  # how many of a log's last warnings we keep
MOST_TEXT = 300
# From ncclDebugLog in debug.cc, NCCL 2.18 to 2.30: "node3:4711:4720 [0] transport/net_socket.cc:391 NCCL WARN …". Newer
# versions put the time before it.
_WARNING = re.compile(
    r"^(?:\[[^\]\n]*\] )?(?:(?P<host>\S+):(?P<pid>\d+):\d+ \[[\w-]+\] )?(?:(?P<source>\S+:\d+) )?"
    r"(?:\S+ )?NCCL WARN (?P<text>.+)$",
    re.MULTILINE,
)
TRIAL_FOLDER = "tuning"
MAX_BYTES = 16 * 2**20  # our choice: a line has about 100 bytes, so this is over 100,000 blocks
NS_PER_MS = 1e6
Answers = dict[tuple[int, int], list[tuple[int, str]]]  # number and file of a recorder's answer, by pid and ticks


def attempt_name(stem: str, attempt: int | None = None) -> str:
    """Return the name of a file of a restarted attempt, or (by default) of the last: "watch-0.json", "watch.json"."""
    return f"{stem}.json" if attempt is None else f"{stem}-{attempt}.json"


def save(path: Path, record: Any) -> None:
    """Write a record, or a tuple of records, as JSON, whole or not at all; raises OSError."""
    plain = [encode(part) for part in record] if isinstance(record, tuple) else encode(record)
    write_whole(path, json.dumps(plain))


def load(kind: type[Kind], path: Path) -> Kind | None:
    """Return the record that ``save`` wrote, or None if the file is missing or damaged."""
    try:
        return decode(kind, load_json(path))
    except DAMAGED:
        return None


def load_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file; raises one of ``DAMAGED``."""
    return parse_json(read_plain(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the content of a plain text file, or an empty string if it cannot be read."""
    try:
        return read_plain(path, MAX_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The start of a worker."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    at: int  # in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a process."""

    pid: int
    code: int  # an exit status, or a signal's number below zero
    at: int  # in nanoseconds


# The records that lines of the log hold, by the kind of line. Other kinds only name hooks or a meeting.
RECORDS: dict[Any, type[WorkerStart | End]] = {"rank": WorkerStart, "end": End}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLog:
    """What torch's elastic agent logged about one attempt."""

    attempt: int = -1
    started: dict[int, WorkerStart] = field(default_factory=dict)  # by pid
    ends: dict[int, End] = field(default_factory=dict)  # by pid
    closing_ns: int | None = None
    superseded_ns: int | None = None  # when the next attempt began
    lacks: tuple[str, ...] = ()  # the recorder hooks that this version of torch's agent has no place for
    meeting: int | None = None  # shared by the agents of all nodes for this attempt, if they logged it

    @property
    def begun_ns(self) -> int | None:
        return min((start.at for start in self.started.values()), default=None)


def log_of(entries: Sequence[dict[str, Any]], attempt: int | None = None) -> AgentLog:
    """Return what the agent logged about one attempt, by default the last."""
    wanted = max((int(e.get("attempt", -1)) for e in entries), default=-1) if attempt is None else attempt
    mine = [e for e in entries if e.get("attempt") == wanted]
    return AgentLog(
        attempt=wanted,
        lacks=read_lacks(entries),
        started={e["pid"]: decode(WorkerStart, e) for e in mine if e.get("k") == "rank"},
        ends={e["pid"]: decode(End, e) for e in mine if e.get("k") == "end"},
        closing_ns=next((e["at"] for e in mine if e.get("k") == "closing"), None),
        meeting=next((e["meeting"] for e in mine if type(e.get("meeting")) is int), None),
        superseded_ns=min((e["at"] for e in entries if int(e.get("attempt", -1)) == wanted + 1), default=None),
    )


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return all readable entries of an agent's log."""
    text = read_text(path)
    try:
        check_json(text.encode())
    except ValueError:
        return []
    entries = []
    for line in text.splitlines():
        try:
            entry = parse_json(line.encode())
            kind = str(entry.get("k")) if isinstance(entry, dict) else ""
            if kind in RECORDS:
                decode(RECORDS[kind], entry)
        except (ValueError, WrongValue):
            continue
        if isinstance(entry, dict) and (kind != "closing" or type(entry.get("at")) is int):
            attempt = entry.get("attempt", -1)
            if type(attempt) is int and -1 <= attempt < MOST_ATTEMPTS:
                entries.append(entry)
    return entries


def find_answers(folder: Path) -> Answers:
    """Return the answers in the evidence folder, which is listed only once for all ranks."""
    found: Answers = {}
    for path in folder.glob("*.json"):
        numbers = path.stem.split("-")
        if len(numbers) == 3 and all(number.isdigit() for number in numbers):
            pid, ticks, request = map(int, numbers)
            found.setdefault((pid, ticks), []).append((request, str(path)))
    return found


def read_answer(answers: Answers, pid: int, ticks: int) -> dict[str, Any]:
    """Return the latest readable answer of a process, or an empty dict."""
    for _, path in sorted(answers.get((pid, ticks), ()), reverse=True):
        try:
            body = parse_group_json(read_plain(path))
        except DAMAGED:
            continue
        if isinstance(body, dict):
            return body
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedChild:
    """A descendant of a rank."""

    pid: int
    ticks: int
    state: str | None = None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """What the watcher saw of one rank."""

    state: str | None = None  # the state letter in /proc/PID/stat
    cpu_share: float | None = None
    tracer: int | None = None
    frozen_since_ns: int | None = None
    last_progress_ns: int | None = None
    starved_ns: int = 0
    asked_to_end_ns: int | None = field(default=None, metadata={"json": "told_ns"})  # when it received SIGTERM
    ended_ns: int | None = None
    code: int | None = None
    oom: bool | None = None
    why: str | None = None  # why some facts about it are missing
    before_call: BeforeCall | None = None
    dumps: tuple[tuple[int, int, int], ...] = ()  # of its dump file: start offset, end offset, time of writing
    children: tuple[WatchedChild, ...] = ()
    child_lines: tuple[tuple[str, int, str, int], ...] = ()  # of its ended children
    child_fetches: tuple[int, ...] = ()  # sums of ``fetch_cells`` over ended children
    child_errors: tuple[HelperError, ...] = ()  # the errors of its ended children
    causes: ProcessCauses | None = None
    unrecorded: dict[str, str] | None = None  # its environment, if it is a rank without a recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """What the watcher saw of the job."""

    now_ns: int | None = None
    ended: bool = True
    launcher_pid: int | None = None
    launcher_status: int | None = None
    stopping_since_ns: int | None = None
    interrupted_by: str | None = None
    interrupted_ns: int | None = None
    host_causes: HostCauses | None = None
    processes: dict[int, WatchedRank] = field(default_factory=dict)


UNSEEN = WatchedRank()  # of a process that the watcher did not see


def read_watch(folder: Path, attempt: int | None) -> WatchedJob:
    """Return what the watcher saw in an attempt: the copy saved at its restart if there is one, else the last state."""
    for name in (attempt_name("watch", attempt), attempt_name("watch")):
        try:
            watch = load_json(folder / name)
        except DAMAGED:
            continue
        if isinstance(watch, dict):
            return parse_watch(watch)
    return WatchedJob()


def parse_watch(watch: Mapping[str, Any]) -> WatchedJob:
    """Return the content of watch.json without damaged values."""
    rows = watch.get("processes")
    found = {}
    for pid, row in rows.items() if isinstance(rows, dict) else ():
        if isinstance(row, dict) and pid.isascii() and pid.isdecimal() and len(pid) < 20:
            lost: list[str] = []
            seen = read_record(WatchedRank, row, lost)
            # ``why`` names the damaged fields, unless it already gives another reason.
            why = seen.why or f"what the watcher saw of it is damaged ({', '.join(sorted(lost))})"
            found[int(pid)] = replace(seen, why=why) if lost else seen
    return read_record(WatchedJob, watch, processes=found)


def save_machine(folder: Path, sections: frozenset[str] = SECTIONS) -> None:
    """Read these sections of this machine and write machine.json, whole or not at all; raises OSError."""
    system = System()
    node = read_node(system, ReadingPlan(sections=sections, limit_s=MACHINE_LIMIT_S), (read_process(system),))
    save(folder / MACHINE_NAME, node)


def save_control_flow(folder: Path, job: Job) -> bool:
    """Save the control flow of the files that made the job's calls; return whether there was any to save."""
    with contextlib.suppress(OSError):
        began_s = (folder / "run.json").stat().st_mtime
        sites = [kind.site for rank in job.ranks for kind in rank.recent_calls.kinds]
        sites += [call.site for rank in job.ranks for call in rank.open_calls]
        looks = [sample for rank in job.ranks for sample in rank.samples[-1:]]
        stacks = [stack.frames for sample in looks for stack in sample.stacks if stack.is_main]
        stacks += [error.frames for rank in job.ranks for error in rank.raised]
        sites += [frame for frames in stacks for frame in frames if frame.user]
        flows = tuple(
            flow
            for file in list(dict.fromkeys(site.file for site in sites if site is not None))[:MAX_FILES]
            if (flow := read_control_flow(Path(file), began_s)) is not None
        )
        if flows:
            save(folder / CONTROL_FLOW_NAME, flows)
            return True
    return False


def read_control_flow(path: Path, unchanged_since_s: float) -> ControlFlow | None:
    """Return the statements that decide which lines run, or None if the file changed since the run or is not Python."""
    try:
        tree = ast.parse(_read_source(path, unchanged_since_s))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return ControlFlow(file=str(path), statements=tuple(_statements(tree)))


def _statements(tree: ast.AST) -> Iterator[Statement]:
    nodes: list[Any] = sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    named = grouped((function.name, function) for function in functions)
    answers = {name: _find_answers(found[0]) for name, found in named.items() if len(found) == 1}
    scopes = {part: function for function in functions for part in ast.walk(function)}  # an inner function comes later
    assigned = grouped((scopes.get(node), node) for node in nodes if isinstance(node, ast.Assign))
    for node in nodes:
        kind = _KINDS.get(type(node).__name__)
        if kind is None:
            continue
        decided: list[int] = []
        if isinstance(node, (ast.If, ast.While)):
            end = node.lineno if isinstance(node, ast.If) else node.end_lineno or node.lineno
            above = (assign for assign in assigned.get(scopes.get(node), ()) if assign.lineno <= end)
            values = {getattr(assign.targets[0], "id", ""): assign.value for assign in above}  # stop = must_stop(step)
            asked = [values.get(getattr(part, "id", None), part) for part in ast.walk(node.test)]
            names = [
                getattr(call.func, "id", getattr(call.func, "attr", "")) for call in asked if isinstance(call, ast.Call)
            ]
            decided = [line for name in names for line in answers.get(name, ())]
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            # Over a range of constants it runs equally often on all ranks.
            is_range = isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range"
            is_fixed = is_range and all(isinstance(argument, ast.Constant) for argument in node.iter.args)
            kind = "fixed-for" if is_fixed else kind
        yield Statement(
            kind=kind,
            line=node.lineno,
            last_line=node.end_lineno or node.lineno,
            body_last_line=node.body[-1].end_lineno if isinstance(node, ast.If) else None,
            decided_at=tuple(dict.fromkeys(decided)),
        )


def _find_answers(function: ast.AST) -> list[int]:
    """Return the lines that decide what a function returns: an `if` around a return, or a return that computes."""
    found = set()
    todo = [(child, 0) for child in ast.iter_child_nodes(function)]
    for node, condition in todo:  # grows as it goes: a nested function has its own returns
        if isinstance(node, ast.Return) and (condition or not isinstance(node.value, (ast.Constant, type(None)))):
            found.add(condition or node.lineno)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            inner = node.lineno if isinstance(node, (ast.If, ast.ExceptHandler)) else condition
            todo += [(child, inner) for child in ast.iter_child_nodes(node)]
    return sorted(found)


def read_excerpt(file: str, line: int, unchanged_since_s: float) -> SourceExcerpt | None:
    """Return the lines around a line without secrets, or None if the file is unreadable, changed or too short."""
    path = Path(file)
    source = ask_one(lambda: _read_source(path, unchanged_since_s), SOURCE_LIMIT_S).value or b""
    # Lines of private keys are replaced: one alone does not look like a secret.
    lines, inside = [], False
    # As Python counts lines; str.splitlines() knows more ends.
    for text in re.split(r"\r\n|\r|\n", source.decode("utf-8", "replace")) if source else ():
        ends = _KEY_ENDS.search(text) is not None
        lines.append(_HIDDEN_KEY if inside and not ends else text)
        inside = not ends and (inside or _KEY_BEGINS.search(text) is not None)
    if not 0 < line <= len(lines):
        return None
    first = max(1, line - AROUND)
    shown = lines[first - 1 : line + AROUND]
    return SourceExcerpt(file=file, first=first, lines=_source_lines(shown), blamed=line)


def load_excerpt(folder: Path, file: str, line: int) -> SourceExcerpt | None:
    """Return the excerpt that a run folder holds of a line, or None. No other file is read."""
    kept = load(SourceExcerpt, folder / SOURCE_NAME)
    if kept is None or (kept.file, kept.blamed) != (file, line) or not kept.first <= line < kept.first + AROUND + 1:
        return None
    lines = _source_lines(kept.lines[: 2 * AROUND + 1])
    return SourceExcerpt(file=file, first=kept.first, lines=lines, blamed=line) if lines else None


def records_own_job(folder: Path, pids: Iterable[int]) -> bool:
    """Return whether one of these processes is of this user, sees the same files, and records in the folder now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            own = Path("/proc/self/ns/mnt")
            process = Path(f"/proc/{pid}")
            named = [variable for variable in read_environment(pid) if variable.startswith(b"DDPDOCTOR_RUN=")]
            if (
                named
                and process.stat().st_uid == os.geteuid()
                and (process / "ns/mnt").readlink() == own.readlink()
                and (process / "cwd" / os.fsdecode(named[0][14:])).samefile(folder)
            ):
                return True
    return False


def _read_source(path: Path, unchanged_since_s: float) -> bytes:
    """Return a source file; raises OSError also if it has changed since."""
    try:
        file = path.resolve(strict=True)
        if file.stat().st_mtime > unchanged_since_s:
            raise OSError(f"{file} was changed")
        return read_plain(file, MAX_SOURCE_BYTES)
    except (ValueError, RuntimeError) as error:  # a NUL in the path, a circle of links
        raise OSError(str(error)) from error


def _source_lines(lines: Iterable[str]) -> tuple[str, ...]:
    shown = (hide_in_text(line.expandtabs(4).rstrip()) for line in lines)
    return tuple(line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 3] + "..." for line in shown)


def read_warnings(folder: Path) -> tuple[NcclLine, ...]:
    """Return the last warnings of every log in the run folder, without repeats."""
    found: dict[NcclLine, None] = {}
    for path in sorted((folder / NCCL_FOLDER).glob("*.log"))[:MOST_FILES]:
        for match in list(_WARNING.finditer(_tail(path)))[-MOST_LINES:]:
            pid, text = int(match["pid"]) if match["pid"] else None, hide_in_text(match["text"].strip()[:MOST_TEXT])
            found[NcclLine(pid=pid, source=match["source"] or "", text=text)] = None
    return tuple(found)


def keep_users_logs(folder: Path, pattern: str) -> None:
    """Copy the warnings in the logs that NCCL_DEBUG_FILE names ("%h" host, "%p" process) to the run folder."""
    if not pattern or pattern in {"stdout", "stderr"} or pattern.startswith("/dev/"):
        return
    wild = re.sub(r"%[hp]", "*", glob.escape(pattern))
    target = folder / NCCL_FOLDER
    make_folder(target)
    for name in sorted(glob.glob(wild))[:MOST_FILES]:  # noqa: PTH207 - the pattern may be absolute or not
        lines = _tail(Path(name))
        kept = [match[0] for match in _WARNING.finditer(lines)][-MOST_LINES:]
        if kept:
            write_whole(target / f"user.{Path(name).name}.log", hide_in_text("\n".join(kept) + "\n"))


def _tail(path: Path) -> str:
    try:
        return read_end(path, MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def read_trial(folder: Path) -> TrialRecord:
    """Return what the ranks of a run recorded of a trial; an empty record if there is nothing."""
    ranks = []
    for path in sorted((folder / TRIAL_FOLDER).glob("*.jsonl")):
        lines = []
        with contextlib.suppress(OSError):
            for text in read_plain(path, MAX_BYTES).splitlines():
                with contextlib.suppress(ValueError):  # the last one may be cut off
                    lines.append(parse_json(text))
        ranks.append([line for line in lines if isinstance(line, dict)])
    ranks = [lines for lines in ranks if lines]
    every = [line for lines in ranks for line in lines]
    plan, launch, late = (next((line for line in every if key in line), {}) for key in ("plan", "launch", "late"))
    tries: dict[str, Any] = next((line for lines in ranks for line in reversed(lines) if "tries" in line), {})
    # The end that a rank came to by itself
    end = next((line for line in every if line.get("end") in {stop.value for stop in TrialStop}), {})
    blocks: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    refused: dict[str, str] = {}
    for line in every:
        steps = line.get("steps_ns")
        if isinstance(steps, list) and steps and all(isinstance(ns, int) for ns in steps):
            key = (whole_or_0(line.get("round")), str(line.get("setting")))
            blocks.setdefault(key, []).append(tuple(ns / NS_PER_MS for ns in steps))
        if "refused" in line:
            setting, reason = str(line["refused"]), str(line.get("reason", ""))
            if setting not in refused or not reason.startswith("another rank"):  # the reason of the one that refused it
                refused[setting] = reason
    whole = tuple(
        TriedBlock(round=number, setting=setting, ranks_ms=tuple(columns))
        for (number, setting), columns in blocks.items()
        if len(columns) == len(ranks) and len({len(column) for column in columns}) == 1  # that each rank has ended
    )
    return TrialRecord(
        settings=_texts(plan.get("plan")),
        late=_texts(late.get("late")),
        rounds=whole_or_0(plan.get("rounds")),
        blocks=whole,
        refused=tuple(refused.items()),
        stop=TrialStop(end["end"]) if "end" in end else TrialStop.CUT_SHORT,
        reason=str(end.get("reason", "")),
        models=whole_or_0(end.get("models")),
        forwards=whole_or_0((plan or launch).get("forwards")),
        trying=str(tries.get("tries", "")),
        round=whole_or_0(tries.get("round")),
        needed_steps=whole_or_0((plan or launch).get("needs")),
        fits=_texts(launch.get("fits")),
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(text) for text in value) if isinstance(value, list) else ()
