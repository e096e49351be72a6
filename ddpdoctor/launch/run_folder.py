"""Makes and finds the folders that a run is written to, and writes their first files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pwd
import re
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.launch import number
from ddpdoctor.collect.proc import read_process
from ddpdoctor.collect.system import is_shared
from ddpdoctor.launch.command_line import TorchrunSettings
from ddpdoctor.launch.placement import Style
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import Run
from ddpdoctor.recorder.agent import LOG_FILE
from ddpdoctor.recorder.storage.files import open_new, parse_json, read_plain, remove, write_whole
from ddpdoctor.recorder.storage.secrets import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from ddpdoctor.launch.placement import Placement, WrapOptions

PARENT = Path("ddpdoctor-report")
PRIVATE = 0o700
REPORT_NAME = "report.json"
# A folder with one of these belongs to another run. A run that was cut short has no report.
RUN_MARKS = (REPORT_NAME, "run.json")
RUN_FILES = (
    *RUN_MARKS, "agent.jsonl", "consistency.json", "control", "control_flow.json", "end.json", "joint.json",
    "machine.json", "members.json", "moments.json", "nodes.json", "reached.json", "record.json", "replicas.json",
    "reserve", "source.json", "torchrun.log", "verdict.txt", "watch.json",
)  # fmt: skip
DUMPS = "dumps"  # reports that were made on demand while the job ran
# The subfolders that a run writes to. They must not be links or belong to another user.
RUN_FOLDERS = (DUMPS, "evidence", "gathered", "left", "nccl", "nodes", "present", "prints", "rings", "tuning")
# Errors of a working directory that is read-only, full, another user's, or gone.
_NO_PLACE = frozenset({errno.EACCES, errno.EDQUOT, errno.ENOENT, errno.ENOSPC, errno.EPERM, errno.EROFS})
_HELP = "Nothing was started. Choose another folder with --report-dir."
_HELP_OWN = "Nothing was started. Name a new folder with --report-dir."
RUN_NAME = "run.json"
NODES = "nodes"
# The only environment variables that a run folder holds.
STORED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG",
    "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NODE_RANK", "OMP_NUM_THREADS", "RANK",
    "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_RESTART_COUNT", "TORCH_DISTRIBUTED_DEBUG",
    "WORLD_SIZE",
)  # fmt: skip
PREFIX = "ddpdoctor-"
MIN_FREE_BYTES = 8 * 2**20  # our choice: the reserve for evidence plus the rings of three ranks
MIN_FREE_FILES = 64  # our choice: the number of files that a job of eight ranks writes


def make_default_dir(script: str, *, is_module: bool, now: datetime, label: str = "") -> Path:
    """Create ``ddpdoctor-report/<time>-<script>`` here, with a number if it is taken.

    Where nothing can be written, it is a temporary one: the job itself may need no place here. ``label`` separates the
    members of a job, whose clocks may show the same time.
    """
    base = f"{now:%Y%m%d-%H%M%S}-{name_stem(script, is_module=is_module)}{f'-node-{label}' if label else ''}"
    try:
        PARENT.mkdir(mode=PRIVATE, exist_ok=True)
        path = _make_new(PARENT / (base if number == 1 else f"{base}-{number}") for number in itertools.count(1))
        _check_parent(path)
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise refuse(PARENT, error) from error
        try:
            return Path(tempfile.mkdtemp(prefix=f"{PARENT}-{base}-"))
        except OSError:
            raise refuse(PARENT, error) from error
    with suppress(OSError):
        if has_space(path):
            write_whole(path / ".gitignore", "*\n")
    return path


def make_dump_dir(run_dir: Path) -> Path:
    """Create the folder of the next report made while a job runs: ``dumps/1``, ``dumps/2``. Raises ``UserError``."""
    parent = run_dir / DUMPS
    try:
        parent.mkdir(mode=PRIVATE, exist_ok=True)
        return _make_new(parent / str(number) for number in itertools.count(1))
    except OSError as error:
        what = f"{parent} is not writable: {error.strerror}"
        raise UserError(what, help="The evidence is taken, and the job goes on.") from error


def name_stem(script: str, *, is_module: bool) -> str:
    name = script.rpartition(".")[2] if is_module else Path(script).stem
    return re.sub(r"[^\w.-]", "_", name) or "job"


def make_private(path: Path) -> None:
    """Create a folder for its owner alone. Raises ``UserError`` if it, or what a run writes there, is not theirs."""
    is_new = False
    try:
        is_new = not path.exists()
        if path.parent == PARENT:
            PARENT.mkdir(mode=PRIVATE, exist_ok=True)
        if path.is_symlink():
            raise UserError(f"the report folder {path} is a link to {path.readlink()}", help=_HELP)
        path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        # Permissions are not enough: there are read-only mounts, full disks and quotas. A network file system or a
        # container may map the user, so the owner is that of a file that this process creates there.
        trial = path / f".writable-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            with os.fdopen(open_new(trial), "wb") as file:
                file.write(b"ddpdoctor")
                file.flush()
                owner = os.fstat(file.fileno()).st_uid
        finally:
            remove(trial)
        if (seen := path.lstat().st_uid) != owner:  # who could replace it with a link while the job runs
            raise UserError(f"the report folder {path} belongs to another user ({_user(seen)})", help=_HELP_OWN)
        for name in (*RUN_FILES, *RUN_FOLDERS):  # what is there already must be this user's own
            is_folder, what = name in RUN_FOLDERS, ""
            with suppress(FileNotFoundError):
                found = (path / name).lstat()
                if stat.S_ISLNK(found.st_mode):
                    what = f"is a link to {(path / name).readlink()}"
                elif not (stat.S_ISDIR if is_folder else stat.S_ISREG)(found.st_mode):
                    what = f"is not a {'folder' if is_folder else 'file'}"
                elif found.st_uid != owner:
                    what = f"belongs to another user ({_user(found.st_uid)})"
            if what:
                raise UserError(f"{name} in the report folder {path} {what}", help=_HELP)
        if not any(path.iterdir()):
            path.chmod(PRIVATE)
        if path.parent == PARENT:
            _check_parent(path)
    except OSError as error:
        if is_new:
            with suppress(OSError):  # it was not created, or somebody else is using it
                path.rmdir()
        raise refuse(path, error) from error


def make_report_dir(path: Path) -> Path:
    """Create the folder that the user named. An existing one is fine unless it holds a run."""
    make_private(path)
    filled = [name for name in ("rings", "evidence") if (path / name).is_dir() and any((path / name).iterdir())]
    if filled or any((path / name).exists() for name in RUN_FILES):
        raise UserError(f"the report folder {path} already holds another run", help=_HELP)
    with suppress(OSError):
        if not any(path.iterdir()) and has_space(path):
            write_whole(path / ".gitignore", "*\n")
    return path


def _check_parent(made: Path) -> None:
    """Refuse a ``ddpdoctor-report`` of another user, unless that user owns the working directory or is root."""
    trusted = {made.lstat().st_uid, 0, Path().stat().st_uid}
    if not {PARENT.lstat().st_uid, PARENT.stat().st_uid} <= trusted:
        raise UserError(f"the folder {PARENT} belongs to another user ({_user(PARENT.lstat().st_uid)})", help=_HELP)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _make_new(paths: Iterable[Path]) -> Path:
    """Create the first folder that does not exist yet. ``paths`` has no end."""
    for path in paths:
        with suppress(FileExistsError):
            path.mkdir(mode=PRIVATE)
            return path
    raise AssertionError  # pragma: no cover


def refuse(path: Path, error: OSError) -> UserError:
    return UserError(f"the report folder {path} is not writable: {error.strerror}", help=_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """What distinguishes one start of a job from another."""

    script: str
    is_module: bool
    command: tuple[str, ...]
    host: str
    env: Mapping[str, str]
    now: datetime


def make_member_folder(asked: Path | None, placement: Placement, starter: Starter) -> tuple[Path, Path]:
    """Create this member's private run folder (``asked``: --report-dir) and name its report. Raises ``UserError``."""
    # The label in this member's file names: empty for the first, else its number, or its host without one.
    label = str(placement.number)
    if placement.alone or placement.number == 0:
        label = ""
    elif placement.number is None:
        label = re.sub(r"[^\w.-]", "_", starter.host)
    own_folder, report_name = (Path(NODES, label), f"node-{label}.json") if label else (Path(), REPORT_NAME)
    if asked is None and placement.batch_job:
        # The default folder of a Slurm step is the same for all members, unless an older job used it.
        stem = name_stem(starter.script, is_module=starter.is_module)
        base = PARENT / f"slurm-{placement.batch_job}-{stem}"
        former = _read_run(base / own_folder)
        asked = base if former is None or _is_former_start(former, starter) else None
    if asked is None:
        folder = make_default_dir(starter.script, is_module=starter.is_module, now=starter.now, label=label)
        return folder, folder / report_name
    # Members that share the folder arrive at any time. So they must not move the files of an earlier start of the job,
    # and all must choose the same new folder in it.
    base = asked
    if any(run and _is_former_start(run, starter) for run in (_read_run(asked), _read_run(asked / own_folder))):
        restarts = number(starter.env, "SLURM_RESTART_COUNT")
        bases = (asked / f"restart-{i}" for i in (itertools.repeat(restarts) if restarts else itertools.count(1)))
        base = next(base for base in bases if restarts or _read_run(base / own_folder) is None)
    if not label or (placement.one_host and placement.number is None and _claim(base)):
        return make_report_dir(base), base / REPORT_NAME
    run, job = _read_run(base), starter.env.get("SLURM_JOB_ID")
    if job and run is not None and run.environment.get("SLURM_JOB_ID") != job:
        what = f"the report folder {base} already holds another run"
        raise UserError(what, help="Nothing was started. Choose another folder with --report-dir.")
    make_private(base)
    make_private(base / NODES)
    if placement.number is None:  # its host, with a suffix if another member there uses that
        names = (label if i == 1 else f"{label}-{i}" for i in itertools.count(1))
        label = next(name for name in names if _claim(base / NODES / name))
    return make_report_dir(base / NODES / label), base / f"node-{label}.json"


