"""The report of `check-rendezvous`: who reaches whom, and what each node found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import decode
from ddpdoctor.model.launch import Contact, Rendezvous, say_place
from ddpdoctor.model.words import format_about
from ddpdoctor.report.blocks import MAX_COLUMNS, Grid, GridCell, Text, Tone, not_shown, table_of
from ddpdoctor.report.verbs.checks import checklist_content

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.launch import NodePair, Visit
    from ddpdoctor.report.blocks import Block, Content

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
    "unreach": "rejected, or no route",
    "stall": "it connects, but a payload does not arrive",
    "fail": "another failure",
    "-": "not tried",
}
# Its data is a dict only in the report of the judging node. Other nodes have only a part of the facts.
KEY = "rendezvous"
MATRIX_NODES = 8  # for more nodes, one line replaces the matrix, because it would not fit into 80 columns


def pair_word(pair: NodePair) -> str:
    if pair.connecting is None:
        return "-"
    if pair.connecting.contact is not Contact.CONNECTED:
        return WORDS.get(pair.connecting.contact, "fail")
    sent = [transfer for transfer in (pair.small, pair.large) if transfer is not None]
    return "ok" if all(transfer.contact is Contact.CONNECTED for transfer in sent) else "stall"


def _legend(seen: Rendezvous) -> list[str]:
    words = {pair_word(pair) for pair in seen.pairs}
    return [f"{word}: {meaning}" for word, meaning in LEGEND.items() if word in words]


def pair_pictures(seen: Rendezvous) -> Iterator[Grid]:
    """Yield the grid of all pairs. Of many nodes, those come first that are in a pair that does not work."""
    if not seen.pairs:
        return
    bad: set[int] = set()
    cells: dict[tuple[int, int], GridCell] = {}
    for pair in seen.pairs:
        word = pair_word(pair)
        if word not in {"ok", "-"}:
            bad |= {pair.source, pair.target}
        parts = [pair.skipped]
        if (way := pair.connecting) is not None:
            # How long the connection took and how fast the payloads arrived, or what went wrong
            how = f"in {way.duration_s * 1000:.1f} ms" if way.contact is Contact.CONNECTED else way.error
            parts = [f"{way.contact.value} {how}".strip()]
            for sent in filter(None, (pair.small, pair.large)):
                rate = f" at {sent.size_bytes / sent.duration_s / 1e6:.0f} MB/s" if sent.duration_s else ""
                arrived = sent.contact is Contact.CONNECTED
                result = f" arrived{rate}" if arrived else f": {sent.error or sent.contact.value}"
                parts.append(f"{format_about(sent.size_bytes)}{result}")
        tone = {"ok": Tone.GOOD, "-": Tone.SKIPPED}.get(word, Tone.ERROR)
        cells[pair.source, pair.target] = GridCell(word, tone=tone, about="; ".join(parts))
    hosts = {visit.number: visit.host for visit in seen.visits}
    numbers = sorted(hosts, key=lambda number: (number not in bad, number))
    shown = sorted(numbers[:MAX_COLUMNS])
    title = "connections between nodes, from the node of the row to that of the column"
    names = tuple(f"{number} {hosts[number]}".strip() for number in shown)
    body = tuple(tuple(cells.get((source, target), GridCell()) for target in shown) for source in shown)
    legend = (*_legend(seen), *not_shown(len(hosts) - len(shown), "node"))
    yield Grid(title, names, tuple(map(str, shown)), body, "from", "to", legend)


def rendezvous_content(report: Report) -> Content:
    plain: Any = report.data[KEY]
    if not isinstance(plain, dict):
        return checklist_content(report)
    rendezvous = decode(Rendezvous, {**plain, "fleet": {"nodes": []}})
    tried = plain.get("pairs_tried")
    trust = (Text(f"trusted: {rendezvous.trust}"),) if rendezvous.trust and rendezvous.complete else ()
    store = next((visit.store_view for visit in rendezvous.visits if visit.store_view is not None), None)
    place = f" at {say_place(store.host, store.port)}" if store is not None else ""
    heads = ("node", "host", "publishes", f"store{place}")
    rows = []
    for visit in rendezvous.visits:
        published = f"{visit.published} ({visit.interface})" if visit.published else "-"
        came = (visit.host, published, _store(visit)) if visit.arrived else (visit.host or "?", "-", "did not come")
        rows.append((str(visit.number), *came))
    return checklist_content(
        report,
        (table_of(heads, rows, left=len(heads)),),
        tuple(_pairs(rendezvous, tried if isinstance(tried, int) else len(rendezvous.pairs))),
        trust,
        pictures=lambda: pair_pictures(rendezvous),
    )


def _store(visit: Visit) -> str:
    store = visit.store_view
    if store is None:
        return visit.way_lost or "not checked"
    if store.not_served:
        return f"cannot serve it: {store.not_served}"
    best = next((attempt for attempt in store.attempts if attempt.contact is Contact.CONNECTED), None)
    if best is not None:
        return "serves it" if store.serves else f"reached in {best.duration_s * 1000:.1f} ms"
    if not store.attempts:
        return "not checked"
    last = store.attempts[-1]
    return f"{last.contact.value}: {last.error}" if last.error else last.contact.value


def _pairs(seen: Rendezvous, tried: int) -> Iterator[Block]:
    """Yield the matrix if a pair failed and the matrix fits. Otherwise, yield one line."""
    bad = [pair for pair in seen.pairs if pair_word(pair) != "ok"]
    if not tried:
        return
    if not bad:
        rates = [
            pair.large.size_bytes / pair.large.duration_s
            for pair in seen.pairs
            if pair.large and pair.large.duration_s and pair.large.contact is Contact.CONNECTED
        ]
        pace = f" at {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MB/s" if rates else ""
        yield Text(f"all {tried} ordered pairs of nodes connect, and large payloads arrive{pace}")
        return
    if len(seen.visits) > MATRIX_NODES:
        yield Text(f"{len(bad)} of {tried} ordered pairs of nodes do not work")
        return
    yield Text("connections, from the node of the row to that of the column:")
    numbers = [visit.number for visit in seen.visits]
    cells = {(pair.source, pair.target): pair_word(pair) for pair in seen.pairs}
    cells |= {(number, number): "." for number in numbers}
    rows = [(str(source), *(cells.get((source, target), "-") for target in numbers)) for source in numbers]
    yield table_of(("", *map(str, numbers)), rows, left=0)
    yield Text("; ".join(_legend(seen)))
