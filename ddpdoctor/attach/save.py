"""Saves what was seen, in a folder that ``analyze`` reads."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.attach.look import JobLook
    from ddpdoctor.model.attached import AskedNodes, AttachedJob

SUMMARY = "attach.json"
NODES = "nodes.json"


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


def save_summary(folder: Path, job: AttachedJob) -> None:
    """Write ``attach.json``."""
    write_whole(folder / SUMMARY, _json(encode(job)))


def save_nodes(folder: Path, nodes: AskedNodes) -> None:
    """Write ``nodes.json``."""
    write_whole(folder / NODES, _json(encode(nodes)))


def _json(plain: Any) -> bytes:
    return (json.dumps(plain, indent=1) + "\n").encode()
