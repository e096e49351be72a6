"""Packs points of a stream into plain records for other nodes or a file, and unpacks and checks them."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.fingerprints.differences import Written
from ddpdoctor.collect.fingerprints.tables import WHAT
from ddpdoctor.model.replica_records import SideKept, StepKept, StreamKept, StreamKey
from ddpdoctor.recorder.storage import fingerprint_layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.collect.fingerprints.index import Kept, StreamIndex
    from ddpdoctor.collect.fingerprints.tables import Rows, RowsRead
    from ddpdoctor.model.consistency import Stream, TensorRow

MAX_BATCH_BYTES = 4 * 2**20
"""Limit for one stream. Our choice: 64 nodes send this much within seconds. A batch always has one point."""
_LETTERS = {what: letter for letter, what in WHAT.items()}
Points = dict[int, dict[int, Written]]
"""What each rank wrote, by the number of the point."""


def pack_stream(index: StreamIndex, found: Stream) -> StreamKept:
    """Return a stream for sending, with its oldest points (as many as fit) and what was ``found`` in it."""
    tables: dict[int, tuple[int, Rows]] = {}
    points: list[StepKept] = []
    space = MAX_BATCH_BYTES
    for one in index.points:
        point = _pack_point(one, tables)
        space -= sum(len(side.fingerprints) + sum(map(len, side.texts)) for side in point.sides)
        if space < 0 and points:
            break
        points.append(point)
    return StreamKept(
        **{one.name: getattr(index.key, one.name) for one in fields(StreamKey)},
        name=index.name,
        tables=tuple(_rows_in_order(rows) for _, rows in tables.values()),
        points=tuple(points),
        found=found,
    )


def unpack_points(kept: StreamKept, rows_read: RowsRead) -> Points:
    """Return the points by number.

    Raises:
        ValueError, TypeError: the points are damaged.
    """
    tables = [rows_read.read([_as_written(row) for row in table]) for table in kept.tables]
    sizes = [len(table) * fingerprint_layout.FINGERPRINT_SIZE for table in kept.tables]
    return {one.number: _unpack_point(one, tables, sizes, set(kept.members)) for one in kept.points}


def _pack_point(one: Kept, tables: dict[int, tuple[int, Rows]]) -> StepKept:
    sides: dict[tuple[int, bytes], list[int]] = {}
    for rank, seen in one.seen.items():
        tables.setdefault(id(seen.rows), (len(tables), seen.rows))
        sides.setdefault((tables[id(seen.rows)][0], seen.fingerprints), []).append(rank)
    return StepKept(
        number=one.number,
        sides=tuple(
            SideKept(
                ranks=tuple(ranks),
                table=table,
                fingerprints=_fingerprints_in_order(one.seen[ranks[0]]).hex(),
                texts=tuple(json.dumps(one.seen[rank].text) for rank in ranks),
            )
            for (table, _), ranks in sides.items()
        ),
    )


def _rows_in_order(rows: Rows) -> tuple[TensorRow, ...]:
    return tuple(row for kind in rows.kinds.values() for _, row in kind.rows.values())


def _fingerprints_in_order(seen: Written) -> bytes:
    """Return the fingerprints of the rows that we compare, without tensors that may differ."""
    starts = (at for kind in seen.rows.kinds.values() for at, _ in kind.rows.values())
    return b"".join(seen.fingerprints[at : at + fingerprint_layout.FINGERPRINT_SIZE] for at in starts)


def _as_written(row: TensorRow) -> list[Any]:
    """Return a row in the format of a rank's table."""
    return [_LETTERS[row.what], row.name, row.part, list(row.shape), row.dtype]


def _unpack_point(
    point: StepKept, tables: list[Rows], sizes: list[int], members: set[int]
) -> dict[int, Written]:  # fmt: skip
    found: dict[int, Written] = {}
    for side in point.sides:
        if not 0 <= side.table < len(tables) or len(side.texts) != len(side.ranks):
            raise ValueError("a side without a table, or without texts")
        fingerprints = bytes.fromhex(side.fingerprints)
        if len(fingerprints) != sizes[side.table] or not members.issuperset(side.ranks):
            raise ValueError(
                "a side whose fingerprints are not those of its table, or whose ranks are not in its group"
            )
        found |= {rank: Written(tables[side.table], fingerprints, _text(text)) for rank, text in _pairs(side)}
    return found


def _pairs(side: SideKept) -> Iterable[tuple[int, str]]:
    return zip(side.ranks, side.texts, strict=True)


def _text(text: str) -> dict[str, Any]:
    read = json.loads(text)
    if not isinstance(read, dict):
        raise TypeError("a text that is not a JSON object")
    return read
