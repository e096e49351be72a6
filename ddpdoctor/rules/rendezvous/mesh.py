"""DD220 and DD222: what the nodes saw of each other, and whether each reaches every other, also with large messages."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.launch import Contact, say_place
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import grouped, name_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.network import EPHEMERAL, open_ports
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.model.launch import Connecting, NodePair, Rendezvous, Visit
    from ddpdoctor.model.node import Node

    Pairs = dict[tuple[int, int], NodePair]

# Kinds that keep all nodes from the store: they look for it in different places, or no node can serve it.
PLACE_IS_WRONG = frozenset(
    {"master-numeric", "master-loopback", "master-resolve", "rdzv-host", "fqdn-forward", "port-free"}
)
# Kinds that make a node publish an address at which others cannot reach it.
ADDRESS_IS_WRONG = frozenset(
    {"hostname-loopback", "hostname-unresolvable", "hostname-not-local", "ifname-exists", "iface-up", "iface-agree"}
)
SHOWN = 4  # how many attempts are shown one by one as evidence


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
        return tuple(dict.fromkeys(self.name(number) for number in numbers))

    def arrived(self) -> tuple[Visit, ...]:
        return tuple(visit for visit in self.rendezvous.visits if visit.arrived)

    def node(self, number: int) -> Node | None:
        arrived = self.arrived()
        if len(arrived) != len(self.rendezvous.fleet.nodes):
            return None
        pairs = zip(arrived, self.rendezvous.fleet.nodes, strict=True)
        return next((node for visit, node in pairs if visit.number == number), None)

    def cause(self, kinds: frozenset[str], host: str) -> Finding | None:
        """Return an error of these kinds that concerns a host, or no host in particular."""
        errors = (finding for finding in self.found if finding.severity is Severity.ERROR and finding.kind in kinds)
        return next((error for error in errors if not error.hosts or host in error.hosts), None)


def describe(attempt: Connecting) -> str:
    """Return "10.0.0.4:29500: Connection refused (after 0.3 ms)"."""
    place = say_place(attempt.address or attempt.host, attempt.port)
    return f"{place}: {attempt.error or attempt.contact.value} (after {say_duration(attempt.duration_s)})"


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


Pair = tuple[int, int]  # source and target, by node number


class PairSide(str, Enum):
    """Which pairs of a node fail."""

    INBOUND = "inbound"  # no node reaches it: its column is bad
    OUTBOUND = "outbound"  # it reaches no node: its row is bad
    CUT_OFF = "cut-off"  # both its column and its row are bad
    PAIR = "pair"  # only one pair of nodes fails, in one or both directions; both work with others
    ALL = "all"  # no pair at all works


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPairs:
    """Nodes that explain some bad pairs."""

    way: PairSide
    nodes: tuple[int, ...]  # one node, the two nodes of a pair, or all nodes if nothing works
    pairs: tuple[Pair, ...]  # the bad pairs that this explains
    alone: bool = False  # whether this rests on a single pair, so that the other end may be to blame as well


def explain(tried: Mapping[Pair, bool]) -> tuple[BadPairs, ...]:
    """Return the nodes that explain the bad pairs; ``tried`` says for each tested pair whether it is bad.

    Whole rows and columns come first, the one that explains the most before others. If equal, the column wins, because
    refused connections nearly always come from a filter of incoming traffic. The rest are pairs.
    """
    bad = {pair for pair, is_bad in tried.items() if is_bad}
    if not bad:
        return ()
    if len(bad) == len(tried) and len(bad) > 1:
        nodes = tuple(sorted({node for pair in bad for node in pair}))
        return (BadPairs(way=PairSide.ALL, nodes=nodes, pairs=tuple(sorted(bad))),)
    found: list[BadPairs] = []
    left = set(bad)
    # A row or column of one pair counts only if there are just two nodes.
    columns, rows = (grouped((pair[end], pair) for pair in tried) for end in (1, 0))
    least = 1 if len(columns.keys() | rows.keys()) == 2 else 2
    lines = [
        BadPairs(way=way, nodes=(node,), pairs=tuple(pairs), alone=len(pairs) == 1)
        for way, lines in ((PairSide.INBOUND, columns), (PairSide.OUTBOUND, rows))
        for node, pairs in sorted(lines.items())
        if len(pairs) >= least and bad.issuperset(pairs)
    ]
    while left:
        best = max(lines, key=lambda line: len(left.intersection(line.pairs)), default=None)
        explained = left.intersection(best.pairs) if best is not None else None
        if best is None or not explained:
            break
        found.append(replace(best, pairs=tuple(sorted(explained))))
        left -= explained
    by_node: dict[int, BadPairs] = {}
    for blame in found:
        (node,) = blame.nodes
        former = by_node.get(node)
        both = None if former is None else tuple(sorted({*former.pairs, *blame.pairs}))
        by_node[node] = blame if both is None else BadPairs(way=PairSide.CUT_OFF, nodes=(node,), pairs=both)
    between = grouped(((min(pair), max(pair)), pair) for pair in sorted(left))
    rest = (BadPairs(way=PairSide.PAIR, nodes=nodes, pairs=tuple(pairs)) for nodes, pairs in between.items())
    return (*(by_node[node] for node in sorted(by_node)), *rest)


HOW = {
    Contact.CONNECTED: "the connection works, but the first bytes are lost",
    Contact.NO_ANSWER: "no response, packets are dropped",
    Contact.REFUSED: "refused, although the port is open: a firewall answers with a reset",
    Contact.RESET: "the connection is closed",
    Contact.UNREACHABLE: "rejected with an error: a firewall prohibits it, or no route exists",
}


@rule(
    "DD220", "mesh", Severity.ERROR, "Nodes cannot connect to each other on the ports of Gloo and NCCL",
    after=("iface-agree",), group=CheckGroup.NETWORK,
)  # fmt: skip
def check_mesh(meeting: Meeting) -> Answer:
    """Report pairs of nodes that cannot connect, and which host causes it."""
    if not meeting.rendezvous.complete:
        return unknown("this node could not reach the others, so no pair of nodes was tested")
    if len(meeting.arrived()) < 2:
        return skipped("fewer than two nodes joined")
    tried = {(pair.source, pair.target): pair for pair in meeting.rendezvous.pairs if pair.connecting is not None}
    tried_well = {key: pair for key, pair in tried.items() if _address_is_right(meeting, pair)}
    if not tried_well:
        if tried:
            return skipped("the nodes publish wrong addresses, which other checks report")
        reasons = (pair.skipped for pair in meeting.rendezvous.pairs if pair.skipped)
        return skipped(next(reasons, "no pair of nodes was tested"))
    bad = {key: failure_of(pair) for key, pair in tried_well.items()}
    blames = explain({key: failure is not None for key, failure in bad.items()})
    connect = f"{sum(failure_of(pair) is None for pair in tried.values())} of {len(tried)} ordered pairs connect"
    return judged((_pairs_problem(meeting, blame, tried_well) for blame in blames), connect)


def _address_is_right(meeting: Meeting, pair: NodePair) -> bool:
    """Return whether a pair's address means its target on every node, so that the test is about the network."""
    try:
        if ipaddress.ip_address(pair.address.partition("%")[0]).is_loopback:
            return False
    except ValueError:
        return False
    return meeting.cause(ADDRESS_IS_WRONG, meeting.visit(pair.target).host) is None


