"""What values a variable may have: the grammar of the column ``type`` in model/variables.tsv.

======================  ================================================================================================
``number:A..B``         a whole number as C's strtoll reads it with base 0; NCCL takes the leading number
``torch-bool``          y, yes, t, true, 1 or n, no, f, false, 0 in any case (c10d's getCvarBool)
``torch-int:A..B``      the leading digits (c10d's getCvarInt, std::stoi)
``zero-one``            0 or 1 (c10's check_env)
``one``                 only "1" switches it on
``python-int:A..B``     what Python's int() takes
``threads``             whole numbers from 1, separated by commas (OpenMP)
``words:A|B``           one of the words, in any case
``exact:A|B``           one of the words, case-sensitive
``level:A|B``           likewise, or a digit: NCCL's path types
``words-list:A|B``      words separated by commas, in any case, "^" before the first
``per-collective:A|B``  likewise, or collective:words separated by semicolons
``debug-level``         OFF, INFO, DETAIL in any case
``path``                a path; "~" is not expanded
``port``, ``host-port``, ``cidr``  as the name says
``text``, ``hidden``    anything
======================  ================================================================================================
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.rules.spelling import find_meant

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.launch import Variable

TRUE_WORDS = frozenset({"y", "yes", "1", "t", "true"})
FALSE_WORDS = frozenset({"n", "no", "0", "f", "false"})
ON_WORDS = TRUE_WORDS | {"on", "enable", "enabled"}
OFF_WORDS = FALSE_WORDS | {"off", "disable", "disabled"}
UNSET_NUMBERS = frozenset({-1, -2})
"""NCCL's own values for "not set"."""
COLLECTIVES = (
    "AllGather", "AllReduce", "AlltoAll", "Broadcast", "Gather", "Reduce", "ReduceScatter", "Scatter", "SendRecv",
)  # fmt: skip
READERS = {"nccl": "NCCL", "cuda": "CUDA", "gloo": "Gloo", "torch": "torch", "launcher": "torchrun", "openmp": "OpenMP"}
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
ADDRESS_FAMILIES = {
    "ipv4": "AF_INET", "inet": "AF_INET", "4": "AF_INET", "ipv6": "AF_INET6", "inet6": "AF_INET6", "6": "AF_INET6",
}  # fmt: skip
OTHERWISE = {
    "NCCL_DEBUG": "with any other value, it prints nothing, not even warnings",
    "GLOO_DEVICE_TRANSPORT": 'it fails with "unsupported gloo device"',
    "LOGLEVEL": 'it fails with "Unknown level"',
    "CUDA_MODULE_LOADING": "with any other value, it uses its default",
    "CUDA_DEVICE_ORDER": "with any other value, it uses FASTEST_FIRST",
}
STOPPING = frozenset({"GLOO_DEVICE_TRANSPORT"})

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_WITH_UNIT = re.compile(r"\s*(\d+)\s*([KMG])(?:i?B)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFlaw:
    """Why a value is wrong."""

    what: str
    """What the reader accepts, and what it does with this value."""
    instead: str = ""
    """The value that was meant, if that is clear."""
    stops: bool = False
    """Whether the job ends at its start because of it."""
    sure: bool = True


def check_value(variable: Variable, value: str) -> ValueFlaw | None:
    """Return what is wrong with the value of a variable, or None. An empty value is wrong only for torch."""
    kind, _, rest = variable.type.partition(":")
    if value and value == variable.default:
        return None
    if not value.strip() and not kind.startswith(("torch-", "debug-")):
        return None
    return _CHECKS[kind](variable, value, rest) or (None if kind.startswith("number") else _check_ends(value))


def read_number(value: str) -> int:
    """Return the number that C's strtoll with base 0 reads from a text: the leading number, or 0 if there is none."""
    return find_number(value) or 0


def find_number(value: str) -> int | None:
    """Return the number that a text begins with, in C's notation with base 0, or None if it begins with none."""
    found = _NUMBER.match(value)
    if found is None:
        return None
    sign, digits = found.groups()
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if sign == "-" else 1)


def _reader(variable: Variable) -> str:
    return READERS.get(variable.component, "its reader")


