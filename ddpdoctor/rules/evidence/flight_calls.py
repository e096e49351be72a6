"""What must be equal in the calls that ranks make under one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.flight import FlightCall

SAME_IN = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
    "reduce_scatter", "all_gather_coalesced", "reduce_scatter_coalesced",
})  # fmt: skip
"""Operations whose inputs must have equally many elements on all ranks."""
SAME_OUT = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
})  # fmt: skip


def comparable(block: Sequence[FlightCall]) -> tuple[object, ...]:
    """Return what must be equal on all ranks. torch writes no sizes for a barrier."""
    return tuple(
        (
            call.op,
            call.numels_in if call.op in SAME_IN else (),
            call.numels_out if call.op in SAME_OUT else (),
            call.dtype if call.op in SAME_IN | SAME_OUT else "",
        )
        for call in block
    )


def operation_of(block: Sequence[FlightCall] | None, number: int | None, group: str, words: str) -> Operation:
    """Return a call as an operation; without a call, the number of an unknown one."""
    if not block:
        return Operation(seq=number, group=group, group_words=words)
    call = block[0]
    several = len(block) > 1
    return Operation(
        op=" and ".join(dict.fromkeys(one.op for one in block)) if several else call.op,
        group=group,
        group_words=words,
        seq=number,
        numel_in=sum(call.numels_in) if call.numels_in and not several else None,
        numel_out=sum(call.numels_out) if call.numels_out and not several else None,
        shape=call.shape if call.numels_in and len(call.numels_in) == 1 and not several else None,
        dtype="" if several else call.dtype,
    )
