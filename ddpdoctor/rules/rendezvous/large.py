"""DD222, and findings of DD215 and DD403 from payloads between nodes: they stall, are sent again, or are slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reaching import Contact
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.rendezvous.lines import PairSide, explain
from ddpdoctor.rules.rendezvous.meeting import Meeting, first_few

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.reaching import NodePair, Transfer
    from ddpdoctor.rules.rendezvous.lines import BadPairs

    Pairs = dict[tuple[int, int], NodePair]

FIRST_FLIGHT = 20
"""Our choice: twice the initial window of 10 segments (RFC 6928). If no large packet ever arrives, the window does not
open, and only its first segments are resent."""
LOSSY = 0.01
"""Our choice: the share of resent segments from which on TCP's throughput is far below the link's (Mathis et al., 1997:
it goes with one over the square root of the loss). A healthy link between machines of a cluster loses none."""
LEAST_RETRANSMITTED = 3
"""Our choice: fewer may be the end of a burst that overran a buffer once."""
SLOWER = 5.0
"""Our choice: this many times slower than the fastest pair. A busy host is slower by less. The median does not work:
with three nodes, one slow node is part of two thirds of the pairs."""
LEAST_DELAY_S = 0.25
"""Our choice: it must also take this much longer. With twelve processes per core, waiting for the core took up to 0.13
s; 4 MiB over a link of 100 Mbit/s take 0.34 s."""
SAFE_MTU = 1400
"""Our choice: leaves room for the headers of VXLAN (50 bytes), WireGuard (60) and IPsec (up to 73) in packets of
1500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a pair was."""

    pair: NodePair
    bytes_s: float
    duration_s: float


def is_black_hole(pair: NodePair) -> bool:
    """Return whether small payloads arrive but nothing of large ones does, because full-size packets vanish."""
    if pair.small is None or pair.large is None or pair.small.contact is not Contact.CONNECTED:
        return False
    return pair.large.contact is Contact.NO_ANSWER and not _got_through(pair.large)


def _got_through(large: Transfer) -> bool:
    """Return whether anything was acknowledged or, if unknown, whether more was sent than fits into a window."""
    if large.delivered_bytes is not None:
        return large.delivered_bytes > 0
    if large.sent is None or large.retransmitted is None:
        return False
    return large.sent - large.retransmitted > FIRST_FLIGHT


def lost_share(pair: NodePair) -> float | None:
    """Return the share of segments that had to be resent, or None if it is unknown or the pair is a black hole."""
    large = pair.large
    if large is None or large.sent is None or large.retransmitted is None or not large.sent or is_black_hole(pair):
        return None
    return large.retransmitted / large.sent


def is_lossy(pair: NodePair) -> bool:
    """Return whether a pair loses more than a healthy network does.

    If most resent segments had arrived, the way back loses packets, or a host is slow to acknowledge.
    """
    share, large = lost_share(pair), pair.large
    if share is None or large is None or large.retransmitted is None:
        return False
    arrived = (large.needless or 0) * 2 >= large.retransmitted
    return share >= LOSSY and large.retransmitted >= LEAST_RETRANSMITTED and not arrived


def rate_of(pair: NodePair) -> Rate | None:
    """Return the rate of a large payload, or its rate until it was given up.

    Return None if it made no progress or broke off, or if packet loss made it slow.
    """
    large = pair.large
    if large is None or not large.duration_s or is_lossy(pair):
        return None
    if large.contact is Contact.CONNECTED:
        return Rate(pair=pair, bytes_s=large.size_bytes / large.duration_s, duration_s=large.duration_s)
    if large.contact is Contact.NO_ANSWER and large.delivered_bytes:
        return Rate(pair=pair, bytes_s=large.delivered_bytes / large.duration_s, duration_s=large.duration_s)
    return None


def _is_slow(rate: Rate, fastest: Rate) -> bool:
    return rate.bytes_s * SLOWER <= fastest.bytes_s and rate.duration_s - fastest.duration_s >= LEAST_DELAY_S


def say_rate(bytes_s: float) -> str:
    """Return "12.5 MB/s", "1.2 GB/s" or "4.8 kB/s"."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e5)):
        if bytes_s >= size:
            return f"{bytes_s / max(size, 1e6):.1f} {unit}"
    return f"{bytes_s / 1e3:.1f} kB/s"


