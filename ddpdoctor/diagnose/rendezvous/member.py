"""One participating node: its launch settings, and the facts that it reads about itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ddpdoctor
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.launch import read_identity, read_process
from ddpdoctor.collect.system import ReadingPlan, read_node
from ddpdoctor.diagnose.assembly import Head
from ddpdoctor.diagnose.rendezvous.messages import NodeArrival, SentFacts
from ddpdoctor.diagnose.selection import sections_of
from ddpdoctor.exchange.clocks import measure_clocks
from ddpdoctor.model.reaching import Publication
from ddpdoctor.model.reading import Unread, known
from ddpdoctor.rules.environment.rendezvous import takes_itself_for
from ddpdoctor.rules.interface_choice import choose
from ddpdoctor.rules.registry import CheckGroup, rules_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.launch import Identity
    from ddpdoctor.collect.system import System
    from ddpdoctor.diagnose.rendezvous.meeting import JoinedMeeting
    from ddpdoctor.model.launch import NodeLaunch
    from ddpdoctor.model.node import Node, NodeProcess
    from ddpdoctor.rules.registry import Rule

BESIDE = frozenset({"clock", "version-same"})
"""Checks of other groups that concern how nodes start together."""
HEAD_LIMIT_S = 5.0
FQDN_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNode:
    """This node's identity and launch."""

    launch: NodeLaunch
    system: System
    process: NodeProcess
    identity: Identity

    @property
    def env(self) -> Mapping[str, str]:
        """The environment, including the command's options as variables."""
        return self.system.env

    def arrived(self) -> NodeArrival:
        """Return the message that the node sends when it joins."""
        launch = self.launch
        return NodeArrival(
            host=self.identity.host,
            machine=f"{self.identity.machine}/{self.identity.container}",
            settings=launch.settings,
            rank=launch.launch.rank,
            leads=launch.launch.reads_node,
            fewest=launch.fewest,
            most=launch.most,
            version=ddpdoctor.__version__,
        )


def make_member(launch: NodeLaunch, system: System) -> OwnNode:
    """Return this node as a participant."""
    local_rank = launch.launch.local_rank
    process = read_process(system, rank=launch.settings.node_rank, local_rank=0 if local_rank is None else local_rank)
    return OwnNode(launch=launch, system=system, process=process, identity=read_identity(system))


def chosen_rules() -> tuple[Rule, ...]:
    """Return the rules about machines and launches that concern how nodes meet."""
    groups = {CheckGroup.NETWORK, CheckGroup.LAUNCH}
    return tuple(rule for rule in rules_of("environment") if rule.group in groups or rule.kind in BESIDE)


def read_own_node(member: OwnNode, entry: JoinedMeeting | None) -> Node:
    """Read this node. ``entry`` is None if it has not met the others.

    Every node looks up the name of the first host, which torchrun's c10d publishes.
    """
    sections = sections_of(chosen_rules())
    head = None if entry is None or member.launch.by_number else _head(member, entry)
    plan = ReadingPlan(sections=sections, use_torch=False, head=head)
    node = read_node(member.system, plan, (member.process,))
    if entry is None or isinstance(node.clock, Unread):
        return node
    offset_s = 0.0 if entry.serves else measure_clocks(entry.client).wall_s
    return replace(node, clock=replace(node.clock, offset_s=offset_s))


def _head(member: OwnNode, entry: JoinedMeeting) -> str | None:
    """Return the full name of the first host. Only torchrun's c10d rendezvous publishes it."""
    if not entry.serves:
        head = entry.conversation.wait(Head, "head", HEAD_LIMIT_S, "the node that judges")
        return None if head is None else head.fqdn
    fqdn = ask_side_by_side({"fqdn": member.system.calls.fqdn}, FQDN_LIMIT_S)["fqdn"].value
    entry.conversation.send("head", Head(fqdn=fqdn))
    return fqdn


def seen_by(member: OwnNode, node: Node, arrival: int, *, own_address: bool) -> SentFacts:
    """Return the facts that this node sends. ``own_address``: the store's address belongs to this node."""
    return SentFacts(
        process=member.process,
        node=replace(node, processes=()),
        publication=_publication(node, arrival),
        serves=_serves(member.launch, node, own_address=own_address),
    )


def _publication(node: Node, number: int) -> Publication:
    """Return the address at which others would reach this node's ranks: Gloo's, or else NCCL's."""
    network = known(node.network)
    if network is None:
        return Publication(number=number, address="", interface="")
    choice = choose(node, network)
    picks = choice.nccl[:1] if choice.gloo is None else choice.gloo[:1]
    for pick in picks:
        return Publication(number=number, address=str(pick.ip), interface=pick.interface.name)
    return Publication(number=number, address="", interface="")


def _serves(launch: NodeLaunch, node: Node, *, own_address: bool) -> bool:
    """Return whether this node serves the store, by its number or by the logic of torchrun's c10d.

    That logic can fail if the address belongs to this host but its name does not resolve to it. The node still serves
    then, so that other problems can be found too.
    """
    if launch.by_number:
        return launch.settings.node_rank == 0
    if launch.is_host is not None:
        return launch.is_host
    names = known(node.names)
    return own_address or (names is not None and takes_itself_for(names, launch.host) is True)
