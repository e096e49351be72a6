"""Follows Python processes under the launcher that have a rank number but did not load the recorder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.launch import LOCAL_RANK_VARIABLES, RANK_VARIABLES
from ddpdoctor.collect.run.sources import WORLD_SIZE_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ddpdoctor.collect import proc

SETTLED_S = 10.0
"""By then a forked child has executed its program. Our choice: fork and exec take milliseconds. On a machine with five
processes per core, a shell took over two seconds to become a Python."""
_KEEP_OUT = frozenset("IES")
_WITH_VALUE = frozenset("cmWX")
"""Python's one-letter options that take a value."""
_NAMES = (*RANK_VARIABLES, *LOCAL_RANK_VARIABLES, *WORLD_SIZE_NAMES)

Key = tuple[int, int]


@dataclass(slots=True)
class Stranger:
    """A rank without a recorder."""

    environment: dict[str, str]
    """Its variables from the launcher: rank, local rank, world size."""
    why: str
    state: str | None
    ended_ns: int | None = None


class Strangers:
    """The ranks without a recorder that were found so far. Each process is checked only while it is young."""

    def __init__(self) -> None:
        """Start empty."""
        self.found: dict[Key, Stranger] = {}
        self._first_seen: dict[Key, float] = {}

    def follow(self, below: Iterable[proc.Process], recorded: Collection[int]) -> None:
        """Check the launcher's descendants. Those in ``recorded`` and their children are known to be no strangers."""
        now = time.monotonic()
        alive = {(p.pid, p.start_ticks): p for p in below if p.state not in "ZX"}
        of_ranks = set(recorded)
        for key, process in alive.items():  # parents come before their children
            if process.ppid in of_ranks or process.pid in of_ranks:
                of_ranks.add(process.pid)
            elif key in self.found:
                self.found[key].state = process.state
            elif now - self._first_seen.setdefault(key, now) < SETTLED_S:
                stranger = _look_at(process)
                if stranger is not None:
                    self.found[key] = stranger
        for key, stranger in self.found.items():
            if key not in alive and stranger.ended_ns is None:
                stranger.ended_ns, stranger.state = time.monotonic_ns(), None
        self._first_seen = {key: first for key, first in self._first_seen.items() if key in alive}

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return their rows of watch.json, by pid."""
        return {
            str(pid): {
                "ticks": ticks,
                "state": s.state,
                "ended_ns": s.ended_ns,
                "unrecorded": s.environment,
                "why": s.why,
            }
            for (pid, ticks), s in self.found.items()
        }


def _look_at(process: proc.Process) -> Stranger | None:
    folder = Path(f"/proc/{process.pid}")
    try:
        program = (folder / "exe").readlink().name
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        pairs = (
            entry.partition("=") for entry in (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        )
        environment = {name: value for name, _, value in pairs}
    except OSError:
        return None
    variables = {name: environment[name] for name in _NAMES if name in environment}
    why = why_unrecorded(words, environment)
    if not program.startswith("python") or not any(name in variables for name in RANK_VARIABLES) or not why:
        return None
    return Stranger(environment=variables, why=why, state=process.state)


def why_unrecorded(words: list[str], environment: dict[str, str]) -> str:
    """Return why a Python with this command line and environment loads no recorder, or "" if it does."""
    if (kept_out := _keeps_out(words[1:])) is not None:
        return f"Python was started with -{kept_out}, which turns off start-up hooks"
    if "DDPDOCTOR_RUN" not in environment:
        return "it was started without the variable DDPDOCTOR_RUN"
    if "/recorder/bootstrap" not in environment.get("PYTHONPATH", ""):
        return "its PYTHONPATH lacks the folder that loads the recorder"
    return ""


def _keeps_out(words: list[str]) -> str | None:
    """Return the Python option before the script that disables start-up hooks, or None."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            return None
        if word.startswith("--"):
            continue
        letters = word[1:]
        end = next((i for i, letter in enumerate(letters) if letter in _WITH_VALUE), len(letters))
        if found := sorted(_KEEP_OUT.intersection(letters[:end])):
            return found[0]
        if letters[end : end + 1] in ("c", "m"):
            return None
        if end == len(letters) - 1:
            next(rest, "")
    return None
