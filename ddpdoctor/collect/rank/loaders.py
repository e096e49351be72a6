"""Reads how loaders split the data; ``recorder/data/loaders.py`` and ``recorder/data/passes.py`` write it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.recorded import dicts, read_all, read_record
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen

if TYPE_CHECKING:
    from collections.abc import Iterable


def read_loaders(notes: Iterable[dict[str, Any]], evidence: dict[str, Any]) -> tuple[LoaderSeen, ...] | None:
    """Return the loaders that a rank used, in the order of their first use, or None if none was recorded.

    A later note about a pass replaces an earlier one. The rank's evidence is newer than its notes.
    """
    loaders: dict[int, dict[str, Any]] = {}
    passes: dict[int, dict[int, dict[str, Any]]] = {}
    strays: dict[int, dict[str, Any]] = {}
    for note in (*notes, *dicts(evidence.get("loaders"))):
        if note.get("k") == "loader":
            loaders[_number(note.get("n"))] = note
        elif note.get("k") == "pass":
            passes.setdefault(_number(note.get("l")), {})[_number(note.get("p"))] = note
        elif note.get("k") == "epoch_call":
            strays[_number(note.get("n"))] = note
    if not loaders:
        return None
    calls = [note for _, note in sorted(strays.items()) if not note.get("used")]
    return tuple(_read_loader(note, passes.get(number, {}), calls) for number, note in sorted(loaders.items()))


def _read_loader(
    note: dict[str, Any], passes: dict[int, dict[str, Any]], calls: Iterable[dict[str, Any]]
) -> LoaderSeen:  # fmt: skip
    ordered = [passes[number] for number in sorted(passes)]
    epochs = tuple(read_record(EpochSeen, entry, trained=_number(entry.get("bw")) > 0) for entry in ordered)
    strays = [call for call in calls if call.get("N") == note.get("N") is not None]
    loader = read_record(
        LoaderSeen,
        note,
        indices_seen=not note.get("it") and any(epoch.drawn for epoch in epochs),
        epochs=epochs,
        passes=max(passes, default=0),
        trained_batches=max((_number(entry.get("tb")) for entry in ordered), default=0),
        in_join=any(bool(entry.get("j")) for entry in ordered),
        stray_calls=read_all(EpochCall, strays),
    )
    return replace(loader, samples=None) if any(entry.get("w") for entry in ordered) else loader


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
