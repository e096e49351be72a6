"""DD332: RDMA ports that are slower than their peers, and hosts that have fewer of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.rank_words import name_list
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.rdma_ports import each_port, is_active, label, place, words
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.links import RdmaDevice, RdmaPort
    from ddpdoctor.model.node import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """An active port of a host."""

    host: str
    device: RdmaDevice
    port: RdmaPort

    @property
    def rate(self) -> float:
        return self.port.rate_gb_s or 0.0


@rule(
    "DD332",
    "ib-rate",
    Severity.ERROR,
    "An RDMA port is slower than its peers, or a host has fewer RDMA devices than the others",
    group=CheckGroup.LINKS,
    needs=("rdma",),
    reads="/sys/class/infiniband/*/ports/*/rate and board_id, on every host",
)
def check_ib_rate(fleet: Fleet) -> Answer:
    """Report RDMA ports that run at a lower rate than those of the same model."""
    groups = grouped(
        ((place(device, port), port.link_layer), _Link(host=node.host, device=device, port=port))
        for node, rdma in fleet.each(lambda node: node.rdma)
        for device, port in each_port(rdma)
        if is_active(port) and port.rate_gb_s and not device.virtual_function
    )
    problems = [problem for links in groups.values() for problem in _compare_rates(links, alone=len(fleet.nodes) == 1)]
    problems += _compare_counts(fleet)
    if not groups and not problems:
        return passed("no RDMA port is active")
    rates = Counter(f"{link.rate:g} Gb/s" for links in groups.values() for link in links)
    return judged(problems, "active ports: " + ", ".join(f"{count} at {rate}" for rate, count in rates.most_common()))


def _compare_rates(links: list[_Link], *, alone: bool) -> list[Problem]:
    """Return one problem for each rate that is below the expected one."""
    counts = Counter(link.rate for link in links)
    usual, number = counts.most_common(1)[0]
    sure = number * 2 > len(links)
    expected = usual if sure else max(counts)
    found = []
    for rate in sorted(rate for rate in counts if rate < expected):
        slow = [link for link in links if link.rate == rate]
        found.append(_slow(slow, rate, expected, counts[expected], sure=sure, alone=alone))
    return found


def _slow(slow: Sequence[_Link], rate: float, expected: float, peers: int, *, sure: bool, alone: bool) -> Problem:
    hosts = tuple(dict.fromkeys(link.host for link in slow))
    names = words([label(link.device, link.port) for link in slow])
    where = "" if alone else f" on {name_list(hosts)}"
    one = len(slow) == 1
    everyday = alone and slow[0].port.link_layer == "Ethernet"
    unsure = Severity.INFO if everyday else Severity.WARNING
    return Problem(
        summary=(
            f"RDMA port{'' if one else 's'} {names}{where} {'runs' if one else 'run'} at {rate:g} Gb/s, but "
            f"{peers} other{'' if peers == 1 else 's'} of the same model at {expected:g} Gb/s"
        ),
        evidence=tuple(dict.fromkeys(f"rate: {link.port.rate_text}" for link in slow if link.port.rate_text)),
        fix=f"check the lanes and the cable (mlxlink -d {slow[0].device.name} -m), clean or replace the cable, and "
        "check the switch port",
        severity=Severity.ERROR if sure else unsure,
        confidence=Confidence.HIGH if sure else Confidence.LOW,
        hosts=hosts,
    )


def _compare_counts(fleet: Fleet) -> list[Problem]:
    """Report hosts with fewer devices of a model than most."""
    boards = {
        device.board: device.name
        for node in fleet.nodes
        if not isinstance(node.rdma, Unread)
        for device in node.rdma.devices
        if device.board and not device.virtual_function
    }
    return [problem for board in sorted(boards) for problem in _fewer(fleet, board)]


def _fewer(fleet: Fleet, board: str) -> list[Problem]:
    voices = []
    for node in fleet.nodes:
        count: int | None = None
        if not isinstance(node.rdma, Unread):
            count = sum(device.board == board and not device.virtual_function for device in node.rdma.devices)
        elif node.rdma.why is Why.ABSENT:
            count = 0
        voices.append(Voice(host=node.host, ranks=node.ranks, value=count))
    split = compare(voices)
    if split is None or split.majority is None or any(s.value > split.majority.value for s in split.minorities):
        return []
    return [
        Problem(
            summary=f"Hosts have different RDMA devices: {describe(split, f'{board} devices:')}",
            evidence=("a missing device may have fallen off the bus, or its driver did not load",),
            fix="compare lspci -d 15b3: and ibstat on these hosts, and look for mlx5 in dmesg",
            severity=Severity.WARNING,
            hosts=split.hosts,
        )
    ]
