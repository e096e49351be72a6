"""How each ordered pair of nodes came out: in a word, and all of them as a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.reaching import Contact
from ddpdoctor.report.blocks import Grid, GridCell, Tone
from ddpdoctor.report.grids.build import MAX_COLUMNS, not_shown

if TYPE_CHECKING:
    from ddpdoctor.model.reaching import NodePair, Rendezvous, Transfer
    from ddpdoctor.report.blocks import Section

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


def pair_word(pair: NodePair) -> str:
    """Return how a pair came out in one word."""
    if pair.connecting is None:
        return "-"
    if pair.connecting.contact is not Contact.CONNECTED:
        return WORDS.get(pair.connecting.contact, "fail")
    sent = (pair.small, pair.large)
    return "stall" if any(one is not None and one.contact is not Contact.CONNECTED for one in sent) else "ok"


def pair_pictures(seen: Rendezvous) -> tuple[Section, ...]:
    """Return the grid of all pairs. Of many nodes, those come first that are in a pair that does not work."""
    if not seen.pairs:
        return ()
    known = {(pair.source, pair.target): pair for pair in seen.pairs}
    bad = {number for at, pair in known.items() if pair_word(pair) not in {"ok", "-"} for number in at}
    hosts = {visit.number: visit.host for visit in seen.visits}
    numbers = sorted(hosts, key=lambda number: (number not in bad, number))
    shown = sorted(numbers[:MAX_COLUMNS])
    words = {pair_word(pair) for pair in seen.pairs}
    grid = Grid(
        title="connections between nodes, from the node of the row to that of the column",
        rows=tuple(f"{number} {hosts[number]}".strip() for number in shown),
        columns=tuple(map(str, shown)),
        cells=tuple(tuple(_cell(known, source, target) for target in shown) for source in shown),
        row_name="from",
        column_name="to",
        legend=(
            *(f"{word}: {meaning}" for word, meaning in LEGEND.items() if word in words),
            *not_shown(len(hosts) - len(shown), "node"),
        ),
    )
    return ((grid,),)


def _cell(known: dict[tuple[int, int], NodePair], source: int, target: int) -> GridCell:
    pair = known.get((source, target))
    if pair is None:
        return GridCell()
    word = pair_word(pair)
    tones = {"ok": Tone.GOOD, "-": Tone.SKIPPED}
    return GridCell(text=word, tone=tones.get(word, Tone.ERROR), about=_figures(pair))


def _figures(pair: NodePair) -> str:
    """Say how long the connection took and how fast the payloads arrived, or what went wrong."""
    if pair.connecting is None:
        return pair.skipped
    connected = pair.connecting.contact is Contact.CONNECTED
    how = f"in {pair.connecting.duration_s * 1000:.1f} ms" if connected else pair.connecting.error
    parts = [f"{pair.connecting.contact.value} {how}".strip(), *map(_transfer, filter(None, (pair.small, pair.large)))]
    return "; ".join(parts)


def _transfer(one: Transfer) -> str:
    size = format_about(one.size_bytes)
    if one.contact is not Contact.CONNECTED:
        return f"{size}: {one.error or one.contact.value}"
    rate = f" at {one.size_bytes / one.duration_s / 1e6:.0f} MB/s" if one.duration_s else ""
    return f"{size} arrived{rate}"
