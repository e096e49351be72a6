"""Has the nodes of a job look at their own ranks, all at once, and saves what they send in one folder."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from ddpdoctor.attach.find import NO_JOB
from ddpdoctor.attach.save import make_attach_folder, save_nodes
from ddpdoctor.attach.stream import receive_folder
from ddpdoctor.model.attached import AskedNodes, NodeAnswer
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import count_of
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.attach.stream import Arrived

LIMIT_S = 60.0
"""Our choice: a look takes 5 to 25 s, and on a node whose file system is slow Python starts in many more."""
AT_ONCE = 64
"""Our choice: each is a process here, and a step for Slurm's controller."""
END_S = 3.0
"""How long a program that is stopped has to stop what it runs on its node."""
POLL_S = 0.05
NO_RANK = "no rank of the job runs there"
SEE_LOG = "if its ranks have ended, the log of the job says how: `ddpdoctor analyze LOG`"
_CONSEQUENCES = re.compile(
    r"exited with exit code|job step aborted|application launch failed|step .* cancelled|command terminated|^defaulted",
    re.IGNORECASE,
)
"""Lines that say again that a program ended, and not why."""
_OF_ONE_NODE = re.compile(r"^(srun|slurmstepd\S*): error: | for StepId=\S+| on node \S+(?=:)")
"""What differs between nodes that are not reached for one reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How nodes are asked."""

    name: str
    """"srun" or "kubectl exec"."""
    noun: str
    """What is asked: "node" or "pod"."""
    remedy: Callable[[str], str]
    """What to do about a node that sent nothing for a reason; NODE stands for its name."""
    env: Mapping[str, str] | None = None


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A program that asks one node."""

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
    """Return the command that looks at the ranks of one node and sends what it saw."""
    return (
        python, "-m", "ddpdoctor", "attach", "--node-only", "--folder", "-", *(("--job", job) if job else ()),
    )  # fmt: skip


def ask_nodes(
    way: Way,
    commands: Mapping[str, Sequence[str]],
    output: Path,
    known: Sequence[NodeAnswer] = (),
    limit_s: float = LIMIT_S,
) -> Path:
    """Run the command of each node, and return the folder with one folder for each node that answered.

    ``known`` are nodes that cannot be asked. Raises UserError if no node sent anything.
    """
    wall_ns = time.time_ns()
    folder = make_attach_folder(output, wall_ns)
    try:
        answers = sorted((*_ask_all(way, commands, folder, limit_s), *known), key=lambda one: one.node)
        asked = AskedNodes(wall_ns=wall_ns, asked_by=way.name, nodes=tuple(answers))
        if any(one.folder for one in answers):
            save_nodes(folder, asked)
            return folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # nothing has come, or not yet
    raise UserError(
        f"{_of_all(len(answers), way.noun)} sent what it saw", help="\n".join(one.line() for one in asked.unseen())
    )


def _of_all(count: int, noun: str) -> str:
    return f"the only {noun} has not" if count == 1 else f"none of {count_of(count, noun)}"


def _ask_all(way: Way, commands: Mapping[str, Sequence[str]], folder: Path, limit_s: float) -> list[NodeAnswer]:
    waiting, running, answers = deque(commands.items()), list[_Asked](), list[NodeAnswer]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(_start(*waiting.popleft(), way, limit_s))
            ended = [one for one in running if one.has_ended()]
            running = [one for one in running if one not in ended]
            answers += [_read(one, way, folder, limit_s) for one in ended]
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.process.terminate()
    return answers


def _start(node: str, command: Sequence[str], way: Way, limit_s: float) -> _Asked:
    """Start it apart from this terminal: a Ctrl-C here must not leave half of what it runs elsewhere."""
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read when the program has ended
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=way.env or os.environ, start_new_session=True
    )
    return _Asked(node=node, process=process, out=out, err=err, until_s=time.monotonic() + limit_s)


def _read(one: _Asked, way: Way, folder: Path, limit_s: float) -> NodeAnswer:
    """Save what a node sent, also if it did not come to the end."""
    own = re.sub(r"[^A-Za-z0-9._-]", "_", one.node)
    with one.out, one.err:
        one.out.seek(0)
        arrived = receive_folder(one.out, folder / own)
        one.err.seek(0)
        said = one.err.read(2**20).decode(errors="replace")
    if arrived.error:
        gone = arrived.error.startswith(NO_JOB)
        reason, remedy = (NO_RANK, SEE_LOG) if gone else (arrived.error, arrived.help)
        return NodeAnswer(node=one.node, folder="", reason=reason, remedy=remedy)
    reason = "" if arrived.whole else _reason(one, arrived, said, limit_s)
    return NodeAnswer(
        node=one.node, folder=own if arrived.files else "", reason=reason,
        remedy=way.remedy(reason) if reason else "",
    )  # fmt: skip


def _reason(one: _Asked, arrived: Arrived, said: str, limit_s: float) -> str:
    if one.is_late:
        part = f", after {count_of(arrived.files, 'file')}" if arrived.files else ""
        return f"no answer within {limit_s:.0f} s{part}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    causes = [line for line in lines if not _CONSEQUENCES.search(line)]
    last = (causes or lines or [f"it ended with status {one.process.returncode}"])[-1]
    return hide_in_text(_OF_ONE_NODE.sub("", last))[:300]
