"""Reads how loaders split the data; ``recorder/data/loaders.py`` and ``recorder/data/passes.py`` write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.answers import dicts
from ddpdoctor.collect.rank.frames import read_frame
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen, SamplerSeen

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
    iterable = bool(note.get("it"))
    worded = any(entry.get("w") for entry in ordered)
    strays = [call for call in calls if call.get("N") == note.get("N") is not None]
    return LoaderSeen(
        number=_number(note.get("n")),
        site=read_frame(note.get("site")),
        dataset=str(note.get("ds", "")),
        dataset_print=str(note.get("dp", "")),
        samples=None if worded else _maybe(note.get("N")),
        batch_size=_maybe(note.get("bs")),
        drop_last=note["dl"] if isinstance(note.get("dl"), bool) else None,
        iterable=iterable,
        workers=_number(note.get("w")),
        indices_seen=not iterable and any(_number(entry.get("d")) for entry in ordered),
        sampler=_read_sampler(note.get("sampler")),
        epochs=tuple(map(_read_pass, ordered)),
        passes=max(passes, default=0),
        trained_batches=max((_number(entry.get("tb")) for entry in ordered), default=0),
        in_join=any(bool(entry.get("j")) for entry in ordered),
        part_of=str(note.get("of", "")),
        stray_calls=tuple(found for found in map(_read_call, strays) if found is not None),
        part=str(note.get("part", "")),
    )


def _read_call(entry: dict[str, Any]) -> EpochCall | None:
    site = read_frame(entry.get("site"))
    return EpochCall(site=site, time_ns=_number(entry.get("at"))) if site is not None else None


def _read_sampler(entry: Any) -> SamplerSeen | None:
    if not isinstance(entry, dict):
        return None
    return SamplerSeen(
        type=str(entry.get("type", "")),
        replicas=_maybe(entry.get("replicas")),
        rank=_maybe(entry.get("rank")),
        seed=_maybe(entry.get("seed")),
        shuffle=entry["shuffle"] if isinstance(entry.get("shuffle"), bool) else None,
        drop_last=entry["drop_last"] if isinstance(entry.get("drop_last"), bool) else None,
        standard=bool(entry.get("standard")),
    )


def _read_pass(entry: dict[str, Any]) -> EpochSeen:
    backwards = _number(entry.get("bw"))
    return EpochSeen(
        number=_number(entry.get("p")),
        set_epoch=_maybe(entry.get("e")),
        batches=_number(entry.get("b")),
        drawn=_number(entry.get("d")),
        total=_number(entry.get("t")),
        xor=_number(entry.get("x")),
        order=str(entry.get("o", "")),
        first=str(entry.get("f", "")),
        complete=bool(entry.get("done")),
        trained=backwards > 0,
        batch_prints=_texts(entry.get("bp")),
        sample_prints=_texts(entry.get("sp")),
        backwards=backwards,
        repeats=_number(entry.get("re")),
        highest=_maybe(entry.get("h")),
        split_after=bool(entry.get("split")),
        begun_ns=_number(entry.get("t0")),
        ended_ns=_maybe(entry.get("t1")),
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _maybe(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()
