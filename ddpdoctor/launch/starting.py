"""Starts the launcher with the recorder loaded in its processes, or becomes it under another ``wrap``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.collect import proc
from ddpdoctor.collect.proc import safe_flags
from ddpdoctor.collect.run_files import NCCL_FOLDER
from ddpdoctor.collect.software import read_conf_files
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.launch.placement import Style
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.agent import OWN_VARIABLE
from ddpdoctor.recorder.storage.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddpdoctor.launch.command_line import ChosenLevel
    from ddpdoctor.launch.placement import WrapOptions

DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
# Variables of another job's recorder, which are set if a rank of that job started this ``wrap``.
_OF_ANOTHER_JOB = (
    "DDPDOCTOR_AGENT", "DDPDOCTOR_JOINED", "DDPDOCTOR_RANK_PID", "DDPDOCTOR_GIVEN", "DDPDOCTOR_MASTER",
    "DDPDOCTOR_DETAIL", OWN_VARIABLE,
)  # fmt: skip
# Tells recorders to turn DETAIL on. A Python without a recorder (``python -I``) then runs without DETAIL, because only
# the recorder makes it safe.
#
# A command gets torch's own variable instead: it may start ranks on hosts where the recorder cannot be loaded, and all
# ranks must have the same level. By default it gets none if there is a GPU, because it may use NCCL.
DETAIL_VARIABLE = "DDPDOCTOR_DETAIL"
NCCL_LOG_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
# Our choice: DETAIL opens five more descriptors per rank and group, and twice that with each further rank.
MIN_FILES = 128
# Our choice: DETAIL takes 150 MiB more per group, because each of Gloo's threads has a stack and a malloc arena.
MIN_ADDRESS_SPACE_BYTES = 16 * 2**30
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # the drivers of NVIDIA and of AMD, whose RCCL reads the same variables
MAX_ANCESTORS = 100
NCCL_LIMIT_S = 600  # torch's ``default_pg_nccl_timeout``. That of other backends is 30 min.


def notes_of(options: WrapOptions, env: Mapping[str, str]) -> Iterator[str]:
    """Yield what to say before the start: what was chosen for the user, and what may cost time or a diagnosis."""
    if options.placement.note:
        yield options.placement.note
    level = "--debug-level DETAIL (Gloo only)" if options.debug_level == "AUTO" else None
    if chosen := ", ".join(filter(None, (options.nproc_note, level))):
        yield f"chose {chosen}"
    if (options.debug_level or env.get(DEBUG_VARIABLE, "").upper()) == "DETAIL":  # measured: docs/what-it-costs.md
        yield "DETAIL makes the host wait for all ranks before each NCCL collective. Steps may take twice as long"
    if (limit_s := round(options.hang_timeout_s)) >= NCCL_LIMIT_S:
        longest = "torch ends a wait after 10 min over NCCL and 30 min over Gloo, unless the script sets another limit"
        yield f"--hang-timeout is {limit_s} s, but {longest}. torch may end the job before ddpdoctor reports a hang"


def start_launcher(
    options: WrapOptions, folder: Path, mark: Mapping[str, str], in_child: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Start the launcher, with ``mark`` in its environment; recorders write to ``folder``. Raises ``UserError``.

    ``in_child`` runs in the new process before it becomes the launcher, and must not raise.
    """
    command, placement = launch_command(options), options.placement
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_JOB}
    bootstrap = str(Path(__file__).resolve().parents[1] / "recorder" / "bootstrap")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (bootstrap, environment.get("PYTHONPATH"))))
    environment |= {**dict(placement.variables), **mark, **options.ranks.variables()}
    if placement.style is Style.TORCHRUN:
        environment[OWN_VARIABLE] = "1"
    has_gpu, is_command = any(map(os.path.lexists, GPU_DRIVERS)), placement.style is Style.COMMAND
    if has_gpu:
        environment |= nccl_log_environment(environment, folder)
    environment = debug_environment(environment, options.debug_level, is_command=is_command, has_gpu=has_gpu)
    try:
        # preexec_fn is unsafe with threads, but there are none yet.
        return subprocess.Popen(command, env=environment, preexec_fn=in_child)  # noqa: PLW1509
    except OSError as error:
        raise cannot_run(command[0], error) from error


