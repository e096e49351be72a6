"""Tries to reach the other nodes at the moment that one of them is missing, and in no other job."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.evidence import save
from ddpdoctor.collect.run.reached import FILE
from ddpdoctor.model.nodes import Presence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.model.findings import Judgement
    from ddpdoctor.model.nodes import NodesSeen
    from ddpdoctor.model.reaching import Connecting

CODES = frozenset({"DD605", "DD607"})
"""The rules that have a use for it."""
LIMIT_S = 4.0
"""Ours: a node is told to be missing within 10 s of the hang timeout. A connection is tried for 3 s."""
FRESH_S = 30.0
"""Ours: what was tried this short a time ago is not tried again."""
MOST_PLACES = 16

Place = tuple[str, int]
"""Host and port."""


def note_reached(folder: Path, judgement: Judgement, seen: NodesSeen, placement: Placement) -> bool:
    """Try the missing nodes where the judgement asks for it; return whether there is now more to judge by."""
    if not any(finding.code in CODES for finding in judgement.findings):
        return False
    places = places_to_try(seen, placement)
    return bool(places) and try_places(folder, places)


def places_to_try(seen: NodesSeen, placement: Placement) -> tuple[Place, ...]:
    """Return where to knock: at the job's own store, and at each host of which nothing is heard.

    Of a host it is no matter whether anybody listens at the members' port: a refusal comes from one that is up. Who
    hears nothing of the first tries all others, so that it can be told who is cut off.
    """
    quiet = {Presence.SILENT, Presence.ABSENT}
    others = [node for node in seen.nodes if node.number != seen.own and node.host]
    hosts = [node.host for node in others if node.presence in quiet or seen.alone_since_ns is not None]
    own = {node.host for node in seen.nodes if node.number == seen.own}
    store = (placement.store,) if placement.store is not None and placement.store[0] else ()
    places = [*store, *((host, placement.port) for host in hosts if host not in own)]
    return tuple(dict.fromkeys(places))[:MOST_PLACES]


def try_places(folder: Path, places: Sequence[Place]) -> bool:
    """Connect to all places at the same time, and save what came of it; return whether that is new."""
    if _is_fresh(folder / FILE):
        return False
    found = _knock_at_all(places)
    with contextlib.suppress(OSError):  # a disk that is full costs this evidence, not the job
        save(folder / FILE, tuple(found))
        return bool(found)
    return False


def _knock_at_all(places: Sequence[Place]) -> list[Connecting]:
    """Return the last attempt at each place, in their order; none where no answer came within the limit."""
    from ddpdoctor.probes.rendezvous.store_probe import knock

    answers: queue.SimpleQueue[tuple[Place, Connecting]] = queue.SimpleQueue()

    def try_one(place: Place) -> None:
        answers.put((place, knock(*place, None)[-1]))

    for place in places:  # daemons: a look-up of a name cannot be stopped
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


def _is_fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < FRESH_S
    except OSError:
        return False
