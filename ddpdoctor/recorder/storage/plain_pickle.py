"""Reads pickles of plain values, such as the dumps of torch's flight recorder, and never imports or calls anything.

torch writes only dicts, lists, tuples, strings, numbers, booleans and None there (jit/serialization/pickler.cpp).
Any other opcode raises ValueError.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from typing import Any

MOST_OPCODES = 2**22
"""Our choice: a dump of 2,000 collectives with their stacks has about 200,000."""
MOST_BYTES = 64 * 2**20
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = frozenset({"BINPUT", "LONG_BINPUT"})
_GET = frozenset({"BINGET", "LONG_BINGET"})
_MARK = object()


def parse_plain_pickle(data: bytes) -> Any:
    """Return the value that a pickle holds.

    Raises:
        ValueError: the pickle is damaged or too large, or holds more than plain values.
    """
    stack: list[Any] = []
    _interpret(data, stack)
    return stack.pop()


def parse_cut_pickle(data: bytes) -> Any:
    """Return what can be had of a pickle that ends too early: its containers hold what came before the end.

    Raises:
        ValueError: nothing can be had, or it holds more than plain values.
    """
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
    """Run the opcodes up to the end, which leaves the value on the stack."""
    if len(data) > MOST_BYTES:
        raise _RefusedError(f"it has more than {MOST_BYTES} bytes")
    known: dict[int, Any] = {}
    try:
        for opcode, argument, _ in itertools.islice(pickletools.genops(data), MOST_OPCODES):
            if opcode.name == "STOP" and stack:
                return
            _run(opcode.name, argument, stack, known)
    except _RefusedError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, struct.error, OverflowError, StopIteration) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    raise ValueError(f"it has no end within {MOST_OPCODES} opcodes")


def _close(stack: list[Any]) -> None:
    """Put the values that are left on the stack into the containers below them."""
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


def _run(name: str, argument: Any, stack: list[Any], known: dict[int, Any]) -> None:
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
    else:
        _gather(name, stack)


def _gather(name: str, stack: list[Any]) -> None:
    """Move values from the stack into their container."""
    if name in ("APPEND", "APPENDS"):
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
    if count is None:
        count = next(at for at, value in enumerate(reversed(stack)) if value is _MARK)
        values = stack[len(stack) - count :]
        del stack[len(stack) - count - 1 :]
        return values
    values = stack[-count:]
    if len(values) < count:
        raise IndexError
    del stack[-count:]
    return values