def cannot_run(command: str, error: OSError) -> UserError:
    return UserError(
        f"the command {command} cannot be run: {error.strerror}",
        help="Nothing was started. A script needs a first line like `#!/bin/bash`, or its interpreter as the command: "
        "`ddpdoctor wrap -- bash SCRIPT`.",
    )


def launch_command(options: WrapOptions) -> list[str]:
    split, is_rank = options.split, options.placement.style is Style.RANK
    script = [split.script, *split.script_args]
    if split.is_command or (split.no_python and is_rank):
        return script
    module = ["-m"] if split.is_module else []
    if is_rank:
        return [sys.executable, "-u", *module, *script]  # as torchrun runs a script
    flags = module + (["--no-python"] if split.no_python else [])
    return [sys.executable, *safe_flags(), "-m", "torch.distributed.run", *split.torchrun, *flags, *script]


def debug_environment(
    env: dict[str, str], level: ChosenLevel | None, *, is_command: bool, has_gpu: bool
) -> dict[str, str]:
    others = {name: value for name, value in env.items() if name != DEBUG_VARIABLE}
    if level is None:
        return env
    if level in {"AUTO", "DETAIL"} and not is_command:
        return others | {DETAIL_VARIABLE: "gloo" if level == "AUTO" else "always"}
    if level == "AUTO":
        return others if has_gpu else others | {DEBUG_VARIABLE: "DETAIL"}
    return others | {DEBUG_VARIABLE: level}


def choose_debug_level(
    asked: ChosenLevel | None, env: Mapping[str, str], *, alone: bool, for_speed: bool = False
) -> ChosenLevel | None:
    """Choose DETAIL over Gloo ("AUTO") if nothing is set and there is room. None keeps the environment's setting."""
    if asked is not None or env.get(DEBUG_VARIABLE):
        return asked
    if alone:  # nodes must agree on the level, so one with little room does not choose by itself
        least = {resource.RLIMIT_NOFILE: MIN_FILES, resource.RLIMIT_AS: MIN_ADDRESS_SPACE_BYTES}
        limits = {limit: resource.getrlimit(limit)[0] for limit in least}  # the ranks inherit them
        if any(soft != resource.RLIM_INFINITY and soft < least[limit] for limit, soft in limits.items()):
            return None
    return "OFF" if for_speed else "AUTO"  # DETAIL would make small collectives take twice as long


def nccl_log_environment(env: Mapping[str, str], folder: Path, system: System | None = None) -> dict[str, str]:
    """Return the variables that make NCCL log its warnings to the run folder, or none if the user configured its log.

    This adds nothing to the job's output: without NCCL_DEBUG, NCCL writes nothing, and torch's errors repeat its last
    warning anyway.
    """
    system = system or System(env=env)
    if any(env.get(name) for name in NCCL_LOG_VARIABLES):
        return {}
    files = read_conf_files(system, ReadingPlan(sections=frozenset()))
    if any(name in file.variables for file in files for name in NCCL_LOG_VARIABLES):
        return {}
    target = folder / NCCL_FOLDER
    make_folder(target)
    return {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{str(target).replace('%', '%%')}/%h.%p.log"}


def find_outer_run(env: Mapping[str, str]) -> Path | None:
    """Return the run folder of a ``wrap`` above this process, if any; variables alone may be another job's."""
    watcher = env.get("DDPDOCTOR_WATCHER", "")
    folder = Path(env.get("DDPDOCTOR_RUN", ""))
    if not watcher.isdecimal() or not (folder / "run.json").is_file():
        return None
    pid = os.getppid()
    for _ in range(MAX_ANCESTORS):
        if pid == int(watcher):
            return folder
        process = proc.read_process(pid)
        if process is None or process.ppid <= 0:
            return None
        pid = process.ppid
    return None


def become_launcher(options: WrapOptions) -> NoReturn:
    """Replace this process with the launcher: its streams, signals and status count. Raises ``UserError``."""
    command = launch_command(options)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)  # noqa: S606 - replacing this process is the purpose
    except OSError as error:
        raise cannot_run(command[0], error) from error
