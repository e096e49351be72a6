"""What values a variable may have, which ones do harm, and what can be wrong with one variable, wherever it is set.

The column ``type`` in model/variables.tsv:

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

The column ``danger`` holds a condition: a word, and for some words a colon and the text to compare with: ``is:1``,
``nonzero``, ``zero`` (numbers as NCCL reads them), ``true``, ``false`` (as torch reads them), ``on`` (anything but
off), ``set`` (anything), ``words:TRACE``, ``level:LOC``, ``debug-level:DETAIL``, ``forced``, ``fixed-path``,
``stray``. "info " before the condition means that it is not worth a warning.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import NEWEST, OLDEST, find_variable, is_plugin_name, looks_known, read_variables
from ddpdoctor.model.node import release
from ddpdoctor.model.reading import Unread, Why, known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpdoctor.model.launch import Variable
    from ddpdoctor.model.node import Node, NodeProcess


MOST_EDITS = 2
"""Our choice: most letters added, left out or changed; two swapped letters count as two."""
SHORTEST_STEM = 8
"""Our choice: a shorter name, such as NCCL_IB, is the beginning of too many names to mean one of them."""


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelled name was meant to be, or None.

    It is the nearest name within two edits, ignoring case. If there is none, it is a name that begins with this one, or
    that this one begins with.
    """
    names = sorted(known)
    near = [(_distance(name, other), other) for other in names if abs(len(name) - len(other)) <= MOST_EDITS]
    near += [(_distance(name.upper(), other), other) for other in names if name.upper() != name]
    edits, best = min(near, default=(MOST_EDITS + 1, ""))
    return best if edits <= MOST_EDITS else _by_stem(name.upper(), names)


def _by_stem(name: str, names: list[str]) -> str | None:
    """Return the longest known beginning of a name, or the shortest known name that begins with it."""
    shorter = [other for other in names if name.startswith(other)]
    longer = [other for other in names if other.startswith(name) and len(name) >= SHORTEST_STEM]
    if shorter:
        return max(shorter, key=len)
    return min(longer, key=len, default=None)


def _distance(one: str, other: str) -> int:
    """Return the edit distance (Levenshtein); if it is above the limit, return any number above the limit."""
    if abs(len(one) - len(other)) > MOST_EDITS:
        return MOST_EDITS + 1
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
        if min(row) > MOST_EDITS:
            return MOST_EDITS + 1
    return row[-1]


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
        # NCCL 2.31.2 logs "set by environment to 0", 2.32.3 "using default".
        reading = "0 (since 2.32 as not set)" if found is None and variable.component == "nccl" else str(number)
        return ValueFlaw(
            what=f"{_reader(variable)} takes an integer, and reads this as {reading}", instead=_meant_number(value)
        )
    if number in UNSET_NUMBERS and variable.component == "nccl":
        return None
    return _check_range(variable, number, limits)


def _is_end(rest: str) -> bool:
    """Whether only a comment, which does no harm, follows a number."""
    return rest.strip()[:1] in {"", "#"}


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


Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableContext:
    """What else matters: the installed versions, the other variables, the machine."""

    versions: dict[str, Version]
    """Versions of nccl and torch, if known."""
    variables: dict[str, str]
    ranks_here: int
    under_wrap: bool
    active_port: bool
    """An RDMA port is ACTIVE."""
    no_rdma: bool
    """There is no RDMA device."""


def does_harm(condition: str, value: str, context: VariableContext) -> bool:
    """Say whether a value meets a condition."""
    word, _, rest = condition.partition(":")
    return CONDITIONS[word](value, rest, context)


def _is_forced(value: str, _rest: str, _context: VariableContext) -> bool:
    """Whether a list names what to use, and not (with "^") what to exclude."""
    elements = [part.rpartition(":")[2].strip() for part in value.split(";")]
    return any(element and not element.startswith("^") for element in elements)


def _is_fixed_path(value: str, _rest: str, context: VariableContext) -> bool:
    own = "%p" in value or value.startswith(("/dev/", "/proc/")) or not value.strip()
    return not own and context.ranks_here > 1


def _is_stray(value: str, _rest: str, context: VariableContext) -> bool:
    """Whether TORCHELASTIC_USE_AGENT_STORE is set without torchrun, which also sets a run id."""
    return value == "True" and "TORCHELASTIC_RUN_ID" not in context.variables


