"""Which GPUs CUDA_VISIBLE_DEVICES leaves, as CUDA reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What a value of CUDA_VISIBLE_DEVICES comes to on a machine with these GPUs."""

    entries: tuple[str, ...]
    """As they were written; empty where the variable is not set."""
    devices: tuple[str, ...]
    """UUIDs of the GPUs that a process sees, in its own order; a MIG slice stands for itself."""
    bad_entry: str | None = None
    """The first entry that names no device: CUDA reads no further."""
    hidden: tuple[str, ...] = ()
    """Entries after the bad one."""
    repeated: tuple[str, ...] = ()
    """Devices that are named more than once; CUDA then shows none at all."""

    @property
    def on_purpose(self) -> bool:
        """Whether it reads as if somebody wanted no GPU: nothing, -1, or what Slurm writes for a step without GPUs."""
        return self.entries[:1] in {("",), ("-1",), ("NoDevFiles",)}


def read_visible(value: str | None, uuids: Sequence[str]) -> Visible:
    """Resolve a value as CUDA does: up to the first entry that names no device; none where one is named twice."""
    if value is None:
        return Visible(entries=(), devices=tuple(uuids))
    entries = tuple(entry.strip() for entry in value.split(","))
    chosen: list[str] = []
    bad = None
    for entry in entries:
        device = _resolve(entry, uuids)
        if device is None:
            bad = entry
            break
        chosen.append(device)
    repeated = tuple(dict.fromkeys(device for device in chosen if chosen.count(device) > 1))
    return Visible(
        entries=entries,
        devices=() if repeated else tuple(chosen),
        bad_entry=bad,
        hidden=entries[len(chosen) + 1 :],
        repeated=repeated,
    )


def _resolve(entry: str, uuids: Sequence[str]) -> str | None:
    """Find the device of an index or of the beginning of a UUID; a MIG slice stands for itself."""
    if entry.isascii() and entry.isdecimal():
        index = int(entry)
        return uuids[index] if index < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry if uuids else None
    matching = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
