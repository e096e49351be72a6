"""Looks at a job of many nodes: starts the collector on each node or pod, and saves its output."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ddpdoctor.attach.find import NO_JOB
from ddpdoctor.attach.look import SUMMARY, make_attach_folder, to_json
from ddpdoctor.collect.bounded import start_program, wait_for_program
from ddpdoctor.model.attached import AskedNodes, NodeAnswer
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.words import count_of
from ddpdoctor.recorder.storage.files import make_folder, write_whole
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddpdoctor.collect.bounded import ChildEnd

LIMIT_S = 60.0  # our choice: a look takes 5 to 25 s, and on a node whose file system is slow Python starts in many more
AT_ONCE = 64  # our choice: each is a process here, and a step for Slurm's controller
END_S = 3.0  # how long a program that is stopped has to stop what it runs on its node
POLL_S = 0.05
NO_RANK = "no rank of the job runs there"
SEE_LOG = "if its ranks have ended, the job's log shows how: `ddpdoctor analyze LOG`"
# Lines that say again that a program ended, and not why.
_CONSEQUENCES = re.compile(
    r"exited with exit code|job step aborted|application launch failed|step .* cancelled|command terminated|^defaulted",
    re.IGNORECASE,
)
# What differs between nodes that are not reached for one reason.
_OF_ONE_NODE = re.compile(r"^(srun|slurmstepd\S*): error: | for StepId=\S+| on node \S+(?=:)")
TOOLS = ("squeue", "scontrol", "srun")
CONTROLLER_LIMIT_S = 30.0  # our choice: a controller that is busy answers within ten seconds (its MessageTimeout)
STEP_MINUTES = 3  # Slurm ends our steps after this time, also where this process cannot any more
_JOB = re.compile(r"\d+(_\d+|\+\d+)?")
_FIELDS = "%A|%i|%T|%U|%N"
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")  # inside a job, other variables of Slurm would be options of srun
SERVER_LIMIT_S = 30.0  # our choice: a list of a thousand pods takes a few seconds
# What is said of a node without ddpdoctor or Python
SRUN_LACKS = ("No module named", "No such file", "Permission denied")
KUBECTL_LACKS = ("No module named", "executable file not found", "no such file or directory")
ANYTHING = ("",)
_LOGIN = "see `kubectl get pods --selector={selector}`, and which cluster `kubectl config current-context` is"
MARK = "ddpdoctor-attach-stream"
VERSION = 1
# Our choice: the most that one file may have, unpacked. ``analyze`` reads no more of it either.
MOST_BYTES = 256 * 2**20
# The files that are taken, so that none is written elsewhere.
_NAME = re.compile(r"attach\.json|look_[12]/[A-Za-z0-9_][A-Za-z0-9_.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How nodes are asked."""

    name: str  # "srun" or "kubectl exec"
    noun: str  # what is asked: "node" or "pod"
    # What to do about a node that sent nothing, by words of the reason. NODE stands for its name.
    remedies: Sequence[tuple[Sequence[str], str]]
    env: Mapping[str, str] | None = None


@dataclass(slots=True, kw_only=True)
class _Asked:
    node: str
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    until_s: float
    is_late: bool = False

    def has_ended(self) -> bool:
        """Return whether it has ended. One that has had its time is stopped, first gently."""
        now_s = time.monotonic()
        if self.process.poll() is not None:
            return True
        if now_s >= self.until_s + END_S:
            self.process.kill()
            return True
        if now_s >= self.until_s and not self.is_late:
            self.is_late = True
            self.process.terminate()
        return False


def collector(python: str, job: str | None) -> tuple[str, ...]:
    return (python, "-m", "ddpdoctor", "attach", "--node-only", "--folder", "-", *(("--job", job) if job else ()))