@rule("DD222", "packet-loss", Severity.WARNING, "Packets are lost between nodes", group=CheckGroup.NETWORK)
def check_payloads(meeting: Meeting) -> Answer:
    """Report pairs of nodes between which packets are lost, or payloads stall or are slow."""
    pairs = {(p.source, p.target): p for p in meeting.rendezvous.pairs if p.large is not None}
    if not pairs:
        return skipped("no large payload was sent between nodes")
    findings = [
        *_blamed(meeting, pairs, {key: is_black_hole(pair) for key, pair in pairs.items()}, _black_hole),
        *_blamed(meeting, pairs, {key: is_lossy(pair) for key, pair in pairs.items()}, _loss),
        *_slow(meeting, pairs),
    ]
    counted = any(pair.large is not None and pair.large.retransmitted is not None for pair in pairs.values())
    if not findings and not counted:
        return unknown("the kernel does not report retransmitted segments (TCP_INFO)")
    sent = [pair.large for pair in pairs.values() if pair.large is not None and pair.connecting is not None]
    arrived = sum(one.contact is Contact.CONNECTED for one in sent)
    return judged(findings, f"{arrived} of {len(sent)} large payloads arrived")


def _blamed(
    meeting: Meeting,
    pairs: Pairs,
    bad: dict[tuple[int, int], bool],
    make: Callable[[Meeting, BadPairs, list[NodePair]], Problem],
) -> list[Problem]:
    return [make(meeting, blame, [pairs[key] for key in blame.pairs]) for blame in explain(bad)]


def _slow(meeting: Meeting, pairs: Pairs) -> list[Problem]:
    rates = {key: rate for key, pair in pairs.items() if (rate := rate_of(pair)) is not None}
    fastest = max(rates.values(), key=lambda rate: rate.bytes_s, default=None)
    if fastest is None:
        return []
    blames = explain({key: _is_slow(rate, fastest) for key, rate in rates.items()})
    # Data into a host waits for what leaves it slowly, because its acknowledgements go that way.
    whole = {node for blame in blames if blame.way is not PairSide.PAIR for node in blame.nodes}
    return [
        _slow_link(meeting, blame, [rates[key] for key in blame.pairs], fastest)
        for blame in blames
        if blame.way is not PairSide.PAIR or whole.isdisjoint(blame.nodes)
    ]


def _black_hole(meeting: Meeting, blame: BadPairs, bad: list[NodePair]) -> Problem:
    interface = bad[0].interface or "eth0"
    return Problem(
        kind="mtu",
        summary=f"large packets are lost {_where(meeting, blame)}: small payloads arrive, but large ones do not",
        severity=Severity.ERROR,
        hosts=meeting.names(blame.nodes),
        evidence=(*first_few(_stalled(meeting, pair) for pair in bad), *_mtus(meeting, bad)),
        fix=f"ip link set dev {interface} mtu {SAFE_MTU} on all hosts, as root, is a workaround; ping -M do -s 1472 "
        f'{bad[0].address} tests the path MTU; allow ICMP "fragmentation needed" through the firewalls',
        confidence=_confidence(blame),
    )


def _stalled(meeting: Meeting, pair: NodePair) -> str:
    assert pair.large is not None
    assert pair.small is not None
    return (
        f"{_both(meeting, pair)}: {say_size(pair.small.size_bytes)} arrived, {say_size(pair.large.size_bytes)} stalled"
        + (f" ({pair.large.retransmitted} segments were resent without success)" if pair.large.retransmitted else "")
    )


