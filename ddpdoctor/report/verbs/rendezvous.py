"""The content of `check-rendezvous`: the nodes, the store, and the matrix of all pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import decode
from ddpdoctor.model.reaching import Contact, Rendezvous, say_place
from ddpdoctor.report.blocks import Column, Table, Text, table_of
from ddpdoctor.report.grids.node_pairs import LEGEND, pair_pictures, pair_word
from ddpdoctor.report.verbs.checklist import checklist_content

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.reaching import Visit
    from ddpdoctor.report.blocks import Block, Content

KEY = "rendezvous"
"""Its data is a dict only in the report of the judging node. Other nodes have only a part of the facts."""
MATRIX_NODES = 8
"""For more nodes, one line replaces the matrix, because it would not fit into 80 columns."""


def rendezvous_content(report: Report) -> Content:
    """Return the nodes that joined, the state of the store, and the result of each pair."""
    plain: Any = report.data[KEY]
    if not isinstance(plain, dict):
        return checklist_content(report)
    rendezvous = decode(Rendezvous, {**plain, "fleet": {"nodes": []}})
    tried = plain.get("pairs_tried")
    trust = (Text(text=f"trusted: {rendezvous.trust}"),) if rendezvous.trust and rendezvous.complete else ()
    return checklist_content(
        report,
        (_visits(rendezvous),),
        tuple(_pairs(rendezvous, tried if isinstance(tried, int) else len(rendezvous.pairs))),
        trust,
        pictures=pair_pictures(rendezvous),
    )


def _visits(seen: Rendezvous) -> Table:
    store = next((visit.store_view for visit in seen.visits if visit.store_view is not None), None)
    place = f" at {say_place(store.host, store.port)}" if store is not None else ""
    heads = ("node", "host", "publishes", f"store{place}")
    return table_of(heads, [_row(visit) for visit in seen.visits], left=len(heads))


def _row(visit: Visit) -> tuple[str, ...]:
    published = f"{visit.published} ({visit.interface})" if visit.published else "-"
    if not visit.arrived:
        return str(visit.number), visit.host or "?", "-", "did not come"
    return str(visit.number), visit.host, published, _store(visit)


def _store(visit: Visit) -> str:
    store = visit.store_view
    if store is None:
        return visit.way_lost or "not checked"
    if store.not_served:
        return f"cannot serve it: {store.not_served}"
    best = next((attempt for attempt in store.attempts if attempt.contact is Contact.CONNECTED), None)
    if best is None:
        last = store.attempts[-1] if store.attempts else None
        if last is None:
            return "not checked"
        return f"{last.contact.value}: {last.error}" if last.error else last.contact.value
    return "serves it" if store.serves else f"reached in {best.duration_s * 1000:.1f} ms"


def _pairs(seen: Rendezvous, tried: int) -> Iterator[Block]:
    """Yield the matrix if a pair failed and the matrix fits. Otherwise, yield one line."""
    bad = [pair for pair in seen.pairs if pair_word(pair) != "ok"]
    if not tried:
        return
    if not bad:
        yield Text(text=f"all {tried} ordered pairs of nodes connect, and large payloads arrive{_pace(seen)}")
        return
    if len(seen.visits) > MATRIX_NODES:
        yield Text(text=f"{len(bad)} of {tried} ordered pairs of nodes do not work")
        return
    yield Text(text="connections, from the node of the row to that of the column:")
    yield _matrix(seen)
    words = {pair_word(pair) for pair in seen.pairs}
    yield Text(text="; ".join(f"{word}: {meaning}" for word, meaning in LEGEND.items() if word in words))


def _pace(seen: Rendezvous) -> str:
    """Return the lowest and highest transfer rate of the pairs in the report."""
    rates = [
        pair.large.size_bytes / pair.large.duration_s
        for pair in seen.pairs
        if pair.large and pair.large.duration_s and pair.large.contact is Contact.CONNECTED
    ]
    return f" at {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MB/s" if rates else ""


def _matrix(seen: Rendezvous) -> Table:
    numbers = [visit.number for visit in seen.visits]
    cells = {(pair.source, pair.target): pair_word(pair) for pair in seen.pairs}
    columns = [
        Column(
            name=str(target),
            cells=tuple("." if source == target else cells.get((source, target), "-") for source in numbers),
        )
        for target in numbers
    ]
    return Table(columns=(Column(name="", cells=tuple(map(str, numbers))), *columns), indent=2)