def ask_nodes(
    way: Way, commands: Mapping[str, Sequence[str]], output: Path, known: Sequence[NodeAnswer] = (),
    limit_s: float = LIMIT_S,
) -> Path:  # fmt: skip
    """Run each node's command; return the folder with one for each that answered. ``known`` cannot be asked."""
    wall_ns = time.time_ns()
    folder = make_attach_folder(output, wall_ns)
    try:
        answers = sorted((*_ask_all(way, commands, folder, limit_s), *known), key=lambda answer: answer.node)
        asked = AskedNodes(wall_ns=wall_ns, asked_by=way.name, nodes=tuple(answers))
        if any(answer.folder for answer in answers):
            write_whole(folder / "nodes.json", to_json(encode(asked)))
            return folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # nothing has come, or not yet
    none = f"the only {way.noun} has not" if len(answers) == 1 else f"none of {count_of(len(answers), way.noun)}"
    raise UserError(f"{none} sent results", help="\n".join(refusal.line() for refusal in asked.unseen()))


def _ask_all(way: Way, commands: Mapping[str, Sequence[str]], folder: Path, limit_s: float) -> list[NodeAnswer]:
    waiting, running, answers = deque(commands.items()), list[_Asked](), list[NodeAnswer]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                node, command = waiting.popleft()
                # Apart from this terminal: a Ctrl-C here must not leave half of what it runs elsewhere.
                out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read at its end
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=way.env or os.environ,
                    start_new_session=True,
                )  # fmt: skip
                until_s = time.monotonic() + limit_s
                running.append(_Asked(node=node, process=process, out=out, err=err, until_s=until_s))
            ended = [query for query in running if query.has_ended()]
            running = [query for query in running if query not in ended]
            answers += [_read_answer(query, way, folder, limit_s) for query in ended]
            time.sleep(POLL_S)
    finally:
        for query in running:
            query.process.terminate()
    return answers


def _read_answer(query: _Asked, way: Way, folder: Path, limit_s: float) -> NodeAnswer:
    own = re.sub(r"[^A-Za-z0-9._-]", "_", query.node)
    with query.out, query.err:
        query.out.seek(0)
        arrived = receive_folder(query.out, folder / own)
        query.err.seek(0)
        said = query.err.read(2**20).decode(errors="replace")
    if arrived.error:
        gone = arrived.error.startswith(NO_JOB)
        reason, remedy = (NO_RANK, SEE_LOG) if gone else (arrived.error, arrived.help)
        return NodeAnswer(node=query.node, folder="", reason=reason, remedy=remedy)
    reason = ""
    if not arrived.whole and query.is_late:
        part = f", after {count_of(arrived.files, 'file')}" if arrived.files else ""
        reason = f"no answer within {limit_s:.0f} s{part}"
    elif not arrived.whole:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        causes = [line for line in lines if not _CONSEQUENCES.search(line)]
        last = (causes or lines or [f"it ended with status {query.process.returncode}"])[-1]
        reason = hide_in_text(_OF_ONE_NODE.sub("", last))[:300]
    return NodeAnswer(
        node=query.node, folder=own if arrived.files else "", reason=reason,
        remedy=next(do for words, do in way.remedies if any(word in reason for word in words)) if reason else "",
    )  # fmt: skip


class _Row(NamedTuple):
    """A line of squeue, in the order of ``_FIELDS``."""

    number: str
    shown: str
    state: str
    uid: str
    nodes: str