def _mtus(meeting: Meeting, bad: list[NodePair]) -> tuple[str, ...]:
    """Return the MTU of the interfaces at both ends, if known."""
    numbers = dict.fromkeys(number for pair in bad for number in (pair.source, pair.target))
    found = []
    for number in numbers:
        node = meeting.node(number)
        network = known(node.network) if node is not None else None
        name = meeting.visit(number).interface
        mtu = next((one.mtu for one in network.interfaces if one.name == name), None) if network is not None else None
        if mtu is not None:
            found.append(f"{name} of {meeting.name(number)} has an MTU of {mtu}")
    return first_few(found)


def _loss(meeting: Meeting, blame: BadPairs, bad: list[NodePair]) -> Problem:
    worst = max(lost_share(pair) or 0.0 for pair in bad)
    interface = bad[0].interface or "eth0"
    hosts = meeting.names(blame.nodes)
    return Problem(
        summary=f"packets are lost {_where(meeting, blame)}: up to {100 * worst:.0f} % had to be resent",
        hosts=hosts,
        evidence=first_few(
            f"{_both(meeting, pair)}: {pair.large.retransmitted} of {pair.large.sent} segments were resent"
            for pair in bad
            if pair.large is not None
        ),
        fix=f"ethtool -S {interface} | grep -iE 'drop|err|crc'; ip -s link show {interface} on {name_list(hosts)}; "
        "then check the cable and the switch port",
        confidence=_confidence(blame),
    )


def _slow_link(meeting: Meeting, blame: BadPairs, rates: list[Rate], fastest: Rate) -> Problem:
    interface = rates[0].pair.interface or "eth0"
    hosts = meeting.names(blame.nodes)
    return Problem(
        kind="slow-link",
        summary=f"data transfer is slow {_where(meeting, blame)}: {say_rate(min(rate.bytes_s for rate in rates))}, "
        f"but another pair has {say_rate(fastest.bytes_s)}",
        hosts=hosts,
        evidence=first_few(_rate_words(meeting, rate) for rate in rates),
        fix=f"ethtool {interface} | grep Speed; tc qdisc show dev {interface} on {name_list(hosts)}; then check "
        "the cable, the switch port and its rate limits",
        confidence=_confidence(blame),
    )


def _rate_words(meeting: Meeting, rate: Rate) -> str:
    assert rate.pair.large is not None
    given_up = "" if rate.pair.large.contact is Contact.CONNECTED else "stopped after "
    return f"{_both(meeting, rate.pair)}: {say_rate(rate.bytes_s)}, {given_up}{rate.duration_s * 1000:.0f} ms"


def _where(meeting: Meeting, blame: BadPairs) -> str:
    """Return words for the direction in which something goes wrong."""
    first = meeting.name(blame.nodes[0])
    words = {
        PairSide.ALL: f"between {name_list(meeting.names(blame.nodes))} in all directions",
        PairSide.CUT_OFF: f"to and from {first}",
        PairSide.INBOUND: f"to {first} (inbound)",
        PairSide.OUTBOUND: f"from {first} (outbound)",
    }
    if blame.way in words and not blame.alone:
        return words[blame.way]
    source, target = blame.pairs[0]
    both = " and back" if len(blame.pairs) > 1 else ""
    return f"from {meeting.name(source)} to {meeting.name(target)}{both}"


def _confidence(blame: BadPairs) -> Confidence:
    return Confidence.MEDIUM if blame.alone or blame.way is PairSide.ALL else Confidence.HIGH


def _both(meeting: Meeting, pair: NodePair) -> str:
    return f"{meeting.name(pair.source)} to {meeting.name(pair.target)}"


def say_size(size_bytes: int) -> str:
    """Return "64 bytes", "4 KiB" or "1 MiB"."""
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / 1024:.0f} KiB" if size_bytes >= 1024 else f"{size_bytes} bytes"
