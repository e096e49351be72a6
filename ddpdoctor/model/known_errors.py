"""Errors of distributed training that are well known: what each means, whose fault it is, and what to do.

The table is ``known_errors.toml`` beside this file; it says what its columns are. It is read on first use.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module

from ddpdoctor.model.evidence import MOST_RANKS
from ddpdoctor.model.findings import FaultOrigin

# The column ``fault`` in words.
FAULTS = {
    "script": "the script", "settings": "how the job is started or installed", "machine": "the machine or its limits",
    "gpu": "the GPU itself", "peer": "another rank", "either": "the script or the machine",
    "none": "no rank of the job",
}  # fmt: skip
_ORIGINS = {
    "script": FaultOrigin.SCRIPT,
    "settings": FaultOrigin.SETTINGS,
    "machine": FaultOrigin.SETTINGS,
    "gpu": FaultOrigin.MACHINE,
}
_MODULE = re.compile(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Z]\w*(?:Error|Exception|Interrupt)\b)")
_MOST_CHARACTERS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """A row of the table."""

    pattern: re.Pattern[str]
    shown: str  # the error as users search for it
    means: str
    fault: str  # whose fault it is, in words
    origin: FaultOrigin | None  # where the fault lies; None if it may have several origins
    fix: str
    source: str
    nature: str  # what the text shows by itself: a value of ``Nature``, "link" or "note"
    vague: bool
    loose: bool
    marks: tuple[str, ...]

    def ranks(self, text: str) -> tuple[int, ...]:
        """Return the ranks that a text names, if it names any."""
        found = self.pattern.search(_plain(text))
        named = found.groupdict() if found is not None else {}
        ranks = (int(digits) for name in ("rank", "other") if (digits := named.get(name)) and len(digits) < 8)
        return tuple(rank for rank in ranks if rank < MOST_RANKS)


@cache
def read_known_errors() -> tuple[KnownError, ...]:
    """Return the table in its order."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table = pkgutil.get_data("ddpdoctor.model", "known_errors.toml") or b""
    return tuple(
        KnownError(
            pattern=re.compile(row["match"], re.DOTALL), shown=row["shown"], means=row["means"],
            fault=FAULTS[row["fault"]], origin=_ORIGINS.get(row["fault"]), fix=row["fix"], source=row["source"],
            nature=row.get("nature") or ("peer-lost" if row["fault"] == "peer" else "own"),
            vague=row.get("vague", False), loose=row.get("loose", False), marks=tuple(row.get("marks", ())),
        )
        for row in toml.loads(table.decode("utf-8"))["error"]
    )  # fmt: skip


@lru_cache(maxsize=1024)
def find_known(text: str, *, loose: bool = False) -> KnownError | None:
    """Return the first known error that matches a text ("ValueError: ..."), or None.

    Args:
        text: The class of the exception with or without its module, and the message; or any line.
        loose: Whether rows count whose meaning depends on who says it, such as "Connection reset by peer".
    """
    plain = _plain(text)
    rows = (known for known in read_known_errors() if loose or not known.loose)
    return next((known for known in rows if known.pattern.search(plain)), None)


def _plain(text: str) -> str:
    return _MODULE.sub("", text[:_MOST_CHARACTERS])
