"""What stands before the texts of torch's logs in C++ and Python: a date without year and zone, and the group."""

from __future__ import annotations

import re
from calendar import timegm
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Time, Who

if TYPE_CHECKING:
    from ddpdoctor.evidence.reader import Line

_TIME = re.compile(
    r"\[?[IWEF](?P<month>\d{1,2})(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<part>\d{6,9}) "
)
"""C++ has no leading zero of the month, Python has."""
_NO_YEAR = 1970


def origin_of(line: Line, who: Who | None = None) -> dict[str, Any]:
    """Return the fields that a fact has from the line that says it; ``who`` replaces the one that wrote the line."""
    return {"who": who or line.who, "spot": line.spot(), "time": time_of(line), "said": quote(line.text)}


def time_of(line: Line) -> Time | None:
    """Return the time that the line's prefixes say, else that of the head of torch's own log.

    That has no year. It is on a clock of its own, so that it is never compared to a time with a year.
    """
    if line.time is not None:
        return line.time
    found = _TIME.search(line.text)
    if found is None:
        return None
    date = map(int, (found["month"], found["day"], found["hour"], found["minute"], found["second"]))
    try:
        seconds = timegm((_NO_YEAR, *date, 0, 0, 0))
    except ValueError:
        return None
    clock = f"{line.who.host or line.source}, no year"
    return Time(seconds=seconds + float(f"0.{found['part']}"), clock=clock)
