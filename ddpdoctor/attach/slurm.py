"""Asks the nodes of a Slurm job: one step a node beside the job's own, so that a node that is down stops no other.

A single step over all nodes is aborted on all of them as soon as one of them cannot be started (srun, 22.05).
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.attach.nodes import LIMIT_S, Way, ask_nodes, collector
from ddpdoctor.collect.bounded import start_program, wait_for_program
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import count_of
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.collect.bounded import ChildEnd

TOOLS = ("squeue", "scontrol", "srun")
CONTROLLER_LIMIT_S = 30.0
"""Our choice: a controller that is busy answers within ten seconds (its MessageTimeout)."""
STEP_MINUTES = 3
"""Slurm ends our steps after this time, also where this process cannot any more."""
_JOB = re.compile(r"\d+(_\d+|\+\d+)?")
_FIELDS = "%A|%i|%T|%U|%N"
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Inside a job, other variables of Slurm would be options of srun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of squeue."""

    number: str
    shown: str
    state: str
    uid: int
    nodes: str


def attach_slurm(
    job: str, output: Path, python: str, name: str | None, tell: Callable[[str], None], limit_s: float = LIMIT_S
) -> Path:
    """Have every node of a job look at its ranks, and return the folder. Raises UserError if that is impossible."""
    row = _find(job)
    nodes = _list_nodes(row)
    tell(f"asking {count_of(len(nodes), 'node')} of job {row.shown}: {row.nodes}")
    command = collector(python, name or f"slurm-{row.number}")
    commands = {node: (*_step(row.number, node), *command) for node in nodes}
    return ask_nodes(
        Way(name="srun", noun="node", remedy=_remedy, env=_environment()), commands, output, limit_s=limit_s
    )


def _step(job: str, node: str) -> tuple[str, ...]:
    return (
        "srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mpi=none",
        "--cpu-bind=none", f"--time={STEP_MINUTES}",
    )  # fmt: skip


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(("SLURM_", "SRUN_", "DDPDOCTOR_RUN"))
    }


def _find(job: str) -> _Row:
    """Return the job, which runs and may be joined."""
    if not _JOB.fullmatch(job):
        raise UserError(f"{job} is not the number of a Slurm job", help="`squeue --me` lists your jobs.")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"{missing[0]} is not on PATH here",
            help="Run it where you submit jobs, or run `ddpdoctor attach` on every node of the job.",
        )
    end = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={_FIELDS}")
    rows = [_parse(line) for line in end.out.splitlines() if line.count("|") == 4]
    if not rows and (end.status == 0 or "invalid job id" in end.err.lower()):
        raise UserError(
            f"Slurm does not know job {job}",
            help=f"`squeue --me` lists your jobs. One that has ended: `ddpdoctor analyze slurm-{job}.out`.",
        )
    if not rows:
        raise UserError(f"Slurm does not answer: {_words(end)}", help="Try again, or see `scontrol ping`.")
    return _the_one(job, rows)


def _the_one(job: str, rows: list[_Row]) -> _Row:
    running = [row for row in rows if row.state == "RUNNING"]
    if not running:
        raise UserError(
            f"job {job} is not running: it is {rows[0].state}",
            help=f"For a job that has ended: `ddpdoctor analyze slurm-{job}.out`.",
        )
    if len(running) > 1:
        choices = ", ".join(f"--slurm {row.shown}" for row in running[:8])
        raise UserError(f"job {job} has {len(running)} running parts", help=f"Give one of them: {choices}")
    if os.geteuid() not in {0, running[0].uid}:
        owner = _user(running[0].uid)
        raise UserError(f"job {job} belongs to {owner}", help=f"Only {owner} may attach to it, on a login node.")
    return running[0]


def _parse(line: str) -> _Row:
    number, shown, state, uid, nodes = line.strip().split("|")
    return _Row(number=number, shown=shown, state=state, uid=int(uid) if uid.isdecimal() else -1, nodes=nodes)


def _list_nodes(row: _Row) -> list[str]:
    end = _ask("scontrol", "show", "hostnames", row.nodes)
    if end.status != 0 or not end.out.split():
        raise UserError(f"the nodes of job {row.shown} cannot be listed: {_words(end)}")
    return end.out.split()


def _ask(*command: str) -> ChildEnd:
    try:
        return wait_for_program(start_program(command, _environment()), CONTROLLER_LIMIT_S)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error.strerror}") from None


def _words(end: ChildEnd) -> str:
    return hide_in_text(end.last_error) if end.status is not None else f"no answer within {CONTROLLER_LIMIT_S:.0f} s"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _remedy(reason: str) -> str:
    """Return what to do about a node that sent nothing."""
    if any(words in reason for words in ("No module named", "No such file", "Permission denied")):
        return "install ddpdoctor where that node finds it, or name a Python there that has it with --python"
    return "see `scontrol show node NODE` and `ssh NODE`"