def failure_of(pair: NodePair) -> Connecting | None:
    """Return the connection of a pair if it failed or broke before a few bytes were answered, else None."""
    if pair.connecting is None or pair.connecting.contact is not Contact.CONNECTED:
        return pair.connecting
    lost = pair.small is not None and pair.small.contact is not Contact.CONNECTED
    return pair.connecting if lost else None


def _pairs_problem(meeting: Meeting, blame: BadPairs, pairs: dict[tuple[int, int], NodePair]) -> Problem:
    bad = [pairs[key] for key in blame.pairs]
    refusing = tuple(_refusals(meeting, blame))
    with_it = blame.way in {PairSide.CUT_OFF, PairSide.INBOUND, PairSide.OUTBOUND} and len(meeting.arrived()) > 2
    share = "with it" if with_it else ""
    guess = (blame.alone or blame.way is PairSide.ALL) and not refusing
    first = meeting.name(blame.nodes[0])
    lines = []
    for pair in bad:
        failure, small = pair.connecting, pair.small
        if failure is None:
            continue
        what = describe(failure)
        if failure.contact is Contact.CONNECTED and small is not None:
            what = f"{say_place(pair.address, pair.port)}: {small.error or small.contact.value}"
        lines.append(f"{_both(meeting, pair)} at {what}")
    failure = bad[0].connecting
    how = "not tested" if failure is None else HOW.get(failure.contact, "it fails")
    source, target = map(meeting.name, blame.pairs[0])
    if blame.way is PairSide.ALL:
        who = f"{name_list(meeting.names(blame.nodes))} cannot connect to each other in any direction"
    elif blame.way is PairSide.PAIR:
        both = " or vice versa" if len(blame.pairs) > 1 else ""
        who = f"{source} cannot connect to {target}{both}, but both can connect to others"
    elif blame.alone:
        who = f"{source} cannot connect to {target} (inbound there), but the other direction works"
    elif blame.way is PairSide.CUT_OFF:
        who = f"{first} is cut off: it cannot connect to any other host, and no other host can connect to it"
    elif blame.way is PairSide.INBOUND:
        who = f"no other host can connect to {first} (inbound)"
    else:
        who = f"{first} cannot connect to any other host (outbound)"
    return Problem(
        summary=f"{who}: {how}",
        hosts=meeting.names(blame.nodes),
        evidence=(*first_few(lines), f"{len(bad)} of the {len(pairs)} ordered pairs fail {share}".rstrip(), *refusing),
        fix=_pairs_fix(meeting, blame, bad),
        confidence=Confidence.MEDIUM if guess else Confidence.HIGH,
    )


