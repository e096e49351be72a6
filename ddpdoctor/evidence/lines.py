"""Takes the prefixes of launchers and log collectors off a line, and keeps what they say about rank, host and time.

The formats are those of torch, torchrun, Slurm's ``srun -l``, mpirun, Ray, vLLM, kubectl, docker compose, pdsh and
syslog. They come in any nesting, so the patterns are tried until none fits.
"""

from __future__ import annotations

import re
from calendar import timegm
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.evidence.reader import Line
from ddpdoctor.model.evidence import MOST_RANKS, Time, Who

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MOST_CHARACTERS = 16_384
"""Our choice: the rest of a longer line is not read. The longest useful lines are command lines and environments."""
_MOST_PREFIXES = 8
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_MONTHS = {
    "Jan": 1, "Feb": 2, "Mar": 3, "Apr": 4, "May": 5, "Jun": 6,
    "Jul": 7, "Aug": 8, "Sep": 9, "Oct": 10, "Nov": 11, "Dec": 12,
}  # fmt: skip
_HMS = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?"
_ISO = r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T ]" + _HMS + r"(?:Z|[+-]\d\d:?\d\d| UTC)?"
_AFTER_TIME = r"\]?(?: [|-] |: |\s+|$)"
_BRACKETS = tuple(
    map(
        re.compile,
        (
            r"\[rank:? ?(?P<rank>\d+)\]:? ?",  # torch, and Lightning's "[rank: 3]"
            r"\[[^\]\[]{0,40}\brank[=: ]?(?P<rank>\d+)\b[^\]\[]{0,40}\]:? ?",  # a template of torchrun's of one's own
            r"\[(?:\d+,)?(?P<rank>\d+)\](?:\[[^\]]{0,60}\])?<(?:stdout|stderr|stddiag)>: ?",  # mpirun, horovodrun
            r"\[" + _ISO + _AFTER_TIME,
            r"\[pod/(?P<host>[^/\]\s]{1,253})/[^\]\s]{1,253}\] ?",  # kubectl logs --prefix
            r"\[\s*(?P<boot>\d+\.\d{6})\] ?",  # dmesg
            r"\[[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) " + _HMS + r" (?P<year>\d{4})\] ?",  # dmesg -T
            r"\[[A-Za-z_][\w-]{0,40}?(?P<local_rank>\d+)\]:? ?",  # torchrun: the role and the local rank
            r"\[" + _HMS + _AFTER_TIME,
            r"\[\d{3,}\] ",  # the line numbers of a viewer
        ),
    )
)
_DIGITS = tuple(map(re.compile, (_ISO + _AFTER_TIME, _HMS + r"(?: \| |\s+)", r"\s*(?P<task>\d{1,6}): ", r"\s*\|\s")))
"""Dates and times, the task numbers of ``srun -l``, and the border of a table."""
_NO_HOST = (
    r"(?!(?:epoch|step|iter|iteration|batch|ep|it|fold|run|try|attempt|layer|stage|cuda|gpu|device|loss|top|acc"
    r"|[a-z])-?\d+: )"
)
_WORDS = tuple(
    map(
        re.compile,
        (
            r"rank(?P<rank>\d+): ",
            r"(?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) "
            + _HMS
            + r" (?P<host>[\w.-]{1,63}) [\w./()-]{1,40}(?:\[\d+\])?: ",  # syslog
            # pdsh and DeepSpeed: "worker-1: ". Only names with a digit, so that no ordinary word counts as a host.
            _NO_HOST + r"(?=[a-z-]{1,62}\d)(?P<host>[a-z][a-z0-9.-]{1,62}): ",
            r"(?P<host>[A-Za-z][\w.-]{0,61}\d)\s{1,8}\| ?",  # docker compose
        ),
    )
)
_OTHERS = (
    re.compile(r"\((?P<process>[^()]{0,80}\bpid=\d+[^()]{0,80})\) ?"),
    re.compile(r"\|\s"),
)
"""Ray's ``(RayTrainWorker pid=19799, ip=10.72.0.6)``, vLLM's ``(VllmWorker rank=0 pid=85)``, the border of a table."""
_NOBODY = Who()


def split_line(raw: str, number: int, source: str, known: Who = _NOBODY) -> Line:
    """Return a line without its prefixes and colors.

    Args:
        raw: The line as it stands, without its end.
        number: Its number in the source, from 1.
        source: The name of the file.
        known: What the path of the file says about the writer of all its lines. Prefixes add to it.
    """
    text = raw[:MOST_CHARACTERS]
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    said: dict[str, Any] = {}
    time: Time | None = None
    at = 0
    for _ in range(_MOST_PREFIXES):
        match = _match_prefix(text, at)
        if match is None:
            break
        at = match.end()
        fields = {name: value for name, value in match.groupdict().items() if value is not None}
        said = {**_who_fields(fields), **said}
        time = time or _time(fields)
    who = replace(known, **said) if said else known
    if time is not None:
        time = replace(time, clock=who.host or source)
    return Line(text=text[at:], number=number, source=source, who=who, time=time, raw_prefix=text[:at])


def parts_of(line: str) -> Iterator[str]:
    """Yield the parts between carriage returns: a progress bar writes many of them into one line."""
    if "\r" not in line:
        yield line
        return
    for part in line.split("\r"):
        if part.strip():
            yield part


def _match_prefix(text: str, at: int) -> re.Match[str] | None:
    first = text[at : at + 1]
    if first == "[":
        patterns = _BRACKETS
    elif first.isdigit() or first == " ":
        patterns = _DIGITS
    else:
        patterns = _WORDS if first.isalpha() else _OTHERS
    return next((match for pattern in patterns if (match := pattern.match(text, at))), None)


def _who_fields(fields: dict[str, str]) -> dict[str, Any]:
    """Return the fields of ``Who`` that a prefix gives."""
    if "process" in fields:
        pairs = dict(re.findall(r"\b(pid|ip|rank)=([\w.:]+)", fields["process"]))
        fields = {"address" if name == "ip" else name: value for name, value in pairs.items()}
    found: dict[str, Any] = {name: fields[name] for name in ("host", "address") if name in fields}
    for name in ("rank", "local_rank", "task", "pid"):
        if fields.get(name, "").isdigit() and int(fields[name]) < MOST_RANKS:
            found[name] = int(fields[name])
    return found


def _time(fields: dict[str, str]) -> Time | None:
    """Return the time in a prefix. A time without a date is comparable only to other such times."""
    if "boot" in fields:
        return Time(seconds=float(fields["boot"]), clock="")
    if "hour" not in fields:
        return None
    month = fields.get("month", "1")
    date = (fields.get("year", "1970"), _MONTHS.get(month, month), fields.get("day", "1"))
    try:
        seconds = timegm((*map(int, (*date, fields["hour"], fields["minute"], fields["second"])), 0, 0, 0))
    except ValueError:
        return None
    return Time(seconds=seconds + float(f"0.{fields.get('part', '0')}"), clock="")
