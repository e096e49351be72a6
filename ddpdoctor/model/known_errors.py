"""Well-known errors of distributed training, and NCCL's warnings: what each means, what causes it, how to fix it.

The columns are described in ``known_errors.toml`` and ``nccl_warnings.toml`` beside this file.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ddpdoctor.model.findings import FaultOrigin
from ddpdoctor.model.log_facts import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

# The column ``fault`` in words.
FAULTS = {
    "script": "the script", "settings": "how the job is started or installed", "machine": "the machine or its limits",
    "gpu": "the GPU itself", "peer": "another rank", "either": "the script or the machine",
    "none": "no rank of the job",
}  # fmt: skip
# Values of ``FaultOrigin`` by the same column
_ORIGINS = {"script": "script", "settings": "settings", "machine": "settings", "gpu": "machine"}
_MODULE = re.compile(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Z]\w*(?:Error|Exception|Interrupt)\b)")
_MOST_CHARACTERS = 8192
SHM_FIX = (
    "give /dev/shm more room (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir of medium Memory)"
)
# Beginnings of addresses that lead only to their own host: loopback, docker0's default, link-local.
MAPPED = re.compile(r"^::ffff:(?=.*\.)")  # how IPv6 writes an address of IPv4
ONLY_LOCAL = ("127.", "172.17.", "::1", "169.254.")


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
        found = self.pattern.search(_without_modules(text))
        named = found.groupdict() if found is not None else {}
        ranks = (int(digits) for name in ("rank", "other") if (digits := named.get(name)) and len(digits) < 8)
        return tuple(rank for rank in ranks if rank < MOST_RANKS)


def _read_table(name: str) -> dict[str, Any]:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return cast("dict[str, Any]", toml.loads((pkgutil.get_data("ddpdoctor.model", name) or b"").decode("utf-8")))


@cache
def read_known_errors() -> tuple[KnownError, ...]:
    """Return the table in its order."""
    return tuple(
        KnownError(
            pattern=re.compile(row["match"], re.DOTALL), shown=row["shown"], means=row["means"],
            fault=FAULTS[row["fault"]],
            origin=FaultOrigin(_ORIGINS[row["fault"]]) if row["fault"] in _ORIGINS else None, fix=row["fix"],
            source=row["source"],
            nature=row.get("nature") or ("peer-lost" if row["fault"] == "peer" else "own"),
            vague=row.get("vague", False), loose=row.get("loose", False), marks=tuple(row.get("marks", ())),
        )
        for row in _read_table("known_errors.toml")["error"]
    )  # fmt: skip


@lru_cache(maxsize=1024)
def find_known(text: str, *, loose: bool = False) -> KnownError | None:
    """Return the first known error that matches a line such as "ValueError: ...", or None.

    With ``loose``, rows count whose meaning depends on the writer, such as "Connection reset by peer".
    """
    plain = _without_modules(text)
    rows = (known for known in read_known_errors() if loose or not known.loose)
    return next((known for known in rows if known.pattern.search(plain)), None)


def _without_modules(text: str) -> str:
    return _MODULE.sub("", text[:_MOST_CHARACTERS])


class Accused(Enum):
    """What a warning blames."""

    PEER = "peer"  # The other end is gone. The process that warns is a victim.
    LINK = "link"  # the network between this host and another one
    HOST = "host"  # what this host offers to the network: an interface, an adapter, the fabric
    PROCESS = "process"  # the process itself: an error of its GPU's earlier work, or memory that ran out
    START = "start"  # how the job is started or installed: interface, version, shared memory, GPUs
    NOBODY = "nobody"  # it is worth a note and no more


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclWarning:
    """How a warning is to be read. In the table, ``words`` and ``fix`` may name groups of ``pattern`` in braces."""

    pattern: re.Pattern[str]
    accused: Accused
    words: str
    fix: str = ""  # empty: the table of known errors has it, or there is none
    kind: str = ""  # for ``START``: "shm", "version", "interface", "duplicate-gpu"
    named: Mapping[str, str] = field(default_factory=dict)  # "address", "host", "local_rank", "device"


@cache
def _read_warnings() -> tuple[tuple[NcclWarning, ...], dict[str, str]]:
    """Return the rows of ``nccl_warnings.toml`` in their order, and its fixes by name."""
    table = _read_table("nccl_warnings.toml")
    fixes = {"shm": SHM_FIX, **table["fixes"]}
    rows = []
    for row in table["warning"]:
        pattern = re.sub(r"<([A-Z_]+)>", lambda part: table["parts"].get(part[1], part[0]), row["match"])
        fix, accused = row.get("fix", ""), Accused(row["accused"])
        rows += [
            NcclWarning(
                pattern=re.compile(pattern), accused=accused, words=row["words"], fix=fixes.get(fix, fix),
                kind=row.get("kind", ""),
            )
        ]  # fmt: skip
    return tuple(rows), fixes


def read_warning(text: str) -> NcclWarning | None:
    """Return what a warning of NCCL means, or None if it is not in the table."""
    meanings, fixes = _read_warnings()
    for meaning in meanings:
        found = meaning.pattern.search(text)
        if found is not None:
            named = {name: value.strip() for name, value in found.groupdict().items() if value}
            if "address" in named:
                named["address"] = MAPPED.sub("", named["address"])
            hca = re.search(r"\bhca (\S+)", text)
            fills = {"error": "", **named, "peer": named.get("host") or named.get("address", "another host")}
            fills["hca"] = f", adapter {hca[1]}" if hca else ""
            fix = meaning.fix
            if meaning.accused is Accused.LINK and named.get("address", "").startswith(ONLY_LOCAL):
                fix = fixes["other-interface"]
            words = meaning.words.format_map(fills).rstrip(": ")
            return replace(meaning, words=words, fix=fix, named=named)
    return None