def _refusals(meeting: Meeting, blame: BadPairs) -> Iterator[str]:
    if blame.way is PairSide.OUTBOUND:
        return
    for number in sorted({target for _, target in blame.pairs}):
        node = meeting.node(number)
        network = known(node.network) if node is not None else None
        for chain in network.firewall if network is not None and isinstance(network.firewall, tuple) else ():
            yield f"{meeting.name(number)}: {chain.name}: {chain.refusal}"


def _pairs_fix(meeting: Meeting, blame: BadPairs, bad: list[NodePair]) -> str:
    if blame.way is PairSide.OUTBOUND:
        host, route = meeting.name(blame.nodes[0]), f"ip route get {bad[0].address}"
        return f"check outgoing rules (nft list ruleset, as root) and the route ({route}) on {host}"
    first = meeting.node(bad[0].target)
    sources = tuple(dict.fromkeys(meeting.visit(pair.source).published for pair in bad))
    targets = name_list(meeting.names(dict.fromkeys(pair.target for pair in bad)))
    network = known(first.network) if first is not None else None
    low, high = (network.local_ports if network is not None else None) or EPHEMERAL
    return (
        f"{open_ports(first, None, sources)} (as root on {targets}); in a cloud, allow TCP ports {low}-{high} from the "
        "nodes' network in the security group"
    )


# Our choice: twice the initial window of 10 segments (RFC 6928). If no large packet ever arrives, the window does not
# open, and only its first segments are resent.
FIRST_FLIGHT = 20
# Our choice: the share of resent segments from which on TCP's throughput is far below the link's (Mathis et al., 1997:
# it goes with one over the square root of the loss). A healthy link between machines of a cluster loses none.
LOSSY = 0.01
LEAST_RETRANSMITTED = 3  # our choice: fewer may be the end of a burst that overran a buffer once
# Our choice: this many times slower than the fastest pair. A busy host is slower by less. The median does not work:
# with three nodes, one slow node is part of two thirds of the pairs.
SLOWER = 5.0
# Our choice: it must also take this much longer. With twelve processes per core, waiting for the core took up to 0.13
# s; 4 MiB over a link of 100 Mbit/s take 0.34 s.
LEAST_DELAY_S = 0.25
# Our choice: leaves room for the headers of VXLAN (50 bytes), WireGuard (60) and IPsec (up to 73) in packets of 1500.
SAFE_MTU = 1400


def is_black_hole(pair: NodePair) -> bool:
    """Return whether small payloads arrive but nothing of large ones does, because full-size packets vanish.

    If it is unknown what was acknowledged, it counts whether more was sent than fits into a window.
    """
    small, large = pair.small, pair.large
    if small is None or large is None or small.contact is not Contact.CONNECTED:
        return False
    if large.contact is not Contact.NO_ANSWER:
        return False
    if large.delivered_bytes is not None:
        return large.delivered_bytes <= 0
    return large.sent is None or large.retransmitted is None or large.sent - large.retransmitted <= FIRST_FLIGHT


def lost_share(pair: NodePair) -> float | None:
    """Return the share of segments that had to be resent, or None if it is unknown or the pair is a black hole."""
    large = pair.large
    if large is None or large.sent is None or large.retransmitted is None or not large.sent or is_black_hole(pair):
        return None
    return large.retransmitted / large.sent


def is_lossy(pair: NodePair) -> bool:
    """Return whether a pair loses more than a healthy network does.

    If most resent segments had arrived, the return path loses packets, or a host is slow to acknowledge.
    """
    share, large = lost_share(pair), pair.large
    if share is None or large is None or large.retransmitted is None:
        return False
    arrived = (large.needless or 0) * 2 >= large.retransmitted
    return share >= LOSSY and large.retransmitted >= LEAST_RETRANSMITTED and not arrived


