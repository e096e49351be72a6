"""Finds which tensors differ between ranks at one point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.consistency import TensorRow, TensorSplit, What
from ddpdoctor.model.sides import group_alike
from ddpdoctor.recorder.storage import fingerprint_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.collect.fingerprints.tables import KindRows, Name, Rows

Token = tuple[bytes, tuple[int, ...], str] | None
"""What must be equal: contents, shape and dtype; None if a rank has no such tensor."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote at one point."""

    rows: Rows
    fingerprints: bytes
    text: dict[str, Any]


def has_any(seen: Mapping[int, Written], what: What) -> bool:
    """Return whether a rank has a tensor of this kind."""
    return any(
        one.fingerprints[run].count(0) < run.stop - run.start
        for one in seen.values()
        if what in one.rows.kinds
        for run in one.rows.kinds[what].runs
    )


def count_present(one: Written) -> int:
    """Return how many tensors a rank had."""
    starts = (at for kind in one.rows.kinds.values() for at, _ in kind.rows.values())
    return sum(
        one.fingerprints[at : at + fingerprint_layout.FINGERPRINT_SIZE] != fingerprint_layout.ABSENT for at in starts
    )


def are_equal(seen: Mapping[int, Written], what: What) -> bool:
    """Return whether all tensors of a kind are equal on all ranks that wrote."""
    first, *others = seen.values()
    runs = first.rows.kinds[what].runs if what in first.rows.kinds else ()
    if all(one.rows is first.rows for one in others) and all(
        one.fingerprints[run] == first.fingerprints[run] for run in runs for one in others
    ):
        return True
    return next(_differing(seen, what), None) is None


def find_splits(seen: Mapping[int, Written], what: What, most: int) -> tuple[tuple[TensorSplit, ...], int, int]:
    """Return the first ``most`` differing tensors of a kind, how many differ, and how many exist on any rank."""
    found = list(_differing(seen, what))
    present = sum(any(tokens.values()) for _, tokens in _tokens(seen, what))
    return tuple(_split(row, tokens) for row, tokens in found[:most]), len(found), present


def _differing(seen: Mapping[int, Written], what: What) -> Iterator[tuple[TensorRow, dict[int, Token]]]:
    """Yield the tensors that differ. A constant (a buffer with a part) may rightly be lacking on some ranks."""
    for row, tokens in _tokens(seen, what):
        lacks = what is What.BUFFER and row.part and None in tokens.values()
        if len(set(tokens.values())) > 1 and not lacks:
            yield row, tokens


def _tokens(seen: Mapping[int, Written], what: What) -> Iterator[tuple[TensorRow, dict[int, Token]]]:
    """Yield each tensor with the token of each rank."""
    kinds = {rank: one.rows.kinds.get(what) for rank, one in seen.items()}
    for name, row in _all_rows(kind for kind in kinds.values() if kind is not None).items():
        yield row, {rank: _token(seen[rank].fingerprints, kind, name) for rank, kind in kinds.items()}


def _all_rows(kinds: Iterable[KindRows]) -> dict[Name, TensorRow]:
    """Return the tensors of all ranks: first those of the rank with the most, in its order, then all others."""
    different = {id(kind): kind for kind in kinds}.values()
    rows: dict[Name, TensorRow] = {}
    for kind in sorted(different, key=lambda kind: len(kind.rows), reverse=True):
        for name, (_, row) in kind.rows.items():
            rows.setdefault(name, row)
    return rows


def _token(fingerprints: bytes, kind: KindRows | None, name: Name) -> Token:
    if kind is None or name not in kind.rows:
        return None
    at, row = kind.rows[name]
    contents = fingerprints[at : at + fingerprint_layout.FINGERPRINT_SIZE]
    return None if contents == fingerprint_layout.ABSENT else (contents, row.shape, row.dtype)


def _split(row: TensorRow, tokens: Mapping[int, Token]) -> TensorSplit:
    sides = group_alike(tokens)
    return TensorSplit(row=row, sides=tuple(ranks for _, ranks in sides), absent_on=dict(sides).get(None, ()))
