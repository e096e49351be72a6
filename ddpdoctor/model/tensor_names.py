"""Matches tensor names of files that hold the same model under different keys, with or without "model."."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MODEL_KEYS = frozenset({"model", "model_state_dict", "state_dict", "net", "app"})
"""Keys under which scripts save a model. Not "module": that is a prefix by DDP, and DD713 reports it."""
MAX_DEPTH = 2
"""How many keys may surround a state dict: {"model": ...}, {"state": {"model": ...}}."""


def align_names(files: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Return for each file the prefix to remove from its names so that they match those of the other files.

    All prefixes are empty if any two files already share a name, or if no prefix helps.
    """
    none = ("",) * len(files)
    if len(files) < 2 or not all(files) or len(set().union(*files)) < sum(map(len, files)):
        return none
    smallest = min(files, key=len)
    matched, found = 0, none
    for prefix in _prefixes(smallest):
        wanted = _below(smallest, prefix)
        fits = [(prefix, len(wanted)) if names is smallest else _best_prefix(names, wanted) for names in files]
        total = sum(count for _, count in fits) if all(count for _, count in fits) else 0
        if total > matched:
            matched, found = total, tuple(one for one, _ in fits)
    return found


def _best_prefix(names: Collection[str], wanted: Collection[str]) -> tuple[str, int]:
    """Return the prefix that holds most of the wanted names, and their number. The shortest wins a tie."""
    counts = {prefix: len(_below(names, prefix) & set(wanted)) for prefix in _prefixes(names)}
    best = max(counts, key=lambda prefix: counts[prefix])
    return best, counts[best]


def _prefixes(names: Collection[str]) -> list[str]:
    found = {""}
    for name in names:
        parts = name.split(".")[:-1]
        found |= {".".join(parts[:depth]) + "." for depth in range(1, min(len(parts), MAX_DEPTH) + 1)}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))


def _below(names: Collection[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
