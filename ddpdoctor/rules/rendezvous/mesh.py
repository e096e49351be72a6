"""DD220: whether every node can connect to every other one on the ports that Gloo and NCCL use."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reaching import Contact, say_place
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.firewall_opening import EPHEMERAL, open_ports
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.rendezvous.lines import PairSide, explain
from ddpdoctor.rules.rendezvous.meeting import ADDRESS_IS_WRONG, Meeting, describe, first_few

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.reaching import Connecting, NodePair
    from ddpdoctor.rules.rendezvous.lines import BadPairs

HOW = {
    Contact.NO_ANSWER: "no response, packets are dropped",
    Contact.REFUSED: "refused, although the port is open: a firewall answers with a reset",
    Contact.RESET: "the connection is closed",
    Contact.UNREACHABLE: "rejected with an error: a firewall prohibits it, or there is no route",
}


@rule(
    "DD220",
    "mesh",
    Severity.ERROR,
    "Nodes cannot connect to each other on the ports of Gloo and NCCL",
    after=("iface-agree",),
    group=CheckGroup.NETWORK,
)
def check_mesh(meeting: Meeting) -> Answer:
    """Report pairs of nodes that cannot connect, and which host causes it."""
    if not meeting.rendezvous.complete:
        return unknown("this node could not reach the others, so no pair of nodes was tested")
    if len(meeting.arrived()) < 2:
        return skipped("fewer than two nodes joined")
    tried = {(pair.source, pair.target): pair for pair in meeting.rendezvous.pairs if pair.connecting is not None}
    tried_well = {key: pair for key, pair in tried.items() if _address_is_right(meeting, pair)}
    if not tried_well:
        return skipped(_why_not(meeting, bool(tried)))
    bad = {key: failure_of(pair) for key, pair in tried_well.items()}
    blames = explain({key: failure is not None for key, failure in bad.items()})
    connect = f"{sum(failure_of(pair) is None for pair in tried.values())} of {len(tried)} ordered pairs connect"
    return judged((_finding(meeting, blame, tried_well) for blame in blames), connect)


def _address_is_right(meeting: Meeting, pair: NodePair) -> bool:
    """Return whether a pair's address means its target on every node, so that the test is about the network."""
    try:
        if ipaddress.ip_address(pair.address.partition("%")[0]).is_loopback:
            return False
    except ValueError:
        return False
    return meeting.cause(ADDRESS_IS_WRONG, meeting.visit(pair.target).host) is None


def _why_not(meeting: Meeting, tried: bool) -> str:  # noqa: FBT001 - the one thing it goes by
    if tried:
        return "the nodes publish wrong addresses, which other checks report"
    skipped = next((pair.skipped for pair in meeting.rendezvous.pairs if pair.skipped), "")
    return skipped or "no pair of nodes was tested"


def failure_of(pair: NodePair) -> Connecting | None:
    """Return the connection of a pair if it failed or broke before a few bytes were answered, else None."""
    if pair.connecting is None or pair.connecting.contact is not Contact.CONNECTED:
        return pair.connecting
    lost = pair.small is not None and pair.small.contact is not Contact.CONNECTED
    return pair.connecting if lost else None


def _finding(meeting: Meeting, blame: BadPairs, pairs: dict[tuple[int, int], NodePair]) -> Problem:
    bad = [pairs[key] for key in blame.pairs]
    refusing = tuple(_refusals(meeting, blame))
    with_it = blame.way in {PairSide.CUT_OFF, PairSide.INBOUND, PairSide.OUTBOUND} and len(meeting.arrived()) > 2
    share = "with it" if with_it else ""
    guess = (blame.alone or blame.way is PairSide.ALL) and not refusing
    return Problem(
        summary=f"{_who(meeting, blame)}: {_how(bad[0])}",
        hosts=meeting.names(blame.nodes),
        evidence=(
            *first_few(_line(meeting, pair) for pair in bad),
            f"{len(bad)} of the {len(pairs)} ordered pairs fail {share}".rstrip(),
            *refusing,
        ),
        fix=_fix(meeting, blame, bad),
        confidence=Confidence.MEDIUM if guess else Confidence.HIGH,
    )


def _who(meeting: Meeting, blame: BadPairs) -> str:
    first = meeting.name(blame.nodes[0])
    if blame.way is PairSide.ALL:
        return f"{name_list(meeting.names(blame.nodes))} cannot connect to each other in any direction"
    if blame.way is PairSide.PAIR:
        source, target = blame.pairs[0]
        both = " or vice versa" if len(blame.pairs) > 1 else ""
        return f"{meeting.name(source)} cannot connect to {meeting.name(target)}{both}, but both can connect to others"
    if blame.alone:
        source, target = blame.pairs[0]
        return (
            f"{meeting.name(source)} cannot connect to {meeting.name(target)} (inbound there), but the other direction "
            "works"
        )
    if blame.way is PairSide.CUT_OFF:
        return f"{first} is cut off: it cannot connect to any other host, and no other host can connect to it"
    if blame.way is PairSide.INBOUND:
        return f"no other host can connect to {first} (inbound)"
    return f"{first} cannot connect to any other host (outbound)"


def _how(pair: NodePair) -> str:
    if pair.connecting is not None and pair.connecting.contact is Contact.CONNECTED:
        return "the connection works, but the first bytes are lost"
    return HOW.get(pair.connecting.contact, "it fails") if pair.connecting is not None else "not tested"


def _line(meeting: Meeting, pair: NodePair) -> str:
    failure = pair.connecting
    assert failure is not None
    if failure.contact is Contact.CONNECTED and pair.small is not None:
        what = f"{say_place(pair.address, pair.port)}: {pair.small.error or pair.small.contact.value}"
    else:
        what = describe(failure)
    return f"{meeting.name(pair.source)} to {meeting.name(pair.target)} at {what}"


def _refusals(meeting: Meeting, blame: BadPairs) -> Iterator[str]:
    """Yield the packet filter rules of unreachable hosts that refuse connections."""
    if blame.way is PairSide.OUTBOUND:
        return
    for number in sorted({target for _, target in blame.pairs}):
        node = meeting.node(number)
        network = known(node.network) if node is not None else None
        for chain in network.firewall if network is not None and isinstance(network.firewall, tuple) else ():
            yield f"{meeting.name(number)}: {chain.name}: {chain.refusal}"


def _fix(meeting: Meeting, blame: BadPairs, bad: list[NodePair]) -> str:
    if blame.way is PairSide.OUTBOUND:
        host = meeting.name(blame.nodes[0])
        return (
            f"check outgoing rules (nft list ruleset, as root) and the route (ip route get {bad[0].address}) on {host}"
        )
    first = meeting.node(bad[0].target)
    sources = tuple(dict.fromkeys(meeting.visit(pair.source).published for pair in bad))
    targets = name_list(meeting.names(dict.fromkeys(pair.target for pair in bad)))
    command = f"{open_ports(first, None, sources)} (as root on {targets})"
    return (
        f"{command}; in a cloud, allow TCP ports {_ports(meeting, bad)} from the nodes' network in the security group"
    )


def _ports(meeting: Meeting, bad: list[NodePair]) -> str:
    node = meeting.node(bad[0].target)
    network = known(node.network) if node is not None else None
    low, high = (network.local_ports if network is not None else None) or EPHEMERAL
    return f"{low}-{high}"
