"""Tries to connect to the other nodes, but only when one of them is missing."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.evidence import save
from ddpdoctor.launch.watching.machine import is_fresh
from ddpdoctor.model.facts import REACHED_NAME, Presence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.model.facts import NodesSeen
    from ddpdoctor.model.findings import Judgment
    from ddpdoctor.model.reaching import Connecting

CODES = frozenset({"DD605", "DD607"})
"""The rules that use the result."""
LIMIT_S = 4.0
"""Our choice: a missing node is reported within 10 s of the hang timeout. One connection is tried for 3 s."""
FRESH_S = 30.0
"""Our choice: if the last attempts are younger than this, they are not repeated."""
MOST_PLACES = 16

Place = tuple[str, int]
"""Host and port."""


def note_reached(folder: Path, judgment: Judgment, seen: NodesSeen, placement: Placement) -> bool:
    """Try the missing nodes if the judgment needs it; return whether there are new facts to judge by."""
    if not any(finding.code in CODES for finding in judgment.findings):
        return False
    places = places_to_try(seen, placement)
    return bool(places) and try_places(folder, places)


def places_to_try(seen: NodesSeen, placement: Placement) -> tuple[Place, ...]:
    """Return the places to try: the job's own store, and each host that is silent or absent.

    Nobody needs to listen on a host's port, because a refusal also shows that the host is up. A member that hears
    nothing from the first tries all others, to find out who is cut off.
    """
    quiet = {Presence.SILENT, Presence.ABSENT}
    others = [node for node in seen.nodes if node.number != seen.own and node.host]
    hosts = [node.host for node in others if node.presence in quiet or seen.alone_since_ns is not None]
    own = {node.host for node in seen.nodes if node.number == seen.own}
    store = (placement.store,) if placement.store is not None and placement.store[0] else ()
    places = [*store, *((host, placement.port) for host in hosts if host not in own)]
    return tuple(dict.fromkeys(places))[:MOST_PLACES]


def try_places(folder: Path, places: Sequence[Place]) -> bool:
    """Connect to all places at the same time, and save the results; return whether there are new ones."""
    if is_fresh(folder / REACHED_NAME, FRESH_S):
        return False
    found = _knock_at_all(places)
    with contextlib.suppress(OSError):  # a full disk loses this evidence, but must not affect the job
        save(folder / REACHED_NAME, tuple(found))
        return bool(found)
    return False


def _knock_at_all(places: Sequence[Place]) -> list[Connecting]:
    """Return the last attempt at each place, in the same order, without those that exceeded the limit."""
    from ddpdoctor.probes.rendezvous.store_probe import knock

    answers: queue.SimpleQueue[tuple[Place, Connecting]] = queue.SimpleQueue()

    def try_one(place: Place) -> None:
        answers.put((place, knock(*place, None)[-1]))

    for place in places:  # daemon threads: a name lookup cannot be stopped
        threading.Thread(target=try_one, args=(place,), name="ddpdoctor-knock", daemon=True).start()
    found: dict[Place, Connecting] = {}
    limit = time.monotonic() + LIMIT_S
    while len(found) < len(places):
        try:
            place, attempt = answers.get(timeout=max(limit - time.monotonic(), 0.01))
        except queue.Empty:
            break
        found[place] = attempt
    return [found[place] for place in places if place in found]