def rate_of(pair: NodePair) -> float | None:
    """Return the bytes per second of a large payload, or those until it was given up.

    Return None if it made no progress or broke off, or if packet loss made it slow.
    """
    large = pair.large
    if large is None or not large.duration_s or is_lossy(pair):
        return None
    if large.contact is Contact.CONNECTED:
        return large.size_bytes / large.duration_s
    if large.contact is Contact.NO_ANSWER and large.delivered_bytes:
        return large.delivered_bytes / large.duration_s
    return None


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
        *(
            find(meeting, blame, [pairs[key] for key in blame.pairs])
            for is_bad, find in ((is_black_hole, _black_hole), (is_lossy, _loss))
            for blame in explain({key: is_bad(pair) for key, pair in pairs.items()})
        ),
        *_slow(meeting, pairs),
    ]
    counted = any(pair.large is not None and pair.large.retransmitted is not None for pair in pairs.values())
    if not findings and not counted:
        return unknown("the kernel does not report retransmitted segments (TCP_INFO)")
    sent = [pair.large for pair in pairs.values() if pair.large is not None and pair.connecting is not None]
    arrived = sum(transfer.contact is Contact.CONNECTED for transfer in sent)
    return judged(findings, f"{arrived} of {len(sent)} large payloads arrived")


def _slow(meeting: Meeting, pairs: Pairs) -> list[Problem]:
    rates = {key: rate for key, pair in pairs.items() if (rate := rate_of(pair)) is not None}
    if not rates:
        return []
    took_s = {key: large.duration_s or 0.0 for key in rates if (large := pairs[key].large) is not None}
    best = max(rates, key=lambda key: rates[key])
    blames = explain({
        key: rate * SLOWER <= rates[best] and took_s[key] - took_s[best] >= LEAST_DELAY_S
        for key, rate in rates.items()
    })  # fmt: skip
    # Data into a host waits for what leaves it slowly, because its acknowledgements go that way.
    whole = {node for blame in blames if blame.way is not PairSide.PAIR for node in blame.nodes}
    problems = []
    for blame in blames:
        if blame.way is PairSide.PAIR and not whole.isdisjoint(blame.nodes):
            continue
        interface = pairs[blame.pairs[0]].interface or "eth0"
        hosts = meeting.names(blame.nodes)
        lines = []
        for key in blame.pairs:
            large = pairs[key].large
            given_up = "" if large is not None and large.contact is Contact.CONNECTED else "stopped after "
            took = f"{given_up}{took_s[key] * 1000:.0f} ms"
            lines.append(f"{_both(meeting, pairs[key])}: {say_rate(rates[key])}, {took}")
        problems.append(Problem(
            kind="slow-link",
            summary=f"data transfer is slow {_where(meeting, blame)}: "
            f"{say_rate(min(rates[key] for key in blame.pairs))}, but another pair has {say_rate(rates[best])}",
            hosts=hosts,
            evidence=first_few(lines),
            fix=f"ethtool {interface} | grep Speed; tc qdisc show dev {interface} on {name_list(hosts)}; then "
            "check the cable, the switch port and its rate limits",
            confidence=_confidence(blame),
        ))  # fmt: skip
    return problems


def _black_hole(meeting: Meeting, blame: BadPairs, bad: list[NodePair]) -> Problem:
    interface = bad[0].interface or "eth0"
    numbers = dict.fromkeys(number for pair in bad for number in (pair.source, pair.target))
    found = []
    for number in numbers:
        node = meeting.node(number)
        network = known(node.network) if node is not None else None
        name = meeting.visit(number).interface
        mtu = next((nic.mtu for nic in network.interfaces if nic.name == name), None) if network is not None else None
        if mtu is not None:
            found.append(f"{name} of {meeting.name(number)} has an MTU of {mtu}")
    stalled = []
    for pair in bad:
        if pair.small is None or pair.large is None:
            continue
        again = pair.large.retransmitted
        small, large = say_size(pair.small.size_bytes), say_size(pair.large.size_bytes)
        resent = f" ({again} segments were resent without success)" if again else ""
        stalled.append(f"{_both(meeting, pair)}: {small} arrived, {large} stalled{resent}")
    return Problem(
        kind="mtu",
        summary=f"large packets are lost {_where(meeting, blame)}: small payloads arrive, but large ones do not",
        severity=Severity.ERROR,
        hosts=meeting.names(blame.nodes),
        evidence=(*first_few(stalled), *first_few(found)),
        fix=f"ip link set dev {interface} mtu {SAFE_MTU} on all hosts, as root, is a workaround; ping -M do -s 1472 "
        f'{bad[0].address} tests the path MTU; allow ICMP "fragmentation needed" through the firewalls',
        confidence=_confidence(blame),
    )


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


def _where(meeting: Meeting, blame: BadPairs) -> str:
    first = meeting.name(blame.nodes[0])
    words = {
        PairSide.ALL: f"between {name_list(meeting.names(blame.nodes))} in every direction",
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