def attach_slurm(job: str, output: Path, python: str, name: str | None, tell: Callable[[str], None]) -> Path:
    """Have every node of a job look at its ranks, and return the folder. Raises ``UserError``."""
    # The job, which runs and may be joined
    if not _JOB.fullmatch(job):
        raise UserError(f"{job} is not the number of a Slurm job", help="`squeue --me` lists your jobs.")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        what = f"{missing[0]} is not on PATH here"
        raise UserError(what, help="Run it where you submit jobs, or run `ddpdoctor attach` on every node of the job.")
    end = _run_controller("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={_FIELDS}")
    rows = [_Row(*line.strip().split("|")) for line in end.out.splitlines() if line.count("|") == 4]
    if not rows and (end.status == 0 or "invalid job id" in end.err.lower()):
        raise UserError(
            f"Slurm does not know job {job}",
            help=f"`squeue --me` lists your jobs. One that has ended: `ddpdoctor analyze slurm-{job}.out`.",
        )
    if not rows:
        raise UserError(f"Slurm does not answer: {_failure_words(end)}", help="Try again, or see `scontrol ping`.")
    running = [row for row in rows if row.state == "RUNNING"]
    if not running:
        what = f"job {job} is not running: it is {rows[0].state}"
        raise UserError(what, help=f"For a job that has ended: `ddpdoctor analyze slurm-{job}.out`.")
    if len(running) > 1:
        choices = ", ".join(f"--slurm {row.shown}" for row in running[:8])
        raise UserError(f"job {job} has {len(running)} running parts", help=f"Give one of them: {choices}")
    (row,) = running
    uid = int(row.uid) if row.uid.isdecimal() else -1
    if os.geteuid() not in {0, uid}:
        try:
            owner = pwd.getpwuid(uid).pw_name
        except KeyError:
            owner = f"user {uid}"
        raise UserError(f"job {job} belongs to {owner}", help=f"Only {owner} may attach to it, on a login node.")
    end = _run_controller("scontrol", "show", "hostnames", row.nodes)
    nodes = end.out.split()
    if end.status != 0 or not nodes:
        raise UserError(f"the nodes of job {row.shown} cannot be listed: {_failure_words(end)}")
    tell(f"asking {count_of(len(nodes), 'node')} of job {row.shown}: {row.nodes}")
    step = (
        "srun", f"--jobid={row.number}", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none",
        f"--time={STEP_MINUTES}",
    )  # fmt: skip
    command = collector(python, name or f"slurm-{row.number}")
    commands = {node: (*step, f"--nodelist={node}", *command) for node in nodes}
    remedies = (
        (SRUN_LACKS, "install ddpdoctor where that node can find it, or name a Python that has it with --python"),
        (ANYTHING, "see `scontrol show node NODE` and `ssh NODE`"),
    )
    return ask_nodes(Way(name="srun", noun="node", remedies=remedies, env=_kept_environment()), commands, output)


def _kept_environment() -> dict[str, str]:
    left_out = ("SLURM_", "SRUN_", "DDPDOCTOR_RUN")
    return {name: text for name, text in os.environ.items() if name in _KEPT or not name.startswith(left_out)}


def _run_controller(*command: str) -> ChildEnd:
    try:
        return wait_for_program(start_program(command, _kept_environment()), CONTROLLER_LIMIT_S)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error.strerror}") from None


def _failure_words(end: ChildEnd) -> str:
    return hide_in_text(end.last_error) if end.status is not None else f"no answer within {CONTROLLER_LIMIT_S:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Which pods are asked, and where in them."""

    selector: str  # a label selector: "job-name=train"
    namespace: str | None = None
    container: str | None = None

    @property
    def place(self) -> tuple[str, ...]:
        return (f"--namespace={self.namespace}",) if self.namespace else ()


def attach_kubectl(pods: Pods, output: Path, python: str, name: str | None, tell: Callable[[str], None]) -> Path:
    """Have every pod look at its ranks, and return the folder. Raises ``UserError``."""
    # The names of the pods, each with why it cannot be asked, or an empty string
    if shutil.which("kubectl") is None:
        what = "kubectl is not on PATH here"
        raise UserError(what, help="Install it, or run `ddpdoctor attach` in every pod of the job.")
    process = start_program(("kubectl", "get", "pods", *pods.place, f"--selector={pods.selector}", "--output=json"))
    end = wait_for_program(process, SERVER_LIMIT_S)
    if end.status != 0:
        reason = hide_in_text(end.last_error) if end.status is not None else f"no answer within {SERVER_LIMIT_S:.0f} s"
        raise UserError(f"kubectl cannot list the pods: {reason}", help=_LOGIN.format(selector=pods.selector))
    try:
        items = json.loads(end.out)["items"]
        found = {str(item["metadata"]["name"]): _why_not(item.get("status") or {}, pods.container) for item in items}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError("kubectl did not print a list of pods", help="See `kubectl version`.") from None
    if not found:
        where = f"the namespace {pods.namespace}" if pods.namespace else "this namespace"
        what = f"no pod in {where} has the labels {pods.selector}"
        raise UserError(what, help="`kubectl get pods --all-namespaces --show-labels` lists them; give --namespace.")
    stopped = {pod: reason for pod, reason in found.items() if reason}
    commands = {pod: (*_exec(pods, pod), *collector(python, name)) for pod, reason in found.items() if not reason}
    tell(f"asking {count_of(len(commands), 'pod')} with {pods.selector}")
    kubectl = " ".join(("kubectl", "{}", *pods.place))
    see = f"see `{kubectl.format('describe')} pod NODE` and `{kubectl.format('logs')} NODE`"
    known = [NodeAnswer(node=pod, folder="", reason=reason, remedy=see) for pod, reason in stopped.items()]
    may = " ".join(("kubectl auth can-i create pods/exec", *pods.place))
    install = " ".join((*_exec(pods, "NODE"), "python -m pip install 'ddpdoctor[attach]'"))
    remedies = (
        (KUBECTL_LACKS, f"`{install}` (a wheel does too), or name a Python there that has it with --python"),
        (("forbidden", "Forbidden"), f"you need this permission: `{may}`"),
        (ANYTHING, see),
    )
    return ask_nodes(Way(name="kubectl exec", noun="pod", remedies=remedies), commands, output, known)


