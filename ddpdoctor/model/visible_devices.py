"""Resolves CUDA_VISIBLE_DEVICES to GPUs in the same way as CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The effect of a value of CUDA_VISIBLE_DEVICES on a machine with certain GPUs."""

    entries: tuple[str, ...]
    """The entries as written; empty if the variable is not set."""
    devices: tuple[str, ...]
    """UUIDs of the GPUs that a process sees, in its order. A MIG slice keeps its own name."""
    bad_entry: str | None = None
    """The first entry that names no device. CUDA stops reading there."""
    hidden: tuple[str, ...] = ()
    """Entries after the bad one."""
    repeated: tuple[str, ...] = ()
    """Devices that are named more than once. CUDA then shows no device at all."""

    @property
    def on_purpose(self) -> bool:
        """Whether the value hides all GPUs on purpose: empty, -1, or Slurm's value for a step without GPUs."""
        return self.entries[:1] in {("",), ("-1",), ("NoDevFiles",)}


def read_visible(value: str | None, uuids: Sequence[str]) -> Visible:
    """Resolve a value as CUDA does: up to the first bad entry, and to no device at all if one is named twice."""
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
    """Find the device of an index or of a UUID prefix. A MIG slice is returned unchanged."""
    if entry.isascii() and entry.isdecimal():
        index = int(entry)
        return uuids[index] if index < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry if uuids else None
    matching = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
