"""Finds the oldest pending entries of torch's flight recorder, of 2.6 to 2.15 (FlightRecorderDetail.hpp).

Dumps that are pickles are read as plain values, and nothing is ever imported or called. torch writes only dicts, lists,
tuples, strings, numbers, booleans and None there (jit/serialization/pickler.cpp). Any other opcode raises ValueError.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from typing import Any, Container, Dict, List, Optional, Tuple

# Backends of torch 2.15 with a recorder each. There "nccl" means the first one, unless ``TORCH_DIST_USE_NCCL2=0``.
HOOKED = ("nccl2", "nccl-lazy")
# Backends whose calls return before the collective has completed. Gloo's entries never leave "scheduled".
DEVICE_BACKENDS = ("nccl", *HOOKED)
# The entry of ProcessGroupNCCL::endCoalescing, which ends a batch. The batch's other entries have no events.
COALESCED = "coalesced"
# Our choice: the oldest pending entries that are kept, one per group and one per pair of point-to-point ranks.
MOST_PENDING = 256
MOST_TIMED = 256  # our choice: the last completed entries that are kept, if torch times them
_KEPT = ("process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "input_sizes", "input_dtypes",
         "state", "retired", "time_created_ns", "duration_ms")  # fmt: skip
_NUMBERS = ("collective_seq_id", "p2p_seq_id", "time_created_ns")


def chosen(entries: Any, groups: Optional[Container[str]] = None, *, newest: bool = False) -> List[Dict[str, Any]]:
    """Return the oldest pending entries, oldest first, the last that torch has timed, and the last untold one.

    ``groups`` are the names of the existing groups; entries of destroyed groups are ignored. A host may be a thousand
    collectives ahead of its device, all waiting for the first. So the list is cut only after that one is found.
    ``newest`` is for torch that waits in each call: only the newest can be pending, whatever the older ones look like.
    """
    found = entries if isinstance(entries, list) else []
    sound = [call for call in (dict(entry) for entry in found if isinstance(entry, dict)) if _is_sound(call)]
    ours = [entry for entry in sound if groups is None or entry["process_group"][0] in groups]
    timed = [entry for entry in ours if isinstance(entry.get("duration_ms"), (int, float)) and not entry["is_p2p"]]
    untold = max(filter(is_untold, ours), key=lambda entry: int(entry["time_created_ns"]), default=None)
    kept = _pending(ours, newest)[:MOST_PENDING] + timed[-MOST_TIMED:]
    hooked = [entry for entry in ours if backend_of(entry) in HOOKED]
    tells_completion = any(entry["state"] == "completed" or not entry.get("retired") for entry in hooked)
    kept += [untold] if untold is not None and not tells_completion else []
    return [{name: entry[name] for name in _KEPT if name in entry} for entry in kept]


def backend_of(entry: Dict[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


def op_of(entry: Dict[str, Any]) -> str:
    """Return the operation that an entry names. A point-to-point call includes its ranks in the group: "recv 1<-0"."""
    return str(entry["profiling_name"]).partition(":")[2]


def is_pending(entry: Dict[str, Any]) -> bool:
    """Return whether an entry has not completed. A retired entry of a hooked backend counts as not pending."""
    return entry["state"] != "completed" and not entry.get("retired")


def is_untold(entry: Dict[str, Any]) -> bool:
    """Return whether torch cannot tell if a call is done: nccl2 with DETAIL has no hooks (FlightRecorderHook.hpp)."""
    return entry["state"] == "scheduled" and bool(entry.get("retired")) and backend_of(entry) in HOOKED


def _is_sound(entry: Dict[str, Any]) -> bool:
    for counter in _NUMBERS:  # an earlier recorder has only the first of them
        number = entry.setdefault(counter, 0)
        if type(number) is not int or not 0 <= number < 2**63:
            return False
    group, name = entry.get("process_group"), entry.get("profiling_name")
    texts = isinstance(name, str) and isinstance(entry.get("state"), str) and isinstance(group, (list, tuple))
    if not texts or not group or not all(isinstance(part, str) for part in group):
        return False
    entry["is_p2p"] = bool(entry.get("is_p2p"))
    return backend_of(entry) in DEVICE_BACKENDS


def _pending(entries: List[Dict[str, Any]], newest: bool) -> List[Dict[str, Any]]:
    """Return the oldest pending entry of each lane. Entries before a completed one of the same lane are done too."""
    # The parts of a batch get the state of its end, which alone has events: a part stays "scheduled" forever.
    parts: Dict[Any, Any] = {}
    found = []
    for entry in entries:
        p2p = entry["is_p2p"]  # sends and receives have their own counter
        batch = (*entry["process_group"], p2p, entry["p2p_seq_id" if p2p else "collective_seq_id"])
        if op_of(entry) != COALESCED:
            found.append(entry)
            if is_pending(entry):
                parts.setdefault(batch, []).append(entry)
        elif batch in parts:
            for part in parts.pop(batch):
                part.update(state=entry["state"], retired=entry.get("retired"))
        else:
            found.append(entry)
    # What was chosen before has completed entries behind the pending ones: their times say which came first.
    oldest: Dict[Tuple[str, str, str], Dict[str, Any]] = {}
    for entry in found:
        # What completes in order: a group's collectives, or one pair of ranks on one stream.
        lane = (entry["process_group"][0], backend_of(entry), op_of(entry) if entry["is_p2p"] else "")
        if entry["state"] == "completed":
            if lane in oldest and entry["time_created_ns"] >= oldest[lane]["time_created_ns"]:
                del oldest[lane]
        elif is_pending(entry) and (newest or lane not in oldest):
            oldest[lane] = entry
    return sorted(oldest.values(), key=lambda entry: int(entry["time_created_ns"]))


MOST_OPCODES = 2**22  # our choice: a dump of 2,000 collectives with their stacks has about 200,000
MOST_BYTES = 64 * 2**20
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = frozenset({"BINPUT", "LONG_BINPUT"})
_GET = frozenset({"BINGET", "LONG_BINGET"})
_MARK = object()


def parse_plain_pickle(data: bytes) -> Any:
    """Return the value that a pickle holds. Raises ValueError if it is damaged, too large, or not plain."""
    stack: list[Any] = []
    _interpret(data, stack)
    return stack.pop()


def parse_cut_pickle(data: bytes) -> Any:
    """Return what came before the end of a pickle that is cut off. Raises ValueError if nothing did, or not plain."""
    stack: list[Any] = []
    try:
        _interpret(data, stack)
    except _RefusedError:
        raise
    except ValueError:
        _close(stack)
    if not stack or stack[0] is _MARK:
        raise ValueError("nothing of it is left")
    return stack[0]


class _RefusedError(ValueError):
    """It is too large, or holds more than plain values: nothing of it is used."""


def _interpret(data: bytes, stack: list[Any]) -> None:
    if len(data) > MOST_BYTES:
        raise _RefusedError(f"it has more than {MOST_BYTES} bytes")
    known: dict[int, Any] = {}
    try:
        for opcode, argument, _ in itertools.islice(pickletools.genops(data), MOST_OPCODES):
            if opcode.name == "STOP" and stack:
                return
            _run_opcode(opcode.name, argument, stack, known)
    except _RefusedError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, struct.error, OverflowError, StopIteration) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    raise ValueError(f"it has no end within {MOST_OPCODES} opcodes")


def _close(stack: list[Any]) -> None:
    while len(stack) > 1:
        mark = max((at for at, value in enumerate(stack) if value is _MARK), default=1)
        values = [value for value in stack[mark:] if value is not _MARK]
        del stack[mark:]
        if not stack:
            return
        if isinstance(stack[-1], list):
            stack[-1].extend(values)
        elif isinstance(stack[-1], dict):
            pairs = zip(values[::2], values[1::2], strict=False)
            stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))


def _run_opcode(name: str, argument: Any, stack: list[Any], known: dict[int, Any]) -> None:
    if name in _VALUES:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _PUT:
        known[argument] = stack[-1]
    elif name == "MEMOIZE":
        known[len(known)] = stack[-1]
    elif name in _GET:
        stack.append(known[argument])
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("APPEND", "APPENDS"):
        items = _taken(stack, 1 if name == "APPEND" else None)
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _taken(stack, 2 if name == "SETITEM" else None)
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name == "TUPLE" or name in _TUPLES:
        stack.append(tuple(_taken(stack, _TUPLES.get(name))))
    elif name not in ("PROTO", "FRAME"):
        raise _RefusedError(f"it holds more than plain values ({name})")


def _taken(stack: list[Any], count: int | None) -> list[Any]:
    """Pop ``count`` values off the stack. None pops everything above the last mark, and the mark itself."""
    marks = 0 if count is not None else 1
    if count is None:
        count = next(at for at, value in enumerate(reversed(stack)) if value is _MARK)
    elif len(stack) < count:
        raise IndexError
    values = stack[len(stack) - count :]
    del stack[len(stack) - count - marks :]
    return values