CONDITIONS: dict[str, Callable[[str, str, VariableContext], bool]] = {
    "is": lambda value, rest, _: read_number(value) == int(rest),
    "nonzero": lambda value, _rest, _: read_number(value) != 0,
    "zero": lambda value, _rest, _: value.strip()[:1] == "0" and read_number(value) == 0,
    "true": lambda value, _rest, _: value.lower() in TRUE_WORDS,
    "false": lambda value, _rest, _: value.lower() in FALSE_WORDS,
    "on": lambda value, _rest, _: value.strip().lower() not in OFF_WORDS | {""},
    "set": lambda value, _rest, _: bool(value.strip()),
    "words": lambda value, rest, _: value.strip().upper() == rest,
    "level": lambda value, rest, _: value in {rest, "0"},
    "debug-level": lambda value, rest, _: value.upper() == rest,
    "forced": _is_forced,
    "fixed-path": _is_fixed_path,
    "stray": _is_stray,
}
"""By the word that a condition begins with: whether a value, with the words after that one, meets it."""


OWNERS = {"nccl": "NCCL", "torch": "torch", "gloo": "Gloo", "launcher": "torchrun"}
GONE = frozenset({"removed", "bogus"})
WRAP_SETS = frozenset({"TORCH_DISTRIBUTED_DEBUG"})
"""What `ddpdoctor wrap` sets for its ranks; there it is no danger."""
LOGGING_LEVELS = frozenset({"WARN", "INFO", "ABORT", "TRACE"})
"""With these levels of NCCL_DEBUG, NCCL opens NCCL_DEBUG_FILE."""
LONGEST_SHOWN = 60
COMMON_NCCL = (2, 30, 7)
"""Our choice if the version is not known: about the version that comes with the newest torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """What is wrong with a variable, and what to set instead."""

    name: str
    summary: str
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.HIGH
    evidence: tuple[str, ...] = ()
    set_name: str = ""
    """The variable to set instead; empty if this one should just be removed."""
    set_value: str | None = None
    """The value to set; None: this variable's own value."""


def read_context(node: Node, process: NodeProcess) -> VariableContext:
    """Return the context for the variables of a process."""
    rdma = node.rdma
    ports = [] if isinstance(rdma, Unread) else [port for device in rdma.devices for port in device.ports]
    absent = rdma.why is Why.ABSENT if isinstance(rdma, Unread) else not rdma.devices
    local = process.number("LOCAL_WORLD_SIZE") or 1
    software, torch = known(node.software), known(node.torch)
    texts = {
        "nccl": (torch.nccl if torch else None) or (software.nccl_wheel if software else None),
        "torch": software.torch_version if software else None,
    }
    return VariableContext(
        versions={name: release(text) for name, text in texts.items() if text},
        variables=process.variables,
        ranks_here=max(local, len(node.processes)),
        under_wrap=process.under_wrap,
        active_port=any(port.state == "ACTIVE" for port in ports),
        no_rdma=absent,
    )


def show(value: str) -> str:
    """Return a value for display: in quotation marks if it could be misread, and cut if it is long."""
    short = value if len(value) <= LONGEST_SHOWN else value[:LONGEST_SHOWN] + "…"
    return short if short.strip() == short and short.isprintable() else repr(short)


# Unknown names


