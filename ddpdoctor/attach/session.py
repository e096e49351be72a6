"""From the options of ``attach`` to a saved folder: find the job, look twice, compare, save."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.attach.find import choose_job, find_jobs
from ddpdoctor.attach.look import compare_looks, look_at, of_job
from ddpdoctor.model.attached import AttachedJob
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.attach.look import JobLook
    from ddpdoctor.model.attached import AskedNodes

GAP_S = 3.0  # our choice, as py-spy's users do by hand: most jobs take several steps in that time
SUMMARY = "attach.json"
NODES = "nodes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Where everything was saved, and what was seen in short."""

    folder: Path
    job: AttachedJob


def attach(
    output: Path, pid: int | None = None, job: str | None = None, *, gap_s: float = GAP_S,
    pause: Callable[[float], None] = time.sleep,
) -> Attached:  # fmt: skip
    """Look twice at the running job with this process or name, and save what was seen in a new folder in ``output``.

    Raises UserError if there is no such job, or more than one.
    """
    chosen = choose_job(find_jobs(), pid, job)
    began_ns = time.time_ns()
    folder = make_attach_folder(output, began_ns)
    first = look_at(chosen, 1)
    files = save_look(folder, first)
    pause(gap_s)
    second = look_at(chosen, 2, first.store)
    files += save_look(folder, second)
    movements = compare_looks(first, second)
    seen = AttachedJob(
        host=socket.gethostname(),
        wall_ns=began_ns,
        job=chosen.identity,
        world_size=chosen.world_size,
        ranks=chosen.ranks,
        looks=2,
        gap_s=gap_s,
        movement=of_job(movements),
        movements=movements,
        refused=tuple(dict.fromkeys((*first.refused, *second.refused))),
        files=tuple(files),
    )
    write_whole(folder / SUMMARY, _json(encode(seen)))
    return Attached(folder=folder, job=seen)


def make_attach_folder(parent: Path, wall_ns: int) -> Path:
    """Make ``ddpdoctor-attach-<UTC time>`` in a folder. Raises UserError if that is impossible."""
    stem = "ddpdoctor-attach-" + time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall_ns // 10**9))
    for number in range(1, 100):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            os.mkdir(folder, 0o700)  # noqa: PTH102 - exactly this mode
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"no folder can be made in {parent}: {error.strerror or error}",
                help="Give another folder with --folder.",
            ) from None
        return folder
    raise UserError(f"{parent} has too many folders named {stem}")


def save_look(folder: Path, look: JobLook) -> list[str]:
    """Write one look into its own folder, and return the names of its files."""
    below = f"look_{look.number}"
    make_folder(folder / below)
    contents: dict[str, bytes] = dict(look.raw)
    for rank in look.ranks:
        contents[f"rank_{rank.rank.rank}_pid_{rank.rank.pid}.json"] = _json(encode(rank))
    if look.store is not None:
        contents["store.json"] = _json(encode(look.store))
    for name, content in contents.items():
        write_whole(folder / below / name, content)
    return [f"{below}/{name}" for name in sorted(contents)]


def save_nodes(folder: Path, nodes: AskedNodes) -> None:
    """Write ``nodes.json``."""
    write_whole(folder / NODES, _json(encode(nodes)))


def _json(plain: Any) -> bytes:
    return (json.dumps(plain, indent=1) + "\n").encode()
