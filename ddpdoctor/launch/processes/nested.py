"""A ``wrap`` inside another one: it runs its job unchanged, because the outer one watches all of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.collect import proc
from ddpdoctor.launch.processes.starting import cannot_run, launch_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command.options import WrapOptions

MAX_ANCESTORS = 100


def find_outer_run(env: Mapping[str, str]) -> Path | None:
    """Return the run folder of the ``wrap`` that this process runs under, or None if there is none.

    Variables may be left over from another job, so that ``wrap`` must also be an ancestor process.
    """
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
    """Replace this process with the launcher, so that streams, signals and exit status are the launcher's own.

    Raises:
        UserError: the system cannot run the command.
    """
    command = launch_command(options)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)  # noqa: S606 - replacing this process is the purpose
    except OSError as error:
        raise cannot_run(command[0], error) from error