def find_unknown(name: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if a name looks like a known variable but is not one."""
    if find_variable(name) is not None or not looks_known(name) or is_plugin_name(name.upper()):
        return None
    meant = find_meant(name, _names(context))
    owner = "torch" if name.upper().startswith("TORCH") else "nccl"
    newest, installed = release(NEWEST[owner]), context.versions.get(owner, ())
    newer: tuple[str, ...] = ()
    if installed[: len(newest)] > newest:
        newer = (f"{OWNERS[owner]} {_text(installed)} is installed; variables are known up to {NEWEST[owner]}",)
    if meant is None:
        return _stranger(name, newer)
    why = ", because names are case-sensitive" if name.upper() == meant else ""
    return Flaw(
        name=name,
        summary=f"nothing reads {name}{why}; did you mean {meant}?",
        severity=Severity.INFO if newer else Severity.WARNING,
        confidence=Confidence.LOW if newer else Confidence.HIGH,
        evidence=newer,
        set_name=meant,
    )


def _names(context: VariableContext) -> Iterator[str]:
    """Yield the names that somebody can mean: not those that are gone, and not those that are still to come."""
    installed = context.versions.get("nccl", COMMON_NCCL)
    for variable in read_variables().values():
        to_come = variable.component == "nccl" and release(variable.since) > installed
        if variable.kind not in GONE | {"build"} and not to_come:
            yield variable.name


def _stranger(name: str, newer: tuple[str, ...]) -> Flaw:
    return Flaw(
        name=name,
        summary=f"{name} is not a known variable, and no known name is similar",
        severity=Severity.INFO,
        confidence=Confidence.MEDIUM,
        evidence=newer
        or (f"known variables: NCCL up to {NEWEST['nccl']}, torch up to {NEWEST['torch']}; a plugin may read others",),
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def find_too_new(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if the installed NCCL does not know a variable yet."""
    installed = context.versions.get("nccl", ())
    if variable.component != "nccl" or not variable.since or not installed or variable.kind in GONE:
        return None
    if installed >= release(variable.since):
        return None
    return Flaw(
        name=variable.name,
        summary=f"{variable.name}={show(value)} has no effect: NCCL reads it since {variable.since}",
        severity=Severity.INFO,
        evidence=(f"NCCL {_text(installed)} is installed",),
    )


# Wrong values


def find_wrong_value(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if the variable's reader does not take a value; never suggest a harmful value instead."""
    wrong = None if variable.kind in GONE else check_value(variable, value)
    if wrong is None:
        return None
    wanted = bool(wrong.instead) and find_danger(variable, wrong.instead, context) is None
    return Flaw(
        name=variable.name,
        summary=f"{variable.name}={show(value)}: {wrong.what}",
        severity=Severity.ERROR if wrong.stops else Severity.WARNING,
        confidence=Confidence.HIGH if wrong.sure else Confidence.MEDIUM,
        set_name=variable.name if wanted else "",
        set_value=wrong.instead if wanted else None,
    )


# Obsolete names


def find_deprecated(variable: Variable, value: str, context: VariableContext) -> Flaw | None:  # noqa: ARG001 - all four functions are called alike
    """Return a flaw if a variable is obsolete in the installed version."""
    if variable.kind == "deprecated":
        return _old_name(variable, context)
    if variable.kind not in GONE:
        return None
    owner, installed = OWNERS[variable.component], context.versions.get(variable.component, ())
    until = release(variable.until)
    if installed and _reads(installed, variable):
        return None
    reasons = [f"{owner} {variable.until} was the last version that read it" if until else "", variable.note]
    reason = "; ".join(filter(None, reasons))
    certain = bool(installed) or not until or until < release(OLDEST[variable.component])
    # It is not put into the command, because its values are different.
    return Flaw(
        name=variable.name,
        summary=f"{variable.name} has no effect: {reason}" if certain else f"{variable.name} is obsolete: {reason}",
        severity=Severity.WARNING if certain else Severity.INFO,
        evidence=((f"{variable.replaced_by} replaces it, with different values",) if variable.replaced_by else ())
        + _installed(variable, context),
    )


def _old_name(variable: Variable, context: VariableContext) -> Flaw | None:
    installed = context.versions.get(variable.component, ())
    successor = find_variable(variable.replaced_by)
    first = release(successor.since) if successor else ()
    if installed and (installed[: len(first)] < first or _reads(installed, variable)):
        return None
    if successor is None:
        return Flaw(
            name=variable.name,
            summary=f"{variable.name} is no longer needed: {variable.note}",
            severity=Severity.INFO,
            evidence=_installed(variable, context),
        )
    return Flaw(
        name=variable.name,
        summary=f"{variable.name} is an old name: use {successor.name}",
        evidence=_installed(variable, context),
        set_name=successor.name,
    )


def _reads(installed: Version, variable: Variable) -> bool:
    """Whether a version is no later than the last one that used a variable."""
    until = release(variable.until)
    return bool(until) and installed[: len(until)] <= until


def _installed(variable: Variable, context: VariableContext) -> tuple[str, ...]:
    installed = context.versions.get(variable.component)
    return (f"{OWNERS[variable.component]} {_text(installed)} is installed",) if installed else ()


# Dangerous leftovers


def find_danger(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if a variable has a value that does harm."""
    word, _, condition = variable.danger.rpartition(" ")
    if not condition or not does_harm(condition, value, context):
        return None
    if context.under_wrap and variable.name in WRAP_SETS:
        return None
    severity = Severity.INFO if word == "info" else Severity.WARNING
    if variable.name == "NCCL_DEBUG_FILE" and context.variables.get("NCCL_DEBUG", "").upper() not in LOGGING_LEVELS:
        severity = Severity.INFO
    if variable.name == "NCCL_IB_DISABLE" and context.no_rdma:
        return Flaw(
            name="NCCL_IB_DISABLE",
            summary=f"NCCL_IB_DISABLE={show(value)} is not needed here, because there is no InfiniBand or RoCE device; "
            "with one, it would make NCCL use TCP sockets",
            severity=Severity.INFO,
        )
    return Flaw(name=variable.name, summary=f"{variable.name}={show(value)}: {variable.note}", severity=severity)
