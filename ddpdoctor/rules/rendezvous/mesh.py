"""DD220: whether every node can connect to every other on the ports that Gloo and NCCL take."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Finding, Severity
from ddpdoctor.model.reaching import Contact, say_place
from ddpdoctor.model.reading import known
from ddpdoctor.rules.firewall_opening import EPHEMERAL, open_ports
from ddpdoctor.rules.majority import host_list
from ddpdoctor.rules.registry import rule
from ddpdoctor.rules.rendezvous.lines import Way, explain
from ddpdoctor.rules.rendezvous.scene import ADDRESS_IS_WRONG, Scene, describe, finding_of, first_few
from ddpdoctor.rules.ruling import Ruling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.reaching import Connecting, NodePair
    from ddpdoctor.rules.rendezvous.lines import Blame

HOW = {
    Contact.NO_ANSWER: "nothing comes back, packets are dropped",
    Contact.REFUSED: "it is refused, though a port was opened for it: a firewall answers with a reset",
    Contact.RESET: "it is broken off",
    Contact.UNREACHABLE: "it is answered with an error: a firewall prohibits it, or there is no route",
}


@rule("DD220", "mesh", Severity.ERROR, "Nodes cannot connect to each other on the ports that Gloo and NCCL take")
def check_mesh(scene: Scene) -> Ruling:
    """Report pairs of nodes of which one cannot connect to the other, and which host that comes from.

    ## What it means

    Ranks meet at one known port, and then connect to each other on ports that the kernel picks. A firewall that opens
    `MASTER_PORT` alone lets all ranks meet; the first collective, or already `init_process_group`, then waits until its
    time limit.

    ## How it is told

    Every ordered pair: the target opens a fresh port on the address that Gloo or NCCL would publish there, the source
    connects to it and sends a few bytes. A column of the matrix that is all bad blames what comes in to that host, a
    row what goes out of it; both, a host that is cut off. What is left are single pairs. If nothing works at all, the
    network between the hosts is to blame. Between two hosts a column cannot be told from a row: what comes in is
    named, with less confidence, unless the packet filter of that host is seen to refuse.

    ## What else looks like it

    A host that publishes an address that means another host elsewhere, as 127.0.1.1 does: that is `hostname-loopback`
    and its like, and pairs with that host are left out here.

    ## What to do

    Open the ports of `ip_local_port_range` on the host that is named, for the network of the nodes: in its own packet
    filter, or in the security group of the cloud.
    """
    if not scene.rendezvous.complete:
        return Ruling(inconclusive="this node could not meet the others, so that no pair of nodes was judged")
    if len(scene.arrived()) < 2:
        return Ruling(skipped="fewer than two nodes came")
    tried = {(pair.source, pair.target): pair for pair in scene.rendezvous.pairs if pair.connecting is not None}
    judged = {key: pair for key, pair in tried.items() if _address_is_right(scene, pair)}
    if not judged:
        return Ruling(skipped=_why_not(scene, bool(tried)))
    bad = {key: failure_of(pair) for key, pair in judged.items()}
    blames = explain({key: failure is not None for key, failure in bad.items()})
    return Ruling(findings=tuple(_finding(scene, blame, judged) for blame in blames))


def _address_is_right(scene: Scene, pair: NodePair) -> bool:
    """Say whether the address of a pair means its target everywhere, so that it is the network that is judged."""
    try:
        if ipaddress.ip_address(pair.address.partition("%")[0]).is_loopback:
            return False
    except ValueError:
        return False
    return scene.cause(ADDRESS_IS_WRONG, scene.visit(pair.target).host) is None


def _why_not(scene: Scene, tried: bool) -> str:  # noqa: FBT001 - the one thing it goes by
    if tried:
        return "the addresses that the nodes publish are wrong, which other checks report"
    skipped = next((pair.skipped for pair in scene.rendezvous.pairs if pair.skipped), "")
    return skipped or "no pair of nodes was tried"


def failure_of(pair: NodePair) -> Connecting | None:
    """Return the connection of a pair where it failed, or broke before a few bytes were answered; else None."""
    if pair.connecting is None or pair.connecting.contact is not Contact.CONNECTED:
        return pair.connecting
    lost = pair.small is not None and pair.small.contact is not Contact.CONNECTED
    return pair.connecting if lost else None


def _finding(scene: Scene, blame: Blame, pairs: dict[tuple[int, int], NodePair]) -> Finding:
    bad = [pairs[key] for key in blame.pairs]
    refusing = tuple(_refusals(scene, blame))
    guess = (blame.alone or blame.way is Way.ALL) and not refusing
    return finding_of(
        check_mesh,
        f"{_who(scene, blame)}: {_how(bad[0])}",
        hosts=scene.names(blame.nodes),
        evidence=(
            *first_few(_line(scene, pair) for pair in bad),
            f"{len(bad)} of the {len(pairs)} ordered pairs fail {_share(scene, blame)}".rstrip(),
            *refusing,
        ),
        fix=_fix(scene, blame, bad),
        confidence=Confidence.MEDIUM if guess else Confidence.HIGH,
    )


def _who(scene: Scene, blame: Blame) -> str:
    first = scene.name(blame.nodes[0])
    if blame.way is Way.ALL:
        return f"{host_list(scene.names(blame.nodes))} cannot connect to each other at all, in any direction"
    if blame.way is Way.PAIR:
        source, target = blame.pairs[0]
        both = " nor the other way round" if len(blame.pairs) > 1 else ""
        return f"{scene.name(source)} cannot connect to {scene.name(target)}{both}, and both can to others"
    if blame.alone:
        source, target = blame.pairs[0]
        return f"{scene.name(source)} cannot connect to {scene.name(target)} (inbound there), the other way works"
    if blame.way is Way.CUT_OFF:
        return f"{first} is cut off: no other host can connect to it, nor it to any other"
    if blame.way is Way.INBOUND:
        return f"no other host can connect to {first} (inbound)"
    return f"{first} cannot connect to any other host (outbound)"


def _how(pair: NodePair) -> str:
    if pair.connecting is not None and pair.connecting.contact is Contact.CONNECTED:
        return "the connection is made, and the first bytes are lost"
    return HOW.get(pair.connecting.contact, "it fails") if pair.connecting is not None else "it was not tried"


def _line(scene: Scene, pair: NodePair) -> str:
    failure = pair.connecting
    assert failure is not None
    if failure.contact is Contact.CONNECTED and pair.small is not None:
        what = f"{say_place(pair.address, pair.port)}: {pair.small.error or pair.small.contact.value}"
    else:
        what = describe(failure)
    return f"{scene.name(pair.source)} to {scene.name(pair.target)} at {what}"


def _share(scene: Scene, blame: Blame) -> str:
    return "with it" if blame.way in {Way.CUT_OFF, Way.INBOUND, Way.OUTBOUND} and len(scene.arrived()) > 2 else ""


def _refusals(scene: Scene, blame: Blame) -> Iterator[str]:
    """Yield what refuses connections in the packet filters of hosts to which none could be made."""
    if blame.way is Way.OUTBOUND:
        return
    for number in sorted({target for _, target in blame.pairs}):
        node = scene.node(number)
        network = known(node.network) if node is not None else None
        for chain in network.firewall if network is not None and isinstance(network.firewall, tuple) else ():
            yield f"{scene.name(number)}: {chain.name}: {chain.refusal}"


def _fix(scene: Scene, blame: Blame, bad: list[NodePair]) -> str:
    if blame.way is Way.OUTBOUND:
        host = scene.name(blame.nodes[0])
        return f"nft list ruleset, as root on {host}, shows what it lets out; ip route get {bad[0].address} its way"
    first = scene.node(bad[0].target)
    sources = tuple(dict.fromkeys(scene.visit(pair.source).published for pair in bad))
    targets = host_list(scene.names(dict.fromkeys(pair.target for pair in bad)))
    command = f"{open_ports(first, None, sources)} (as root on {targets})"
    return f"{command}; in a cloud, let the nodes' network in on TCP ports {_ports(scene, bad)} in the security group"


def _ports(scene: Scene, bad: list[NodePair]) -> str:
    node = scene.node(bad[0].target)
    network = known(node.network) if node is not None else None
    low, high = (network.local_ports if network is not None else None) or EPHEMERAL
    return f"{low}-{high}"
