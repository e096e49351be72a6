"""Writes JSON without the module ``json``, whose import costs a short-lived process more than all that is written."""

from __future__ import annotations

try:
    from _json import encode_basestring_ascii as _quote
except ImportError:  # a Python that is not CPython
    from json.encoder import py_encode_basestring_ascii as _quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WORDS = {None: "null", True: "true", False: "false"}


def to_json(value: Any) -> str:
    """Return a value as JSON in ASCII, without spaces: what ``json.loads`` reads back as it was.

    Takes None, booleans, numbers, strings, lists, tuples and dicts, whose keys become strings. A float that is not
    finite becomes null.

    Raises:
        TypeError: anything else is among it.
    """
    if isinstance(value, str):
        return _quote(value)
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if value - value == 0 else "null"
    if isinstance(value, dict):
        return "{%s}" % ",".join(["%s:%s" % (_quote(str(key)), to_json(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return "[%s]" % ",".join([to_json(item) for item in value])
    raise TypeError("%s is nothing that JSON has" % type(value).__name__)
