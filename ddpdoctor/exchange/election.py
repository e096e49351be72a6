"""Elects the member that serves if the first member never arrives and the others share only a folder.

The member with the lowest number wins. Each waiting member keeps its own file in the folder, with a counter that it
increments. If a file stops changing, its member is gone. No clocks are compared: each member relies on the changes that
it saw itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.exchange.folder_mailbox import FOLDER, make_folder, read_small, remove, write_in_place
from ddpdoctor.exchange.node_meeting import Folder, is_shown, open_meeting
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.exchange.client import Client

RAISE_EVERY_S = 0.5
SETTLE_S = 3.0
"""Our choice: six increments. A member waits this long to see the others, and one that is silent this long is gone."""
_HERE = re.compile(r"here-([0-9]{8}|x)-[0-9a-f]{16}")


def find_deputy(path: Path, token: bytes, number: int | None, limit_s: float) -> Client | None:
    """Return the meeting that a lower member serves in a shared folder, or None if this member must serve it.

    ``number`` is the member's place in the job; members without one come after all that have one. Raises ``StoreError``
    if a lower member is present but serves nothing within the limit.
    """
    deadline = time.monotonic() + limit_s
    with contextlib.closing(_Candidate(path, number)) as candidate:
        while time.monotonic() < deadline:
            candidate.update()
            if is_shown(path):
                with contextlib.suppress(StoreError):
                    return open_meeting(Folder(path), token, SETTLE_S)
            if candidate.is_lowest:
                return None
            time.sleep(RAISE_EVERY_S)
    raise StoreError("a node with a lower number has joined but serves no store")


@dataclass(slots=True)
class _OtherFile:
    """Another member's file, and when this process last saw it change."""

    content: bytes
    changed_s: float | None = None


@dataclass(slots=True)
class _Candidate:
    """This member's part in the election."""

    path: Path
    number: int | None
    clock: Callable[[], float] = time.monotonic
    _name: str = ""
    _raised: int = 0
    _began_s: float = 0.0
    _others: dict[str, _OtherFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = "x" if self.number is None else f"{self.number:08d}"
        self._name = f"here-{place}-{os.urandom(8).hex()}"
        self._began_s = self.clock()
        make_folder(self.path / FOLDER)

    def update(self) -> None:
        """Increment this member's counter, and note which other files have changed."""
        folder = self.path / FOLDER
        self._raised += 1
        write_in_place(folder / self._name, b"%d" % self._raised)
        for name in _names(folder):
            content = read_small(folder / name) or b""
            seen = self._others.get(name)
            if seen is None:
                self._others[name] = _OtherFile(content)
            elif content != seen.content:
                self._others[name] = _OtherFile(content, self.clock())

    @property
    def is_lowest(self) -> bool:
        """Whether enough time has passed to see the others, and none of those present is lower."""
        now_s = self.clock()
        here = {name for name, seen in self._others.items() if seen.changed_s and now_s - seen.changed_s < SETTLE_S}
        return now_s - self._began_s >= SETTLE_S and min(here | {self._name}) == self._name

    def close(self) -> None:
        """Remove this member's file."""
        remove(self.path / FOLDER / self._name)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if _HERE.fullmatch(path.name)]
    except OSError as error:
        raise StoreError(f"{folder} cannot be read: {error.strerror or error}") from error
