"""The grammars of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, which have only the end of their names in common."""

from __future__ import annotations

from dataclasses import dataclass

IGNORED_LENGTH = 1
"""NCCL and Gloo ignore a value of one character: `strlen(env) > 1` (nccl src/misc/socket.cc, torch
ProcessGroupGloo)."""
MARKS = "^="


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclNames:
    """A value of NCCL_SOCKET_IFNAME (ncclOsFindInterfaces, parseStringList and matchIfList of NCCL's source)."""

    exclude: bool
    """The value begins with ^: all but these."""
    exact: bool
    """The value has =, after any ^: whole names, not beginnings."""
    names: tuple[str, ...]

    def takes(self, interface: str) -> bool:
        """Say whether the value lets this interface through. An empty list means every name."""
        listed = not self.names or any(self._is(interface, name) for name in self.names)
        return listed is not self.exclude

    def _is(self, interface: str, name: str) -> bool:
        return interface == name if self.exact else interface.startswith(name)

    @property
    def stray_marks(self) -> tuple[str, ...]:
        """Return the names that have a ^ or = of their own: NCCL reads these marks only before the first name."""
        return tuple(name for name in self.names if name[0] in MARKS)


def is_ignored(text: str) -> bool:
    """Say whether NCCL and Gloo treat the variable as not set."""
    return len(text) <= IGNORED_LENGTH


def parse_nccl_names(text: str) -> NcclNames:
    """Return what a value means. Text after a colon is a port, which does not matter for interfaces."""
    exclude = text.startswith("^")
    rest = text.removeprefix("^")
    exact = rest.startswith("=")
    rest = rest.removeprefix("=")
    if rest[:1] and rest[0] in MARKS:  # parseStringList skips one more
        rest = rest[1:]
    names = tuple(name for part in rest.split(",") if (name := part.partition(":")[0]))
    return NcclNames(exclude=exclude, exact=exact, names=names)


def parse_gloo_names(text: str) -> tuple[str, ...]:
    """Return the names of a value: a plain list that keeps white space. A comma at its end makes no empty name."""
    return tuple(text.removesuffix(",").split(","))