def _exec(pods: Pods, pod: str) -> tuple[str, ...]:
    container = (f"--container={pods.container}",) if pods.container else ()
    return ("kubectl", "exec", *pods.place, pod, *container, "--")


def _why_not(status: dict[str, Any], container: str | None) -> str:
    phase = str(status.get("phase", "Unknown"))
    parts = [part for part in status.get("containerStatuses") or () if container in {None, part.get("name")}]
    states = [(str(part.get("name")), part.get("state") or {}) for part in parts]
    if phase == "Running" and (not states or any("running" in state for _, state in states)):
        return ""
    said = []  # "trainer ended, OOMKilled, exit code 137", or "trainer waits, ImagePullBackOff"
    for name, state in states:
        waits, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waits:
            said.append([f"{name} waits", waits.get("reason")])
        elif ended:
            said.append([f"{name} ended", ended.get("reason"), f"exit code {ended.get('exitCode')}"])
    why = "; ".join(", ".join(filter(None, words)) for words in said)
    return f"the pod is {phase}" + (f": {why}" if why else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What came over a stream."""

    files: int
    whole: bool  # it came to its end
    error: str  # why nothing was seen, in the words of the ddpdoctor at the other end; empty: something was
    help: str


def send_look(look: Callable[[Path], Path], out: IO[bytes]) -> int:
    """Look at this machine, write what the look saved or why it saved nothing, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-attach-") as folder:
        try:
            saved = look(Path(folder))
            # All its files, ``attach.json`` as the last, and the end
            names = [str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()]
            names.sort(key=lambda name: (name == SUMMARY, name))
            for name in names:
                packed = zlib.compress((saved / name).read_bytes())
                _send(out, file=name, data=base64.b64encode(packed).decode())
            _send(out, files=len(names))
        except UserError as error:
            _send(out, error=error.message, help=error.help)
            return error.status
    return ExitStatus.OK


def receive_folder(lines: Iterable[bytes], folder: Path) -> Arrived:
    """Save the files that come over a stream, among other lines."""
    count, announced = 0, None
    error = remedy = ""
    for line in lines:
        at, record = line.find(b'{"stream": "' + MARK.encode()), None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line[at:]) if at >= 0 else None
        if not isinstance(record, dict):
            continue
        if "data" in record:
            count += _save(record, folder)
        elif "error" in record:
            error, remedy = str(record["error"]), str(record.get("help", ""))
        elif "files" in record:
            announced = record["files"]
    return Arrived(files=count, whole=announced == count, error=error, help=remedy)


def _send(out: IO[bytes], **record: Any) -> None:
    out.write(json.dumps({"stream": MARK, "version": VERSION, **record}).encode() + b"\n")
    out.flush()


def _save(record: dict[str, Any], folder: Path) -> bool:
    name = str(record.get("file"))
    if not _NAME.fullmatch(name):
        return False
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(record["data"], validate=True), MOST_BYTES)
    except (ValueError, TypeError, zlib.error):
        return False
    make_folder(folder)
    make_folder((folder / name).parent)
    write_whole(folder / name, content)
    return True
