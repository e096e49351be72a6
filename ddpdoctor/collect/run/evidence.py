"""Reads the files of a run folder (regular files within a size limit, no links), and writes them whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import is_folder, parse_json, read_plain, write_whole

if TYPE_CHECKING:
    import os
    from pathlib import Path

Kind = TypeVar("Kind")
DAMAGED = (OSError, ValueError, OverflowError, RecursionError, WrongValue)
"""The errors for a file that is missing, cannot be opened, or has the wrong content."""
MAX_TEXT_BYTES = 16 * 2**20
"""Limit for stacks and other plain text. Our choice: the stacks of a process with 100 threads take 100 KiB."""
FOLDERS = ("rings", "prints", "evidence", "nccl", "nodes", "gathered")


def save(path: Path, record: Any) -> None:
    """Write a record, or a tuple of records, as JSON, whole or not at all; raises OSError."""
    plain = [encode(one) for one in record] if isinstance(record, tuple) else encode(record)
    write_whole(path, json.dumps(plain))


def load(kind: type[Kind], path: Path) -> Kind | None:
    """Return the record that ``save`` wrote, or None if the file is missing or damaged."""
    try:
        return decode(kind, load_json(path))
    except DAMAGED:
        return None


def load_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file; raises one of ``DAMAGED``."""
    return parse_json(read_plain(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the content of a plain text file, or an empty string if it cannot be read."""
    try:
        return read_plain(path, MAX_TEXT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def check_folders(folder: Path) -> None:
    """Raise ``UserError`` if a subfolder of a run folder is a link, which could lead anywhere."""
    for name in FOLDERS:
        part = folder / name
        if part.is_symlink() or (part.exists() and not is_folder(part)):
            raise UserError(
                f"{folder} is damaged: {name} in it is not a folder, or is a link",
                help="Copy the run folder with the files themselves, such as by `cp -rL` or tar.",
            )