def _is_former_start(run: Run, starter: Starter) -> bool:
    """Return whether a run is this same job before a requeue, or this same container before a restart."""
    env = starter.env
    if job := env.get("SLURM_JOB_ID"):
        before, restarts = (number(variables, "SLURM_RESTART_COUNT") or 0 for variables in (run.environment, env))
        return run.environment.get("SLURM_JOB_ID") == job and before < restarts
    same = (run.host, run.command) == (starter.host, hide_secrets(starter.command))
    return "KUBERNETES_SERVICE_HOST" in env and same


def _claim(folder: Path) -> bool:
    """Lock a folder as long as this process lives (children do not inherit that), unless another here holds it."""
    make_private(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        pass  # a file system without such locks
    return True


def _read_run(folder: Path) -> Run | None:
    """Return a folder's run.json, None if there is none, or an empty record if it cannot be read."""
    try:
        return decode(Run, parse_json(read_plain(folder / RUN_NAME)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, WrongValue):
        return Run()


def write_run_file(folder: Path, options: WrapOptions, started_at: str, launched_ns: int) -> None:
    """Write run.json: what was started, when and how."""
    level = options.debug_level or os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    placement, own = options.placement, read_process(os.getpid())
    environment = {**os.environ, **dict(placement.variables)}
    shape: dict[str, Any] = {}  # how many ranks are requested; a command starts as many as it likes
    if placement.style is Style.TORCHRUN:
        torchrun = TorchrunSettings(options.split.torchrun, os.environ)
        nnodes = torchrun.nnodes if torchrun.texts["--nnodes"] else (1, 1)
        nproc, node_rank = torchrun.number("--nproc-per-node"), torchrun.number("--node-rank")
        shape = {"nproc": nproc, "nnodes": nnodes[0] if nnodes else None, "node_rank": node_rank}
    elif placement.style is Style.RANK:
        shape = {"nproc": 1, "nnodes": placement.nodes, "node_rank": placement.number, "world_size": placement.expected}
    # Read torch's version from its file: importing torch takes a second, and importlib.metadata is slow too
    torch, version = find_spec("torch"), None
    with suppress(OSError, UnicodeDecodeError):
        text = (Path(torch.origin).parent / "version.py").read_text() if torch and torch.origin else ""
        version = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    run = Run(
        command=hide_secrets(options.command), started_at=started_at, launched_ns=launched_ns,
        hang_timeout_s=options.hang_timeout_s, debug_level=level.upper(), check_every=options.ranks.check_every,
        allow_different=options.allow_different, speed=options.speed, host=socket.gethostname(),
        torch_version=version[1] if version else None,
        environment={name: environment[name] for name in STORED_VARIABLES if name in environment}, entry=options.entry,
        launcher=placement.style.value,
        run_dir="" if folder == options.report_dir.resolve() else str(options.report_dir.resolve()),
        watcher_pid=os.getpid(), watcher_ticks=own.start_ticks if own is not None else None, **shape,
    )  # fmt: skip
    write_whole(folder / RUN_NAME, json.dumps(encode(run), indent=1))


def choose_folder(run_dir: Path) -> Path:
    """Return where recorders write: the run folder, or a local one if that is shared or full."""
    shared = is_shared(run_dir)
    if not shared and has_space(run_dir):
        return run_dir
    try:
        local = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError:
        return run_dir
    if shared or has_space(local):
        return local
    local.rmdir()
    return run_dir


def has_space(folder: Path) -> bool:
    """Return whether the folder's file system has room for a record; True if that is unknown."""
    try:
        free = os.statvfs(folder)
    except OSError:
        return True
    has_files = not free.f_files or free.f_favail >= MIN_FREE_FILES  # a file system without inode counts says 0 of 0
    has_bytes = free.f_bavail * free.f_frsize >= MIN_FREE_BYTES
    return has_files and has_bytes and not free.f_flag & os.ST_RDONLY


def copy_back(folder: Path, run_dir: Path) -> None:
    """Copy a local record into the run folder if there is room."""
    if folder != run_dir and has_space(run_dir):
        with contextlib.suppress(OSError):
            shutil.copytree(folder, run_dir, dirs_exist_ok=True)


def copy_elsewhere(folder: Path, files: Mapping[str, str]) -> Path | None:
    """Return a copy of a run folder plus files that could not be written to it, or None if there is no room."""
    try:
        copy = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError:
        return None
    try:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        for name, text in files.items():
            (copy / name).write_text(text)
    except OSError:
        shutil.rmtree(copy, ignore_errors=True)
        return None
    return copy


def read_launcher_log(folder: Path) -> str:
    """Return torchrun's messages and traceback. Empty if none were kept or they cannot be read."""
    try:
        return read_plain(folder / LOG_FILE).decode("utf-8", "replace")
    except OSError:
        return ""
