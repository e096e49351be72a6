"""Notes about NCCL's version and interfaces. They blame nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Hint, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.nccl_processes import NcclProcess, NcclProcesses
    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

MOST_HOSTS = 4096
MOST_NAMED = 4
"""How many hosts a note names."""


def version_note(nccl: str, cuda: str | None, line: Line) -> Hint:
    """Return the note about the version of NCCL."""
    words = f"NCCL {nccl}" + (f", built for CUDA {cuda}" if cuda else "")
    return Hint(
        who=line.who, spot=line.spot(), time=line.time, said=quote(line.text), words=words, kind="nccl-version"
    )  # fmt: skip


def interface_notes(processes: NcclProcesses) -> Iterator[Fact]:
    """Say which interface each host uses, and whether it can lead to other hosts."""
    from ddpdoctor.rules.interface_choice import is_bridge, is_tunnel

    by_interface: dict[str, dict[str, NcclProcess]] = {}
    for process in processes:
        if process.interface and len(by_interface) < MOST_HOSTS:
            by_interface.setdefault(process.interface, {}).setdefault(process.who.host, process)
    several = len({host for hosts in by_interface.values() for host in hosts}) > 1
    for name, hosts in by_interface.items():
        first = next(iter(hosts.values()))
        shown = [f"{host} ({process.who.address})" for host, process in hosts.items()]
        words = f"NCCL's connections go over {name} on {_some(shown)}"
        kind = "interface"
        if is_bridge(name) or (name == "lo" and several):
            words += ", which leads only to its own host"
            kind = "suspicious-interface"
        elif is_tunnel(name):
            words += ", which is a VPN's"
            kind = "suspicious-interface"
        yield Hint(who=Who(host=first.who.host), spot=first.spot, words=words, kind=kind)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more
