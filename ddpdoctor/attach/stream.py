"""Carries a saved folder over the standard output of a program: JSON lines, among which other lines may stand.

A node may share no folder with the machine that asks it, but srun and kubectl exec bring its output there.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ddpdoctor.attach.save import SUMMARY
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.recorder.storage.files import make_folder, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "ddpdoctor-attach-stream"
VERSION = 1
MOST_BYTES = 256 * 2**20
"""Our choice: the most that one file may have, unpacked. ``analyze`` reads no more of it either."""
_NAME = re.compile(r"attach\.json|look_[12]/[A-Za-z0-9_][A-Za-z0-9_.]*")
"""The files that are taken, so that none is written elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What came over a stream."""

    files: int
    whole: bool
    """It came to its end."""
    error: str
    """Why nothing was seen, in the words of the ddpdoctor at the other end; empty: something was."""
    help: str


def send_look(look: Callable[[Path], Path], out: IO[bytes]) -> int:
    """Look with a folder of its own, and write what was saved there or why nothing was. Return the exit status."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-attach-") as folder:
        try:
            _send_folder(look(Path(folder)), out)
        except UserError as error:
            _send(out, error=error.message, help=error.help)
            return error.status
    return ExitStatus.OK


def _send_folder(folder: Path, out: IO[bytes]) -> None:
    """Write all files of a saved folder, ``attach.json`` as the last, and the end."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    names.sort(key=lambda name: (name == SUMMARY, name))
    for name in names:
        packed = zlib.compress((folder / name).read_bytes())
        _send(out, file=name, data=base64.b64encode(packed).decode())
    _send(out, files=len(names))


def receive_folder(lines: Iterable[bytes], folder: Path) -> Arrived:
    """Save the files that come over a stream. Lines that are not of the stream are left out."""
    count, announced = 0, None
    error = remedy = ""
    for line in lines:
        record = _parse(line)
        if "data" in record:
            count += _save(record, folder)
        elif "error" in record:
            error, remedy = str(record["error"]), str(record.get("help", ""))
        elif "files" in record:
            announced = record["files"]
    return Arrived(files=count, whole=announced == count, error=error, help=remedy)


def _send(out: IO[bytes], **record: Any) -> None:
    out.write(json.dumps({"stream": MARK, "version": VERSION, **record}).encode() + b"\n")
    out.flush()


def _parse(line: bytes) -> dict[str, Any]:
    at = line.find(b'{"stream": "' + MARK.encode())
    if at < 0:
        return {}
    try:
        record = json.loads(line[at:])
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _save(record: dict[str, Any], folder: Path) -> bool:
    name = str(record.get("file"))
    if not _NAME.fullmatch(name):
        return False
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(record["data"], validate=True), MOST_BYTES)
    except (ValueError, TypeError, zlib.error):
        return False
    make_folder(folder)
    make_folder((folder / name).parent)
    write_whole(folder / name, content)
    return True
