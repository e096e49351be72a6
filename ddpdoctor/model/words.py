"""How amounts, ranks, sides and torch's names are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
Value = TypeVar("Value", bound="Hashable")
Item = TypeVar("Item")
# By the names of torch's profiler and flight recorder, and of c10d's ``opTypeToString`` in lower case.
_OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all_v_single": "all_to_all_single",
    "allgather_coalesced": "all_gather_coalesced",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced": "all_gather_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "ALLGATHER_coalesced": "all_gather_coalesced",
    "REDUCE_SCATTER_coalesced": "reduce_scatter_coalesced",
    "all_reduce_barrier": "barrier",
    "all_reduce_sparse": "all_reduce",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recvanysource": "recv",
    "unknown": "",
}
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128", "ComplexHalf": "complex32",
}  # fmt: skip


def format_size(size_bytes: int) -> str:
    """Write a size in the largest binary unit that gives a whole number, so nothing is rounded."""
    for unit, size in _UNITS:
        if size_bytes >= size and size_bytes % size == 0:
            return f"{size_bytes // size} {unit}"
    return f"{size_bytes} B"


def format_about(size_bytes: float) -> str:
    """Write a size with three digits: "5.3 MiB", "64 KiB"."""
    unit, size = next(((unit, size) for unit, size in _UNITS if size_bytes >= size), ("B", 1))
    value = size_bytes / size
    return f"{value:.3g} {unit}" if value < 1000 else f"{int(value)} {unit}"


def format_memory(size_bytes: float) -> str:
    """Write "21.0 GiB", or "380 MiB" below one GiB."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"


def format_rate(gb_s: float) -> str:
    """Write "466 GB/s", "11.8 GB/s" or "0.85 GB/s": three digits, because these figures are not more exact."""
    return f"{format_digits(gb_s)} GB/s"


def format_time(time_us: float) -> str:
    """Write "34.0 us", "1.20 ms", "85.0 ms" or "2.10 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(time_us) >= size:
            return f"{format_digits(time_us / size)} {unit}"
    return f"{format_digits(time_us)} us"


def format_digits(value: float) -> str:
    """Write a number with three digits. Trailing zeros stay, because they show how exact it is."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}" if size >= 0.1 or not size else f"{value:.2g}"


def format_age(age_s: float) -> str:
    """Write "40 s", "12 min", "5 h" or "3 days"."""
    for unit, size_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def format_span(span_s: float) -> str:
    """Write "3.2 s", "45 s", "2 min 5 s", "41 min", "3 h 12 min" or "2 days 4 h"."""
    if span_s < 99.5:
        return f"{span_s:.1f} s" if span_s < 9.95 else f"{span_s:.0f} s"
    parts = (("days", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    whole = round(span_s) if span_s < 600 else round(span_s / 60) * 60
    at = next(at for at, (unit, size) in enumerate(parts) if whole >= (2 * size if unit == "days" else size))
    (unit, size), (lesser, less) = parts[at : at + 2]
    rest = round(whole % size / less)
    return f"{whole // size} {unit}" + (f" {rest} {lesser}" if rest else "")


def rank_list(ranks: Iterable[int], noun: str = "rank") -> str:
    """Return "rank 3", "ranks 0 and 2" or "ranks 0-6, 9". ``noun`` replaces the word "rank"."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) == 2:
        return f"{noun}s {numbers[0]} and {numbers[1]}"
    return f"{noun}s {format_numbers(numbers)}"


def format_numbers(numbers: Iterable[int]) -> str:
    """Return numbers sorted, each once: "0-6, 9". Two in a row stay "0, 1", because that reads better than "0-1"."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        first = spans.pop()[0] if spans and spans[-1][1] == number - 1 else number
        spans.append((first, number))
    return ", ".join(f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in spans)


def count_of(number: int, noun: str, nouns: str = "") -> str:
    """Return "1 tensor" or "2 tensors". ``nouns`` is the plural if it is irregular."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def verb(ranks: Iterable[int], single: str, many: str) -> str:
    """Return the verb's form for one rank or for several."""
    return single if len(set(ranks)) == 1 else many


def name_list(names: Sequence[str], most: int = 4) -> str:
    """Return "a", "a and b", or "a, b, c and 12 more" if there are more than ``most``."""
    if len(names) > most:
        return first_names(names, most - 1)
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def first_names(names: Sequence[str], most: int = 4, *, count: int | None = None) -> str:
    """Return "a, b, c, d and 5 more". ``count`` is how many there are if ``names`` are the first of them only."""
    more = (len(names) if count is None else count) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def grouped(pairs: Iterable[tuple[Value, Item]]) -> dict[Value, list[Item]]:
    """Return the items of each value, both in the order in which they came."""
    found: dict[Value, list[Item]] = {}
    for value, item in pairs:
        found.setdefault(value, []).append(item)
    return found


def group_alike(values: Mapping[int, Value]) -> list[tuple[Value, tuple[int, ...]]]:
    """Return each value with the ranks or files that have it: the most first, the lowest number first among equals."""
    found = grouped((value, number) for number, value in sorted(values.items(), key=lambda item: item[0]))
    return sorted(((value, tuple(who)) for value, who in found.items()), key=lambda side: (-len(side[1]), side[1][0]))


def majority_of(sides: Collection[Collection[Item]]) -> Collection[Item]:
    """Return the side with more than half of all members, or nothing."""
    largest: Collection[Item] = max(sides, key=len, default=())
    return largest if 2 * len(largest) > sum(map(len, sides)) else ()


def outvoted(sides: Collection[Collection[int]]) -> tuple[int, ...]:
    """Return the ranks or files outside the majority, or all if there is none."""
    majority = set(majority_of(sides))
    return tuple(sorted(number for side in sides for number in side if number not in majority))


def odd_ranks(sides: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the ranks outside the first side, or None if the second has as many: the largest come first."""
    return tuple(sorted(n for side in sides[1:] for n in side)) if len(sides[0]) > len(sides[1]) else None


def op_name(profiled: str) -> str:
    """Return Python's name for an operation, by the name that torch's profiler and flight recorder use."""
    return _OPS.get(profiled, profiled)


def op_type_name(op_type: str) -> str:
    """Return Python's name for an ``OpType``: "all_reduce" for "ALLREDUCE", "" for "UNKNOWN"."""
    return op_name(op_type.lower())


def dtype_name(scalar_type: str) -> str:
    """Return Python's name for a dtype of c10/core/ScalarType.h. Those that are not listed are capitalized only."""
    return _DTYPES.get(scalar_type, scalar_type.lower())
