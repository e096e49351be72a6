"""The input of the `check-rendezvous` rules: what the nodes saw, and what other checks have found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Finding, Severity
from ddpdoctor.model.reaching import say_place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.node import Node
    from ddpdoctor.model.reaching import Connecting, Rendezvous, Visit

PLACE_IS_WRONG = frozenset(
    {"master-numeric", "master-loopback", "master-resolve", "rdzv-host", "fqdn-forward", "port-free"}
)
"""Kinds that keep all nodes from the store: they look for it in different places, or no node can serve it."""
ADDRESS_IS_WRONG = frozenset(
    {"hostname-loopback", "hostname-unresolvable", "hostname-not-local", "ifname-exists", "iface-up", "iface-agree"}
)
"""Kinds that make a node publish an address at which others cannot reach it."""
SHOWN = 4
"""How many attempts are shown one by one as evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The facts, and the errors found in the machines and in how the job is launched."""

    rendezvous: Rendezvous
    found: tuple[Finding, ...] = ()

    def visit(self, number: int) -> Visit:
        """Return the node with this number. Raise KeyError if there is none."""
        visits = self.rendezvous.visits
        # Try the position first, because visits are usually in order: rules call this for each of n * n pairs.
        if number < len(visits) and visits[number].number == number:
            return visits[number]
        for visit in visits:
            if visit.number == number:
                return visit
        raise KeyError(number)

    def name(self, number: int) -> str:
        """Return a node's host, or "node 3" if its host is unknown."""
        return self.visit(number).host or f"node {number}"

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts of nodes, each once, in the order of the numbers."""
        return tuple(dict.fromkeys(self.name(number) for number in numbers))

    def arrived(self) -> tuple[Visit, ...]:
        """Return the nodes that arrived."""
        return tuple(visit for visit in self.rendezvous.visits if visit.arrived)

    def node(self, number: int) -> Node | None:
        """Return the facts about a node's machine, or None if there are none."""
        arrived = self.arrived()
        if len(arrived) != len(self.rendezvous.fleet.nodes):
            return None
        pairs = zip(arrived, self.rendezvous.fleet.nodes, strict=True)
        return next((node for visit, node in pairs if visit.number == number), None)

    def cause(self, kinds: frozenset[str], host: str) -> Finding | None:
        """Return an error of these kinds that concerns a host, or no host in particular."""
        for finding in self.found:
            concerns = not finding.hosts or host in finding.hosts
            if finding.severity is Severity.ERROR and finding.kind in kinds and concerns:
                return finding
        return None

    def has_error(self, *kinds: str) -> bool:
        """Return whether an error of one of these kinds was found, or of any kind if none is given."""
        return any(f.severity is Severity.ERROR and (not kinds or f.kind in kinds) for f in self.found)


def describe(attempt: Connecting) -> str:
    """Return "10.0.0.4:29500: Connection refused (after 0.3 ms)"."""
    place = say_place(attempt.address or attempt.host, attempt.port)
    words = attempt.error or attempt.contact.value
    return f"{place}: {words} (after {say_duration(attempt.duration_s)})"


def say_duration(duration_s: float) -> str:
    """Return "0.3 ms", "12 ms" or "2.0 s"."""
    if duration_s >= 1:
        return f"{duration_s:.1f} s"
    milliseconds = duration_s * 1000
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"


def first_few(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the first lines of evidence, and how many more there are."""
    each = tuple(lines)
    more = len(each) - SHOWN
    return (*each[:SHOWN], f"and {more} more") if more > 0 else each
