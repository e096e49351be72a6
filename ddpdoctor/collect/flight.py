"""Reads torch's flight recorder, which alone knows whether a collective of NCCL has completed on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.facts import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE_BACKENDS = ("nccl",)
"""Backends whose calls return before the collective has completed. Gloo's entries never leave "scheduled"."""


def pending_on_device(entries: list[dict[str, Any]], calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return, per group, the oldest collective that was begun and has not completed: the rank waits for it.

    ``entries`` are those of ``_dump_fr_trace_json``. A recorded call of the same group and number lends its call site,
    dtype and shape; a collective of DDP's C++ reducer has none.
    """
    oldest: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not _is_pending(entry):
            continue
        group = _group(entry)
        if group not in oldest or entry["collective_seq_id"] < oldest[group]["collective_seq_id"]:
            oldest[group] = entry
    if not oldest:
        return ()
    recorded = {(call.group, call.seq): call for call in calls if call.seq is not None}
    last = max((call.index for call in calls), default=0)
    return tuple(
        _as_call(entry, recorded.get((group, entry["collective_seq_id"])), last + number)
        for number, (group, entry) in enumerate(sorted(oldest.items()), start=1)
    )


def _is_pending(entry: dict[str, Any]) -> bool:
    backend = str(entry.get("profiling_name", "")).partition(":")[0]
    return (
        backend in DEVICE_BACKENDS
        and isinstance(entry.get("collective_seq_id"), int)
        and not entry.get("is_p2p")
        and entry.get("state") != "completed"
        and not entry.get("retired")
    )


def _group(entry: dict[str, Any]) -> str:
    name = entry.get("process_group") or [""]
    return str(name[0])


def _as_call(entry: dict[str, Any], known: Call | None, index: int) -> Call:
    sizes = entry.get("input_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    return Call(
        index=index,
        op=known.op if known else str(entry["profiling_name"]).partition(":")[2].removeprefix("_"),
        api=known.api if known else "",
        group=_group(entry),
        seq=entry["collective_seq_id"],
        dtype=known.dtype if known else (str(dtypes[0]) if dtypes else None),
        shape=known.shape if known else (tuple(sizes[0]) if sizes else None),
        tensors=known.tensors if known else len(sizes),
        peer=known.peer if known else None,
        redop=known.redop if known else None,
        site=known.site if known else None,
        started_ns=known.started_ns if known else 0,
        ended_ns=None,
        is_async=False,
        failed=False,
        thread_is_main=True,
    )
