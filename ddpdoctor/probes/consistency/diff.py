"""`check-consistency --diff`: compares the checkpoint files of ranks or runs, name by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.diff import DiffFacts, Kind, SavedFile, Unequal
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.tensor_names import align_names
from ddpdoctor.probes.consistency.apart import measure_apart
from ddpdoctor.probes.consistency.saved import read_saved
from ddpdoctor.recorder.replicas.fingerprint import FINGERPRINT_SIZE, UNKNOWN, fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ddpdoctor.probes.consistency.saved import Saved

RANK = re.compile(r"rank[-_.]?0*(\d+)", re.IGNORECASE)


def compare_files(paths: Sequence[Path]) -> DiffFacts:
    """Compare two or more files, all against all. Raises ``UserError`` if one cannot be read or compared."""
    if len(paths) < 2:
        raise UserError("two files at least are needed to compare", help="Give the files of two ranks or of two runs.")
    saved = _align([read_saved(path) for path in paths])
    tensors = _names(one.tensors for one in saved)
    values = _names(one.values for one in saved)
    if len(set().union(*(one.tensors for one in saved))) == sum(len(one.tensors) for one in saved) and tensors:
        raise _nothing_in_common(paths, saved)
    digests = [_digests(one) for one in saved]
    found = [_unequal_tensor(name, saved, digests) for name in tensors]
    found += [_unequal_value(name, saved) for name in values]
    return DiffFacts(
        files=tuple(_describe(path, one) for path, one in zip(paths, saved, strict=True)),
        tensors=len(tensors),
        values=len(values),
        unequal=tuple(one for one in found if one is not None),
        untold=tuple(name for name in tensors if any(digest.get(name) == "" for digest in digests)),
    )


def _align(saved: list[Saved]) -> list[Saved]:
    """Remove the key around the whole model if only some files have it: {"model": ...} against a state dict.

    What such a file holds besides the model (an optimizer, an epoch) has no counterpart in the others.
    """
    prefixes = align_names([one.tensors for one in saved])
    return [one.below(prefix) if prefix else one for one, prefix in zip(saved, prefixes, strict=True)]


def _names(parts: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _nothing_in_common(paths: Sequence[Path], saved: Sequence[Saved]) -> UserError:
    first = [next(iter(one.tensors), "none") for one in saved]
    seen = ", ".join(f"{path.name}: {name}" for path, name in zip(paths, first, strict=True))
    return UserError(
        f"the files have no tensor of the same name (the first of each: {seen})",
        help="Give files that were saved in the same way: all of a state_dict, or all of a dict with the same keys.",
    )


def _describe(path: Path, saved: Saved) -> SavedFile:
    ranks = {int(number) for number in RANK.findall(path.name)} or {int(n) for n in RANK.findall(path.parent.name)}
    return SavedFile(
        path=str(path),
        rank=ranks.pop() if len(ranks) == 1 else None,
        size_bytes=path.stat().st_size,
        tensors=len(saved.tensors),
        values=len(saved.values),
        stripped=tuple(sorted(saved.stripped)),
        below=saved.prefix,
        beside=saved.beside,
    )


def _digests(saved: Saved) -> dict[str, str]:
    """Return dtype, shape and fingerprint of each tensor as text, or "" if its values cannot be read."""
    found = fingerprints([tensor for _, tensor in saved.tensors.values()])
    digests = {}
    for number, (name, (_, tensor)) in enumerate(saved.tensors.items()):
        value = found[number * FINGERPRINT_SIZE : (number + 1) * FINGERPRINT_SIZE]
        digests[name] = "" if value == UNKNOWN else f"{_look(tensor)} {value.hex()}"
    return digests


def _look(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _unequal_tensor(name: str, saved: Sequence[Saved], digests: Sequence[dict[str, str]]) -> Unequal | None:
    sides, absent = _sides([digest.get(name) for digest in digests])
    if any(digest.get(name) == "" for digest in digests) or (len(sides) == 1 and not absent):
        return None
    tensors = [saved[side[0]].tensors[name][1] for side in sides]
    apart = [
        measure_apart(side[0], sides[0][0], tensor, tensors[0]) for side, tensor in zip(sides, tensors, strict=True)
    ]
    return Unequal(
        kind=saved[sides[0][0]].tensors[name][0],
        name=name,
        sides=sides,
        seen=tuple(_look(tensor) for tensor in tensors),
        absent_in=absent,
        apart=tuple(one for one in apart[1:] if one is not None),
    )


def _unequal_value(name: str, saved: Sequence[Saved]) -> Unequal | None:
    """Return how a value differs. Skip it if other files hold a tensor there: the tensor's result covers it."""
    held = [one.values.get(name) for one in saved]
    sides, absent = _sides([None if one is None else one[1] for one in held])
    if (len(sides) == 1 and not absent) or any(name in one.tensors for one in saved):
        return None
    kinds: list[Kind] = [one[0] for one in held if one is not None]
    seen = tuple(saved[side[0]].values[name][1][:60] for side in sides)
    return Unequal(kind=kinds[0], name=name, sides=sides, seen=seen, absent_in=absent)


def _sides(held: Sequence[str | None]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return groups of files that hold the same, the largest first, and the files that hold nothing."""
    found: dict[str, list[int]] = {}
    for number, one in enumerate(held):
        if one is not None:
            found.setdefault(one, []).append(number)
    sides = sorted(map(tuple, found.values()), key=lambda side: (-len(side), side[0]))
    return tuple(sides), tuple(number for number, one in enumerate(held) if one is None)
