"""Tests every ordered pair of nodes: a connection to a port opened for that pair, with a small and a large payload.

In round d, every node sends to the node d places after it, and receives from the one d before. So n - 1 rounds cover
all ordered pairs, and in each round every node sends once and serves once. No node waits for a round to end: a node
goes on to its next target when it is done with one, and a target serves one source at a time. A stalled pair delays
only the nodes that wait for its two ends. Many connections are made at once, because a dropped one takes seconds.

Keys in the store: ``posts/BLOCK/NUMBER`` has the ports of a node, ``pairs/BLOCK/NUMBER`` its results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.reaching import NodePair
from ddpdoctor.probes.rendezvous.payloads import PayloadLimits
from ddpdoctor.probes.rendezvous.posts import LostTime, Posts, PostsOpen
from ddpdoctor.probes.rendezvous.visits import Target, Visitor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.reaching import Publication

Kind = TypeVar("Kind")

BASE_S, NODE_S = 30.0, 0.25
"""Our choice: time limit of the whole mesh, and how much it grows per node. Four healthy nodes take some tenths of a
second, 512 take half a minute."""
AT_ONCE_S = 1.0
"""Our choice: nodes that open their ports within this time are visited first."""
PATIENCE_S, PATIENCE_NODE_S = 8.0, 0.15
"""Our choice: a node that has not opened its ports after this time, plus this much per node, counts as absent."""
COLLECT_S = 5.0
"""Our choice: how long after the time limit to wait for the others' results."""
FAILURES = 4
"""Our choice: a node gives up after losing the time of this many stalled payloads. Later pairs are left out and say
so."""
LONGEST_SEND_S, LEAST_SEND_S, ALL_SENDS_S = 1.0, 0.05, 30.0
"""Our choice: how long a slow node may send a large payload: at most, at least, and all its payloads together."""
LOOK_EVERY_S = 0.02
BLOCK = 64
"""Our choice: rounds whose ports are opened at once. A round needs three descriptors, and a shell usually allows 1,024
per process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLimits:
    """The time limits and ports of the mesh."""

    connect_s: float = 3.0
    stall_s: float = 4.0
    """A payload without progress for this long has stalled. TCP retransmits after 0.2, 0.6, 1.4 and 3 s."""
    total_s: float | None = None
    """None means a limit based on the number of nodes."""
    port_range: tuple[int, int] | None = None
    """The range of ports to listen on, both ends included, or None for any free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResults:
    """A node's results for its targets in one block. Sent to the first node."""

    pairs: tuple[NodePair, ...]


def run_mesh(
    conversation: Conversation, own: int, publications: Sequence[Publication], limits: MeshLimits
) -> tuple[NodePair, ...]:
    """Run this node's part. Return all pairs on the first of ``publications``, and this node's own pairs on the others.

    ``own`` is this node's number. All nodes call this at about the same time, with equal publications and a separate
    conversation. Raises ``StoreError`` if the store is lost. A record that cannot be read counts as not received.
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
        self._pace = PayloadLimits(
            stall_s=limits.stall_s, send_s=min(LONGEST_SEND_S, max(LEAST_SEND_S, ALL_SENDS_S / self._count))
        )
        self._lost = LostTime(limit_s=FAILURES * limits.stall_s)
        self._visitor = Visitor(
            own,
            connect_s=limits.connect_s,
            pace=self._pace,
            lost=LostTime(limit_s=FAILURES * limits.stall_s),
            deadline=self._deadline,
        )

    def run_block(self, block: int, rounds: range) -> tuple[NodePair, ...]:
        """Listen for the sources of some rounds and visit their targets."""
        own = self._publications[self.place]
        sources = [self._publications[place].number for place in sources_of(self.place, rounds, self._count)]
        targets = [self._publications[place] for place in targets_of(self.place, rounds, self._count)]
        patience = min(time.monotonic() + PATIENCE_S + PATIENCE_NODE_S * self._count, self._deadline)
        with Posts(own.address, sources, self._limits.port_range, self._pace, self._lost) as posts:
            self._conversation.send(f"posts/{block}/{own.number}", posts.published)
            pairs = self._visit(block, targets, patience)
            self._conversation.send(f"pairs/{block}/{own.number}", PairResults(pairs=pairs))
            self._await(posts, block, sources if posts.published.ports else [], patience)
        return pairs

    def _visit(self, block: int, targets: Sequence[Publication], patience: float) -> tuple[NodePair, ...]:
        """Visit the targets that are ready at once, then the late ones, so that no node waits for a dead one."""
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
        obstacle = "it did not report its ports" if posts is None else posts.error
        return Target(
            publication=publication,
            port=port,
            ticket=_ticket(posts),
            obstacle=obstacle if obstacle or port else "it opened no port for this node",
        )

    def _await(self, posts: Posts, block: int, sources: Iterable[int], patience: float) -> None:
        """Listen until each source was served, has posted its results without coming, or is absent."""
        waiting = set(sources)
        while time.monotonic() < self._deadline:
            waiting = {one for one in waiting - posts.served if not self._conversation.has(f"pairs/{block}/{one}")}
            if time.monotonic() > patience:
                waiting = {one for one in waiting if self._conversation.has(f"posts/{block}/{one}")}
            if not waiting:
                return
            time.sleep(LOOK_EVERY_S)

    def collect(self, own: Sequence[NodePair], blocks: Sequence[range]) -> tuple[NodePair, ...]:
        """Return the pairs of all nodes, by source and target. Pairs without a result carry the reason."""
        pairs = {(pair.source, pair.target): pair for pair in own}
        there = [one.number for one in self._publications[1:] if self._conversation.has(f"posts/0/{one.number}")]
        for block in range(len(blocks)):
            for number, found in self._hear(PairResults, f"pairs/{block}", there, self._deadline + COLLECT_S).items():
                said = found.pairs if found is not None else ()
                pairs |= {(number, pair.target): pair for pair in said if pair.source == number}
        return tuple(
            pairs.get((source.number, target.number)) or _unheard(source, target)
            for source in self._publications
            for target in self._publications
            if source is not target
        )

    def _hear(self, kind: type[Kind], key: str, numbers: Sequence[int], deadline: float) -> dict[int, Kind | None]:
        """Return the nodes' records by number. A record that cannot be read is None, and a late one is missing."""
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
        skipped="the source did not report what it saw",
    )


def blocks_of(count: int) -> tuple[range, ...]:
    """Return the rounds 1 to ``count`` - 1 in blocks."""
    return tuple(range(first, min(first + BLOCK, count)) for first in range(1, count, BLOCK))


def targets_of(place: int, rounds: range, count: int) -> tuple[int, ...]:
    """Return the places to which the node at ``place`` sends, in the order of the rounds."""
    return tuple((place + distance) % count for distance in rounds)


def sources_of(place: int, rounds: range, count: int) -> tuple[int, ...]:
    """Return the places that send to the node at ``place``, in the order of the rounds."""
    return tuple((place - distance) % count for distance in rounds)
