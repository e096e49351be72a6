"""The lists of NCCL_SOCKET_IFNAME and NCCL_IB_HCA: which interfaces and RDMA ports they let NCCL use."""

from __future__ import annotations

import re
from dataclasses import dataclass

MARKS = "^="


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntry:
    """One entry of the list: ``NAME[:PORT[:RAIL[:PLANE]]]``."""

    name: str
    port: int | None
    """None: every port."""

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclList:
    """A value of one of the variables, read as NCCL does (parseStringList and matchIfList, src/misc/utils.cc)."""

    exclude: bool
    """The value begins with ^: all but these."""
    exact: bool
    """The value has =, after any ^: whole names, not beginnings."""
    entries: tuple[ListEntry, ...]

    def takes(self, name: str, port: int | None = None) -> bool:
        """Say whether NCCL would use this interface or port if it were up. An empty list means every name."""
        listed = not self.entries or any(self.matches(entry, name, port) for entry in self.entries)
        return listed is not self.exclude

    def matches(self, entry: ListEntry, name: str, port: int | None = None) -> bool:
        """Say whether an entry matches, by the whole name or by its beginning. An interface has no port."""
        same = name == entry.name if self.exact else name.startswith(entry.name)
        return same and (port is None or entry.port in {None, port})

    def names(self, name: str) -> bool:
        """Say whether the value asks for this whole name, not for a beginning that others share."""
        return not self.exclude and any(entry.name == name for entry in self.entries)

    @property
    def marked(self) -> tuple[str, ...]:
        """Return the entries that have a ^ or = of their own: NCCL reads these marks only before the first name."""
        return tuple(str(entry) for entry in self.entries if entry.name[0] in MARKS)


def parse_nccl_list(text: str) -> NcclList:
    """Return the list that a value means. NCCL takes any text; an entry without meaning matches nothing."""
    rest = text.removeprefix("^")
    entries = tuple(_parse_entry(part) for part in rest.removeprefix("=").split(",") if part.partition(":")[0])
    return NcclList(exclude=text.startswith("^"), exact=rest.startswith("="), entries=entries)


def _parse_entry(text: str) -> ListEntry:
    """Read the port as C's atoi does: leading digits, else 0; an empty field means all ports."""
    name, _, more = text.partition(":")
    port = more.partition(":")[0]
    digits = re.match(r"\s*(\d+)", port)
    return ListEntry(name=name, port=(int(digits[1]) if digits else 0) if port else None)
