"""Reads the warnings in NCCL's logs: those that ``wrap`` directed to the run folder, and the user's own."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import NcclLine
from ddpdoctor.recorder.storage.files import make_folder, read_end, write_whole
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "nccl"
"""In the run folder."""
MOST_BYTES = 256 * 1024
"""How much of a log's end we read. Our choice: a warning is one line, and old ones no longer matter."""
MOST_FILES = 1024
MOST_LINES = 8
"""How many of a log's last warnings we keep."""
MOST_TEXT = 300
_WARNING = re.compile(
    r"^(?:\[[^\]\n]*\] )?(?:(?P<host>\S+):(?P<pid>\d+):\d+ \[[\w-]+\] )?(?:(?P<source>\S+:\d+) )?"
    r"(?:\S+ )?NCCL WARN (?P<text>.+)$",
    re.MULTILINE,
)
"""From ncclDebugLog in debug.cc, NCCL 2.18 to 2.30: "node3:4711:4720 [0] transport/net_socket.cc:391 NCCL WARN …".
Newer versions put the time before it."""


def read_warnings(folder: Path) -> tuple[NcclLine, ...]:
    """Return the last warnings of every log in the run folder, without repeats."""
    found = (line for path in sorted((folder / FOLDER).glob("*.log"))[:MOST_FILES] for line in _warnings(path))
    return tuple(dict.fromkeys(found))


def keep_users_logs(folder: Path, pattern: str) -> None:
    """Copy the warnings in the logs that NCCL_DEBUG_FILE names ("%h" host, "%p" process) to the run folder."""
    if not pattern or pattern in {"stdout", "stderr"} or pattern.startswith("/dev/"):
        return
    wild = re.sub(r"%[hp]", "*", glob.escape(pattern))
    target = folder / FOLDER
    make_folder(target)
    for name in sorted(glob.glob(wild))[:MOST_FILES]:  # noqa: PTH207 - the pattern may be absolute or not
        lines = _tail(Path(name))
        kept = [match[0] for match in _WARNING.finditer(lines)][-MOST_LINES:]
        if kept:
            write_whole(target / f"user.{Path(name).name}.log", hide_in_text("\n".join(kept) + "\n"))


def _warnings(path: Path) -> Iterator[NcclLine]:
    matches = list(_WARNING.finditer(_tail(path)))[-MOST_LINES:]
    for match in matches:
        yield NcclLine(
            pid=int(match["pid"]) if match["pid"] else None,
            source=match["source"] or "",
            text=hide_in_text(match["text"].strip()[:MOST_TEXT]),
        )


def _tail(path: Path) -> str:
    try:
        return read_end(path, MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
