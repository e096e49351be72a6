"""From the options of ``attach`` to a saved folder: find the job, look twice, compare, save."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.attach.find import choose_job, find_jobs
from ddpdoctor.attach.look import look_at
from ddpdoctor.attach.moving import compare_looks, of_job
from ddpdoctor.attach.save import make_attach_folder, save_look, save_summary
from ddpdoctor.model.attached import AttachedJob

if TYPE_CHECKING:
    from collections.abc import Callable

GAP_S = 3.0
"""Our choice, as py-spy's users do by hand: most jobs take several steps in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which job to look at, and where to save what was seen."""

    pid: int | None = None
    job: str | None = None
    output: Path = Path()
    """The folder in which a new one is made."""
    gap_s: float = GAP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Where everything was saved, and what was seen in short."""

    folder: Path
    job: AttachedJob


def attach(options: Options, pause: Callable[[float], None] = time.sleep) -> Attached:
    """Look at a running job twice and save what was seen. Raises UserError if there is no job, or not one only."""
    job = choose_job(find_jobs(), options.pid, options.job)
    began_ns = time.time_ns()
    folder = make_attach_folder(options.output, began_ns)
    first = look_at(job, 1)
    files = save_look(folder, first)
    pause(options.gap_s)
    second = look_at(job, 2, first.store)
    files += save_look(folder, second)
    movements = compare_looks(first, second)
    seen = AttachedJob(
        host=socket.gethostname(),
        wall_ns=began_ns,
        job=job.identity,
        world_size=job.world_size,
        ranks=job.ranks,
        looks=2,
        gap_s=options.gap_s,
        movement=of_job(movements),
        movements=movements,
        refused=tuple(dict.fromkeys((*first.refused, *second.refused))),
        files=tuple(files),
    )
    save_summary(folder, seen)
    return Attached(folder=folder, job=seen)
