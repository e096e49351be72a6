"""Every ordered pair of nodes: a connection to a port opened for it alone, a small and a large payload over it.

Connections are made many at a time, since they cost nothing and one that is dropped takes seconds; payloads one at a
time, in the rounds of ``rounds``. Keys: ``posts/BLOCK/NUMBER`` has the
ports of a node, ``pairs/BLOCK/NUMBER`` what it saw.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.reaching import NodePair
from ddpdoctor.probes.rendezvous.payloads import Pace
from ddpdoctor.probes.rendezvous.posts import Lost, Posts, PostsOpen
from ddpdoctor.probes.rendezvous.rounds import blocks_of, sources_of, targets_of
from ddpdoctor.probes.rendezvous.visits import Target, Visitor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.reaching import Publication

Kind = TypeVar("Kind")

BASE_S, NODE_S = 30.0, 0.25
"""Ours: the whole mesh may take so long, and so much more for each node. Four that are well take some tenths of a
second, and 512 half a minute."""
AT_ONCE_S = 1.0
"""Ours: who has opened its ports within so long is visited first."""
PATIENCE_S, PATIENCE_NODE_S = 8.0, 0.15
"""Ours: one that has not after so long, and so much more for each node, is not there."""
COLLECT_S = 5.0
"""Ours: what the others' last words may take beyond that."""
FAILURES = 4
"""Ours: what is lost on so many payloads that stall is enough for one node; what follows is left out, and says so."""
LONGEST_SEND_S, LEAST_SEND_S, ALL_SENDS_S = 1.0, 0.05, 30.0
"""Ours: a slow node may send a large payload for so long, so that all of its payloads together end in time."""
LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLimits:
    """What the mesh may take."""

    connect_s: float = 3.0
    stall_s: float = 4.0
    """A payload of which nothing gets on for so long has stalled; TCP sends again after 0.2, 0.6, 1.4 and 3 s."""
    total_s: float | None = None
    """None: by the number of nodes."""
    port_range: tuple[int, int] | None = None
    """The ports to listen on, both ends among them; None: any that the kernel gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsTold:
    """What a node saw of its targets in one block. Sent to the first node."""

    pairs: tuple[NodePair, ...]


def run_mesh(
    conversation: Conversation, own: int, publications: Sequence[Publication], limits: MeshLimits
) -> tuple[NodePair, ...]:
    """Run this node's part; return all pairs on the first of ``publications``, this node's own on the others.

    ``own`` is this node's number. All nodes call it at about the same time with equal publications, in a conversation
    of its own. Raises ``StoreError`` where the store is lost; what cannot be read counts as not heard.
    """
    mesh = _Mesh(conversation, own, publications, limits)
    blocks = blocks_of(len(publications))
    pairs = [pair for number, rounds in enumerate(blocks) for pair in mesh.run_block(number, rounds)]
    return mesh.collect(pairs, blocks) if mesh.place == 0 else tuple(pairs)


class _Mesh:
    """One node's part."""

    def __init__(
        self, conversation: Conversation, own: int, publications: Sequence[Publication], limits: MeshLimits
    ) -> None:
        self._conversation, self._publications, self._limits = conversation, publications, limits
        self._count = len(publications)
        self.place = next(place for place, one in enumerate(publications) if one.number == own)
        total_s = limits.total_s if limits.total_s is not None else BASE_S + NODE_S * self._count
        self._deadline = time.monotonic() + total_s
        self._pace = Pace(
            stall_s=limits.stall_s, send_s=min(LONGEST_SEND_S, max(LEAST_SEND_S, ALL_SENDS_S / self._count))
        )
        self._lost = Lost(limit_s=FAILURES * limits.stall_s)
        self._visitor = Visitor(
            own,
            connect_s=limits.connect_s,
            pace=self._pace,
            lost=Lost(limit_s=FAILURES * limits.stall_s),
            deadline=self._deadline,
        )

    def run_block(self, block: int, rounds: range) -> tuple[NodePair, ...]:
        """Listen for the sources of some rounds and visit their targets."""
        own = self._publications[self.place]
        sources = [self._publications[place].number for place in sources_of(self.place, rounds, self._count)]
        targets = [self._publications[place] for place in targets_of(self.place, rounds, self._count)]
        patience = min(time.monotonic() + PATIENCE_S + PATIENCE_NODE_S * self._count, self._deadline)
        with Posts(own.address, sources, self._limits.port_range, self._pace, self._lost) as posts:
            self._conversation.send(f"posts/{block}/{own.number}", posts.told)
            pairs = self._visit(block, targets, patience)
            self._conversation.send(f"pairs/{block}/{own.number}", PairsTold(pairs=pairs))
            self._await(posts, block, sources if posts.told.ports else [], patience)
        return pairs

    def _visit(self, block: int, targets: Sequence[Publication], patience: float) -> tuple[NodePair, ...]:
        """Visit those that are there at once, and then those that come late: nobody waits for one that is dead."""
        seen: list[NodePair] = []
        late = list(targets)
        for deadline in (min(time.monotonic() + AT_ONCE_S, patience), patience):
            heard = self._hear(PostsOpen, f"posts/{block}", [one.number for one in late], deadline)
            there = [one for one in late if one.number in heard]
            seen += self._visitor.visit([self._target(one, heard[one.number]) for one in there])
            late = [one for one in late if one.number not in heard]
        return (*seen, *self._visitor.visit([self._target(one, None) for one in late]))

    def _target(self, publication: Publication, posts: PostsOpen | None) -> Target:
        port = posts.ports.get(str(self._publications[self.place].number), 0) if posts is not None else 0
        obstacle = "nothing was heard of its ports" if posts is None else posts.error
        return Target(
            publication=publication,
            port=port,
            ticket=_ticket(posts),
            obstacle=obstacle if obstacle or port else "it opened no port for this node",
        )

    def _await(self, posts: Posts, block: int, sources: Iterable[int], patience: float) -> None:
        """Listen until each source was here, or has told what it saw instead, or is not there at all."""
        waiting = set(sources)
        while time.monotonic() < self._deadline:
            waiting = {one for one in waiting - posts.served if not self._conversation.has(f"pairs/{block}/{one}")}
            if time.monotonic() > patience:
                waiting = {one for one in waiting if self._conversation.has(f"posts/{block}/{one}")}
            if not waiting:
                return
            time.sleep(LOOK_EVERY_S)

    def collect(self, own: Sequence[NodePair], blocks: Sequence[range]) -> tuple[NodePair, ...]:
        """Return the pairs of all nodes, by source and target; those that were not heard of with the reason."""
        pairs = {(pair.source, pair.target): pair for pair in own}
        there = [one.number for one in self._publications[1:] if self._conversation.has(f"posts/0/{one.number}")]
        for block in range(len(blocks)):
            for number, told in self._hear(PairsTold, f"pairs/{block}", there, self._deadline + COLLECT_S).items():
                said = told.pairs if told is not None else ()
                pairs |= {(number, pair.target): pair for pair in said if pair.source == number}
        return tuple(
            pairs.get((source.number, target.number)) or _unheard(source, target)
            for source in self._publications
            for target in self._publications
            if source is not target
        )

    def _hear(self, kind: type[Kind], key: str, numbers: Sequence[int], deadline: float) -> dict[int, Kind | None]:
        """Return what nodes left, by number, once all have; None for what cannot be read, nothing for what is late."""
        bad: dict[int, Kind | None] = {}
        heard = self._conversation.gather(
            kind, key, lambda: numbers, deadline - time.monotonic(), on_bad=lambda number, _: bad.update({number: None})
        )
        return bad | heard


def _ticket(posts: PostsOpen | None) -> bytes:
    try:
        return bytes.fromhex(posts.ticket) if posts is not None else b""
    except ValueError:
        return b""


def _unheard(source: Publication, target: Publication) -> NodePair:
    return NodePair(
        source=source.number,
        target=target.number,
        address=target.address,
        port=0,
        interface=target.interface,
        skipped="nothing was heard of what the source saw",
    )
