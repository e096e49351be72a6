"""Gives each member of a job its own run folder, even if members share a file system or a job restarts.

The first member uses the requested folder itself. Member 3 records in ``nodes/3`` inside it, and writes its report to
``node-3.json`` in the requested folder. After a restart by a batch system or Kubernetes, all of it is in ``restart-1``.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.launch.folders.report_dir import (
    PARENT,
    REPORT_NAME,
    make_default_dir,
    make_private,
    make_report_dir,
    name_stem,
)
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Run
from ddpdoctor.recorder.storage.files import parse_json, read_plain
from ddpdoctor.recorder.storage.secrets import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement

RUN_NAME = "run.json"
NODES = "nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFolder:
    """The folder in which a member records, and the file for its report."""

    folder: Path
    report: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """What distinguishes one start of a job from another."""

    script: str
    is_module: bool
    command: tuple[str, ...]
    host: str
    env: Mapping[str, str]
    now: datetime


def make_member_folder(asked: Path | None, placement: Placement, starter: Starter) -> MemberFolder:
    """Create this member's private run folder; ``asked`` is --report-dir.

    Raises ``UserError`` if it holds another run or is not writable.
    """
    label = _label(placement, starter.host)
    if asked is None:
        asked = _batch_folder(placement, label, starter)
    if asked is None:
        folder = make_default_dir(starter.script, is_module=starter.is_module, now=starter.now, label=label)
        return MemberFolder(folder=folder, report=folder / _report_name(label))
    base = _find_start(asked, label, starter)
    if not label or (placement.one_host and placement.number is None and _claim(base)):
        return MemberFolder(folder=make_report_dir(base), report=base / REPORT_NAME)
    _refuse_other_job(base, starter.env)
    make_private(base)
    make_private(base / NODES)
    own = _own_name(base / NODES, label) if placement.number is None else label
    return MemberFolder(folder=make_report_dir(base / NODES / own), report=base / _report_name(own))


def _label(placement: Placement, host: str) -> str:
    """Return the label in this member's file names: empty for the first, else its number, or its host without one."""
    if placement.alone or placement.number == 0:
        return ""
    return re.sub(r"[^\w.-]", "_", host) if placement.number is None else str(placement.number)


def _report_name(label: str) -> str:
    return f"node-{label}.json" if label else REPORT_NAME


def _batch_folder(placement: Placement, label: str, starter: Starter) -> Path | None:
    """Return the default folder of a Slurm step, the same for all members, or None if an older job used it."""
    if not placement.batch_job:
        return None
    stem = name_stem(starter.script, is_module=starter.is_module)
    base = PARENT / f"slurm-{placement.batch_job}-{stem}"
    former = _read_run(_own(base, label))
    return base if former is None or _is_former_start(former, starter) else None


def _own(base: Path, label: str) -> Path:
    return base / NODES / label if label else base


def _find_start(asked: Path, label: str, starter: Starter) -> Path:
    """Return the folder for this start of the job: the requested one, or one inside it if that has an earlier start.

    Members that share the folder arrive at any time. So they must not move its files, and all must choose the same one.
    """
    found = [run for run in (_read_run(asked), _read_run(_own(asked, label))) if run is not None]
    if not any(_is_former_start(run, starter) for run in found):
        return asked
    if restarts := _restarts(starter.env):
        return asked / f"restart-{restarts}"
    numbers = itertools.count(1)
    return next(base for i in numbers if _read_run(_own(base := asked / f"restart-{i}", label)) is None)


def _is_former_start(run: Run, starter: Starter) -> bool:
    """Return whether a run is this same job before a requeue, or this same container before a restart."""
    env = starter.env
    if job := env.get("SLURM_JOB_ID"):
        return run.environment.get("SLURM_JOB_ID") == job and _restarts(run.environment) < _restarts(env)
    same = (run.host, run.command) == (starter.host, hide_secrets(starter.command))
    return "KUBERNETES_SERVICE_HOST" in env and same


def _restarts(env: Mapping[str, Any]) -> int:
    """Return how often Slurm has restarted a job."""
    text = str(env.get("SLURM_RESTART_COUNT", ""))
    return int(text) if text.isascii() and text.isdecimal() else 0


def _refuse_other_job(base: Path, env: Mapping[str, str]) -> None:
    """Raise ``UserError`` if the folder belongs to another Slurm job; the first member would refuse it too."""
    run, job = _read_run(base), env.get("SLURM_JOB_ID")
    if job and run is not None and run.environment.get("SLURM_JOB_ID") != job:
        raise UserError(
            f"the report folder {base} already holds another run",
            help="Nothing was started. Choose another folder with --report-dir.",
        )


def _own_name(nodes: Path, host: str) -> str:
    """Return a name for a member without a number: its host, with a suffix if another member there uses that."""
    for i in itertools.count(1):
        name = host if i == 1 else f"{host}-{i}"
        if _claim(nodes / name):
            return name
    raise AssertionError  # pragma: no cover: count() has no end


def _claim(folder: Path) -> bool:
    """Lock a folder for the lifetime of this process; return False if another process on this host holds it.

    The descriptor stays open, and children do not inherit it. If the file system has no such locks, claiming succeeds.
    """
    make_private(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        pass
    return True


def _read_run(folder: Path) -> Run | None:
    """Return a folder's run.json, None if it is missing, or an empty record if it cannot be read."""
    try:
        return decode(Run, parse_json(read_plain(folder / RUN_NAME)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, WrongValue):
        return Run()
