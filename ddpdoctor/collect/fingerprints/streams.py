"""Compares one stream point by point, and keeps the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.fingerprints.differences import are_equal, count_present, find_splits, has_any
from ddpdoctor.collect.fingerprints.tables import root_of
from ddpdoctor.collect.recorded import read_record
from ddpdoctor.model.consistency import Difference, Stream, Values, What

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.fingerprints.differences import Written
    from ddpdoctor.model.replica_records import StreamKey

MAX_SCALE = 1e300
"""Larger or non-finite numbers are not a gradient scale."""
MAX_SPLITS = 16
"""How many tensors of a difference we keep by name. Our choice: a report names a few and counts the rest."""

_Texts = dict[int, dict[str, object]]
_Point = tuple[int, _Texts]


class StreamSeen:
    """The results for one stream so far. Points must come in order, each once."""

    def __init__(self, key: StreamKey) -> None:
        """Begin with nothing compared."""
        self.key = key
        self.ranks: set[int] = set()
        self.compared = 0
        self.differences: dict[What, Difference] = {}
        self._kept: dict[int, _Texts] = {}
        self._last: _Point | None = None
        self._lowest: Written | None = None
        self._last_equal: dict[What, _Point] = {}
        self._same_random = 0
        self._unchanged = 0
        self._parameters: dict[int, bytes] = {}

    def compare(self, number: int, seen: Mapping[int, Written]) -> bool:
        """Compare what ranks wrote at one point; return whether a kind of tensor differs for the first time."""
        point = (number, {rank: seen[rank].text for rank in sorted(seen)})
        known = len(self.differences)
        same = _same(seen)
        for what in What:
            if what not in self.differences and has_any(seen, what):
                if same or are_equal(seen, what):
                    self._last_equal[what] = point
                else:
                    self._note_difference(what, point, seen)
        self._follow(point, seen)
        return len(self.differences) > known

    def stream(self, writers: Iterable[int]) -> Stream:
        """Return the results so far; ``writers`` are the ranks that wrote anything about this model."""
        points = self._kept | dict([self._last] if self._last else [])
        return Stream(
            clock=self.key.clock,
            group=self.key.group,
            model=self.key.model,
            optimizer=self.key.optimizer,
            ranks=tuple(sorted(self.ranks)),
            compared=self.compared,
            last_number=self._last[0] if self._last else None,
            tensors=count_present(self._lowest) if self._lowest else 0,
            kinds=tuple(what for what in What if what in self._last_equal or what in self.differences),
            differences=tuple(self.differences.values()),
            values=tuple((number, _values(points[number])) for number in sorted(points)),
            unchanged=self._unchanged,
            same_random=self._same_random,
            every=_every(self._last[1]) if self._last else 0,
            unpaired=tuple(sorted(set(writers) - self.ranks)),
        )

    def _note_difference(self, what: What, point: _Point, seen: Mapping[int, Written]) -> None:
        number, texts = point
        equal = self._last_equal.get(what)
        splits, differing, of = find_splits(seen, what, MAX_SPLITS)
        self.differences[what] = Difference(
            what=what,
            number=number,
            last_equal=equal[0] if equal else None,
            splits=splits,
            differing=differing,
            of=of,
        )
        self._kept |= dict(one for one in (self._last, equal) if one) | {number: texts}

    def _follow(self, point: _Point, seen: Mapping[int, Written]) -> None:
        """Update the state that later points are compared with."""
        number, texts = point
        if not self.compared:
            self._kept[number] = texts
        self.compared += 1
        self.ranks.update(seen)
        random = {str(text.get("random") or "") for text in texts.values()}
        self._same_random += len(random) == 1 and "" not in random
        parameters = {rank: root_of(one.rows, one.fingerprints, (What.PARAMETER,)) for rank, one in seen.items()}
        stood_still = has_any(seen, What.PARAMETER) and all(
            self._parameters.get(rank) == root for rank, root in parameters.items()
        )
        self._unchanged = self._unchanged + 1 if stood_still else 0
        self._parameters = parameters
        self._last = point
        self._lowest = seen[min(seen)]


def _same(seen: Mapping[int, Written]) -> bool:
    """Return whether all ranks wrote the same bytes; for nearly all points this is the only check needed."""
    first, *others = seen.values()
    return all(one.rows is first.rows and one.fingerprints == first.fingerprints for one in others)


def _values(texts: _Texts) -> tuple[Values, ...]:
    return tuple(_read_values(rank, text) for rank, text in texts.items())


def _read_values(rank: int, text: Mapping[str, Any]) -> Values:
    """Return the values of a rank, with defaults for missing or invalid ones."""
    return read_record(Values, text, rank=rank, settings=_pairs(text.get("settings")), scale=_scale(text.get("scale")))


def _every(texts: _Texts) -> int:
    given = [text.get("every") for text in texts.values()]
    return max((every for every in given if type(every) is int), default=0)


def _scale(value: Any) -> float | None:
    return float(value) if type(value) in {int, float} and abs(value) < MAX_SCALE else None


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """Return settings in order, from a list of pairs or a dict."""
    rows = value.items() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return tuple((str(row[0]), str(row[1])) for row in rows if isinstance(row, (list, tuple)) and len(row) == 2)
