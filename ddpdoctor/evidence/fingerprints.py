"""Mismatches that TORCH_DISTRIBUTED_DEBUG=DETAIL reports: each rank names its own call and that of one other rank.

Of the other rank's call the operation may be wrong (with Gloo, an all_reduce against a barrier came out as REDUCE), so
what a rank says of itself counts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import MOST_RANKS, Differ, Operation
from ddpdoctor.model.sides import group_alike
from ddpdoctor.model.torch_names import op_type_name

if TYPE_CHECKING:
    from ddpdoctor.evidence.reader import Line

MARK = "mismatch between collectives"
_CALL = re.compile(
    r"Rank (?P<rank>\d{1,9}) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d{1,20}),? ?)?OpType=(?P<op>\w{1,60})"
    r"(?:, TensorShape=(?P<shape>\[[\[\]\d, ]{0,2000}\]|\d*))?"
    r"(?:, TensorDtypes=(?P<dtypes>[\w, ]{0,200}?)(?:, Tensor|\)))?"
)
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
"""c10's names of scalar types that differ from Python's."""
_MOST_CALLS = 20_000


class Mismatches:
    """Collects reports of a mismatch from the ranks in one stream of lines."""

    def __init__(self) -> None:
        self._own: dict[int, Operation] = {}
        self._others: dict[int, Operation] = {}
        self._first: Line | None = None

    def add(self, line: Line) -> None:
        """Add one rank's message."""
        calls = [(int(match["rank"]), _operation(match)) for match in _CALL.finditer(line.text)]
        if not calls or len(self._own) > _MOST_CALLS or any(rank >= MOST_RANKS for rank, _ in calls):
            return
        self._first = self._first or line
        own, operation = calls[0]
        of_world = line.who.rank in {None, own}
        self._own.setdefault(own if line.who.rank is None else line.who.rank, operation)
        if of_world:  # else these are ranks of a smaller group
            for rank, other in calls[1:]:
                self._others.setdefault(rank, other)

    def facts(self) -> list[Differ]:
        """Return the facts of all messages, and forget the messages."""
        line, calls = self._first, {**self._others, **self._own}
        self._own, self._others, self._first = {}, {}, None
        if line is None:
            return []
        ordered = group_alike(calls)
        if len(ordered) < 2:
            return []
        is_plain = len(ordered[0][1]) > len(ordered[1][1])
        odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks)) if is_plain else None
        return [
            Differ(
                spot=line.spot(), time=line.time, said=quote(line.text[line.text.find(MARK) - 9 :]),
                sides=tuple((ranks, operation) for operation, ranks in ordered), odd=odd,
                aspect=aspect_of([operation for operation, _ in ordered]),
            )
        ]  # fmt: skip


def aspect_of(operations: list[Operation]) -> str:
    """Return in what calls differ: the operation before the number, the number before shapes and dtypes."""
    for aspect, values in (
        ("operation", Counter(one.op for one in operations)),
        ("number", Counter(one.seq for one in operations)),
        ("shape", Counter((one.shape, one.numel_in, one.numel_out) for one in operations)),
        ("dtype", Counter(one.dtype for one in operations)),
    ):
        if len(values) > 1:
            return aspect
    return ""


def _operation(match: re.Match[str]) -> Operation:
    seq = match["seq"]
    shapes = re.findall(r"\[([\d, ]*)\]", match["shape"] or "")
    shape = tuple(int(size) for size in re.findall(r"\d{1,18}", shapes[0])) if len(shapes) == 1 else None
    dtype = (match["dtypes"] or "").strip()
    return Operation(
        op=op_type_name(match["op"]),
        seq=int(seq) + 1 if seq and len(seq) < 10 else None,  # it counts from 0, all other sources from 1
        shape=shape,
        dtype=_DTYPES.get(dtype, dtype.lower()),
    )
