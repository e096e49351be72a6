"""What the nodes of a job saw of each other, as lines: who came, the store, and the matrix of all pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.reaching import Contact, Rendezvous, say_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.reaching import NodePair, Visit

VERB = "check-rendezvous"
KEY = "rendezvous"
"""In the report of the node that has judged; the others saw a part of it only."""
MATRIX_NODES = 8
"""Of more nodes there is one line in the place of the matrix: it would not fit into 80 columns."""
WORDS = {
    Contact.CONNECTED: "ok",
    Contact.NO_ANSWER: "drop",
    Contact.REFUSED: "refuse",
    Contact.RESET: "reset",
    Contact.UNREACHABLE: "unreach",
}
LEGEND = {
    "drop": "nothing came back",
    "refuse": "refused",
    "reset": "broken off",
    "unreach": "prohibited, or no route",
    "stall": "it connects, and a payload does not arrive",
    "fail": "it failed otherwise",
    "-": "not tried",
}


def is_rendezvous(report: Report) -> bool:
    """Say whether a report is one of `check-rendezvous`."""
    return report.data.get("verb") == VERB


def rendezvous_lines(report: Report) -> list[str]:
    """Return who came and what became of each pair as lines; raises ``UserError`` where a file was damaged."""
    plain: Any = report.data.get(KEY)
    if not isinstance(plain, dict):
        return []
    try:
        seen = decode(Rendezvous, {**plain, "fleet": {"nodes": []}})
    except WrongValue as error:
        raise UserError(f"the report cannot be read: data.{error}", help="The file is damaged: check again.") from error
    tried = plain.get("pairs_tried")
    lines = [*_table([_head(seen), *map(_row, seen.visits)])]
    pairs = [*_pairs(seen, tried if isinstance(tried, int) else len(seen.pairs))]
    trust = [f"trusted: {seen.trust}"] if seen.trust and seen.complete else []
    return [*lines, *([""] if pairs else []), *pairs, *([""] if trust else []), *trust]


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def _head(seen: Rendezvous) -> tuple[str, ...]:
    door = next((visit.door for visit in seen.visits if visit.door is not None), None)
    return ("node", "host", "publishes", f"store at {say_place(door.host, door.port)}" if door is not None else "store")


def _row(visit: Visit) -> tuple[str, ...]:
    published = f"{visit.published} ({visit.interface})" if visit.published else "-"
    if not visit.arrived:
        return str(visit.number), visit.host or "?", "-", "did not come"
    return str(visit.number), visit.host, published, _store(visit)


def _store(visit: Visit) -> str:
    door = visit.door
    if door is None:
        return visit.way_lost or "not looked at"
    if door.not_served:
        return f"cannot serve it: {door.not_served}"
    best = next((attempt for attempt in door.attempts if attempt.contact is Contact.CONNECTED), None)
    if best is None:
        last = door.attempts[-1] if door.attempts else None
        return f"{last.contact.value}: {last.error}".removesuffix(": ") if last is not None else "not looked at"
    return "serves it" if door.serves else f"reached in {best.duration_s * 1000:.1f} ms"


def _pairs(seen: Rendezvous, tried: int) -> Iterator[str]:
    """Yield the matrix where something in it is wrong and it fits; else one line."""
    bad = [pair for pair in seen.pairs if _word(pair) != "ok"]
    if not tried:
        return
    if not bad:
        yield f"all {tried} ordered pairs of nodes connect, and large payloads arrive{_pace(seen)}"
        return
    if len(seen.visits) > MATRIX_NODES:
        yield f"{len(bad)} of {tried} ordered pairs of nodes do not work"
        return
    yield "connections, from the node of the row to that of the column:"
    yield from _matrix(seen)
    words = {_word(pair) for pair in seen.pairs}
    yield "; ".join(f"{word}: {meaning}" for word, meaning in LEGEND.items() if word in words)


def _pace(seen: Rendezvous) -> str:
    """Return the fewest and most that a pair took, where they are in the report."""
    rates = [
        pair.large.size_bytes / pair.large.duration_s
        for pair in seen.pairs
        if pair.large and pair.large.duration_s and pair.large.contact is Contact.CONNECTED
    ]
    return f" at {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MB/s" if rates else ""


def _matrix(seen: Rendezvous) -> Iterator[str]:
    numbers = [visit.number for visit in seen.visits]
    cells = {(pair.source, pair.target): _word(pair) for pair in seen.pairs}
    yield "      " + "".join(f"{number:>8}" for number in numbers)
    for source in numbers:
        row = ("." if source == target else cells.get((source, target), "-") for target in numbers)
        yield f"{source:>6}" + "".join(f"{cell:>8}" for cell in row)


def _word(pair: NodePair) -> str:
    if pair.connecting is None:
        return "-"
    if pair.connecting.contact is not Contact.CONNECTED:
        return WORDS.get(pair.connecting.contact, "fail")
    sent = (pair.small, pair.large)
    return "stall" if any(one is not None and one.contact is not Contact.CONNECTED for one in sent) else "ok"
