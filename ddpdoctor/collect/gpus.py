"""Counts the GPUs that a job may use. The only file that knows pynvml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(env: Mapping[str, str]) -> int:
    """Count the NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` leaves; 0 on a machine without a driver."""
    uuids = _read_uuids()
    visible = env.get(_VARIABLE)
    return len(uuids) if visible is None else count_visible(visible, uuids)


def count_visible(visible: str, uuids: Sequence[str]) -> int:
    """Count as CUDA does: up to the first entry that names no device; none at all where one is named twice."""
    chosen: list[str] = []
    for entry in visible.split(","):
        device = _resolve(entry.strip(), uuids)
        if device is None:
            break
        chosen.append(device)
    return len(chosen) if len(set(chosen)) == len(chosen) else 0


def _resolve(entry: str, uuids: Sequence[str]) -> str | None:
    """Find the device of an index or of the beginning of a UUID; a MIG slice stands for itself."""
    if entry.isdecimal():
        index = int(entry)
        return uuids[index] if index < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry if uuids else None
    matching = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _read_uuids() -> tuple[str, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