def _check_ends(value: str) -> ValueFlaw | None:
    """Find what a shell would have removed, but a settings file or `docker --env-file` does not."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return ValueFlaw(what="the quotation marks are part of the value", instead=value[1:-1])
    text, comment, _ = value.partition(" #")
    if comment:
        return ValueFlaw(what="the comment is part of the value", instead=text.strip())
    if value != value.strip():
        return ValueFlaw(what="the trailing whitespace is part of the value", instead=value.strip())
    return None


def _check_number(variable: Variable, value: str, limits: str) -> ValueFlaw | None:
    found = _NUMBER.match(value)
    number = read_number(value)
    if found is None or not _is_end(value[found.end() :]):
        return ValueFlaw(
            what=f"{_reader(variable)} takes an integer, and reads this as {_reading(variable, found, number)}",
            instead=_meant_number(value),
        )
    if number in UNSET_NUMBERS and variable.component == "nccl":
        return None
    return _check_range(variable, number, limits)


def _is_end(rest: str) -> bool:
    """Whether only a comment, which does no harm, follows a number."""
    return rest.strip()[:1] in {"", "#"}


def _reading(variable: Variable, found: re.Match[str] | None, number: int) -> str:
    """Return how the reader takes the value: NCCL 2.31.2 logs "set by environment to 0", 2.32.3 "using default"."""
    return "0 (since 2.32 as not set)" if found is None and variable.component == "nccl" else str(number)


def _meant_number(value: str) -> str:
    word = value.strip().strip("\"'").lower()
    if word in ON_WORDS | OFF_WORDS:
        return "1" if word in ON_WORDS else "0"
    unit = _WITH_UNIT.fullmatch(value)
    return str(int(unit[1]) * UNITS[unit[2].upper()]) if unit else ""


def _check_range(variable: Variable, number: int, limits: str) -> ValueFlaw | None:
    low, _, high = limits.partition("..")
    if (not low or number >= int(low)) and (not high or number <= int(high)):
        return None
    span = f"{low} to {high}" if high else f"{low} or more"
    span = "0 or 1" if limits == "0..1" else span
    return ValueFlaw(what=f"{_reader(variable)} takes {span}", sure=False)


def _check_torch_bool(variable: Variable, value: str, _: str) -> ValueFlaw | None:
    word = value.lower()
    if word in TRUE_WORDS | FALSE_WORDS:
        return None
    meant = "1" if word in ON_WORDS else "0" if word in OFF_WORDS else ""
    return _refused(variable, "takes 1 or 0, true or false, yes or no", meant)


def _check_torch_int(variable: Variable, value: str, limits: str) -> ValueFlaw | None:
    found = re.match(r"\s*[+-]?\d+", value)
    if found is None:
        return _refused(variable, "takes an integer", _meant_number(value))
    return _check_range(variable, int(found[0]), limits)


def _refused(variable: Variable, takes: str, meant: str) -> ValueFlaw:
    text = f'torch {takes}, and fails with "Invalid value for environment variable: {variable.name}"'
    return ValueFlaw(what=text, instead=meant, stops=True)


def _check_zero_one(_variable: Variable, value: str, _: str) -> ValueFlaw | None:
    if value in {"0", "1"}:
        return None
    return ValueFlaw(what="torch takes 0 or 1 here, and ignores anything else", instead=_meant_number(value))


def _check_one(variable: Variable, value: str, _: str) -> ValueFlaw | None:
    if value == "1" or value.strip().lower() not in ON_WORDS:
        return None
    return ValueFlaw(what=f"{_reader(variable)} takes only 1 as on, and reads this as off", instead="1")


def _check_python_int(variable: Variable, value: str, limits: str) -> ValueFlaw | None:
    try:
        number = int(value)
    except ValueError:
        what = f"{_reader(variable)} takes an integer, and fails with a ValueError"
        return ValueFlaw(what=what, instead=_meant_number(value), stops=True)
    return _check_range(variable, number, limits)


def _check_threads(variable: Variable, value: str, _: str) -> ValueFlaw | None:
    parts = [part.strip() for part in value.split(",")]
    if all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        return None
    return ValueFlaw(what=f"{_reader(variable)} takes a number of at least 1; otherwise it uses all CPUs")


def _check_words(variable: Variable, value: str, words: str) -> ValueFlaw | None:
    same = value.strip().upper() in words.upper().split("|")
    return None if same else _no_such_word(variable, value, words.split("|"))


def _check_exact(variable: Variable, value: str, words: str) -> ValueFlaw | None:
    return None if value in words.split("|") else _no_such_word(variable, value, words.split("|"))


def _check_level(variable: Variable, value: str, words: str) -> ValueFlaw | None:
    return None if value[:1].isdecimal() else _check_exact(variable, value, words)


def _no_such_word(variable: Variable, value: str, known: list[str]) -> ValueFlaw:
    reader = _reader(variable)
    otherwise = OTHERWISE.get(variable.name, "it ignores any other value")
    return ValueFlaw(
        what=f"{reader} takes {', '.join(known[:-1])} or {known[-1]}; {otherwise}",
        instead=_meant_word(value, known),
        stops=variable.name in STOPPING,
    )


def _meant_word(value: str, known: list[str]) -> str:
    word = value.strip().strip("\"'")
    if ADDRESS_FAMILIES.get(word.lower()) in known:
        return ADDRESS_FAMILIES[word.lower()]
    same = [other for other in known if other.lower() == word.lower()]
    return same[0] if same else (find_meant(word.upper(), known) or "")


def _check_elements(variable: Variable, value: str, words: str) -> ValueFlaw | None:
    known = words.split("|")
    plain = {_plain(word) for word in known}
    wrong = [word for word in value.strip().removeprefix("^").split(",") if word and _plain(word) not in plain]
    if not wrong:
        return None
    return ValueFlaw(what=f"{_reader(variable)} does not know {wrong[0]}: it takes {', '.join(known)}", sure=False)


def _plain(word: str) -> str:
    """Return a word in one spelling: NCCL has written both NVLSTree and NVLS_TREE."""
    return word.strip().upper().replace("_", "")


def _check_per_collective(variable: Variable, value: str, words: str) -> ValueFlaw | None:
    for part in value.strip().split(";"):
        collective, colon, elements = part.rpartition(":")
        if colon and _plain(collective) not in {_plain(name) for name in COLLECTIVES}:
            return ValueFlaw(what=f"NCCL has no collective {collective.strip()}", sure=False)
        wrong = _check_elements(variable, elements, words)
        if wrong is not None:
            return wrong
    return None


def _check_debug_level(_variable: Variable, value: str, _: str) -> ValueFlaw | None:
    known = ["OFF", "INFO", "DETAIL"]
    if value.upper() in known:
        return None
    text = 'torch fails with "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL" when it is imported'
    return ValueFlaw(what=text, instead=_meant_word(value, known), stops=True)


def _check_path(_variable: Variable, value: str, _: str) -> ValueFlaw | None:
    if not value.startswith("~"):
        return None
    return ValueFlaw(what='"~" is not expanded: this is a folder named "~"')


def _check_port(variable: Variable, value: str, _: str) -> ValueFlaw | None:
    text = value.strip()
    if text.isascii() and text.isdecimal() and 0 < int(text) < 2**16:
        return None
    return ValueFlaw(what=f"{_reader(variable)} takes a port from 1 to 65535")


def _check_host_port(variable: Variable, value: str, _: str) -> ValueFlaw | None:
    _, colon, port = value.rpartition(":")
    if colon:
        return _check_port(variable, port, "")
    return ValueFlaw(what=f"{_reader(variable)} takes host:port, or [address]:port for IPv6")


def _check_cidr(variable: Variable, value: str, _: str) -> ValueFlaw | None:
    try:
        ipaddress.ip_network(value.strip(), strict=False)
    except ValueError:
        return ValueFlaw(what=f"{_reader(variable)} takes a range of addresses, such as 10.0.0.0/8")
    return None


_CHECKS: dict[str, Callable[[Variable, str, str], ValueFlaw | None]] = {
    "number": _check_number,
    "torch-bool": _check_torch_bool,
    "torch-int": _check_torch_int,
    "zero-one": _check_zero_one,
    "one": _check_one,
    "python-int": _check_python_int,
    "threads": _check_threads,
    "words": _check_words,
    "exact": _check_exact,
    "level": _check_level,
    "words-list": _check_elements,
    "per-collective": _check_per_collective,
    "debug-level": _check_debug_level,
    "path": _check_path,
    "port": _check_port,
    "host-port": _check_host_port,
    "cidr": _check_cidr,
    "text": lambda *_: None,
    "hidden": lambda *_: None,
}
TYPES = frozenset(_CHECKS)
"""The words that a type may begin with."""
