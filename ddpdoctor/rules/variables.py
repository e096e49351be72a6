"""The values that a variable may have, which are harmful, and what can be wrong with one, wherever it is set.

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
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import NEWEST, OLDEST, find_variable, looks_known, read_variables
from ddpdoctor.model.node import release
from ddpdoctor.model.reading import Unread, Why, known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.launch import Variable
    from ddpdoctor.model.node import Node, NodeProcess


MOST_EDITS = 2  # our choice: most letters added, left out or changed; two swapped letters count as two
SHORTEST_STEM = 8  # our choice: a shorter name, such as NCCL_IB, is the beginning of too many names to mean one of them


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelled name was meant to be, or None.

    It is the nearest name within two edits, ignoring case. If there is none, it is the longest name that this one
    begins with, or the shortest name that begins with this one.
    """
    names, upper = sorted(known), name.upper()
    near = [(_distance(name, other), other) for other in names if abs(len(name) - len(other)) <= MOST_EDITS]
    near += [(_distance(upper, other), other) for other in names if upper != name]
    edits, best = min(near, default=(MOST_EDITS + 1, ""))
    if edits <= MOST_EDITS:
        return best
    shorter = [other for other in names if upper.startswith(other)]
    longer = [other for other in names if other.startswith(upper) and len(upper) >= SHORTEST_STEM]
    return max(shorter, key=len) if shorter else min(longer, key=len, default=None)


def _distance(name: str, other: str) -> int:
    """Return the edit distance (Levenshtein); if it is above the limit, return any number above the limit."""
    if abs(len(name) - len(other)) > MOST_EDITS:
        return MOST_EDITS + 1
    row = list(range(len(other) + 1))
    for i, left in enumerate(name, 1):
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
UNSET_NUMBERS = frozenset({-1, -2})  # NCCL's own values for "not set"
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
DEBUG_LEVELS = ["OFF", "INFO", "DETAIL"]
_INVALID = 'and fails with "Invalid value for environment variable: {name}"'

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_WITH_UNIT = re.compile(r"\s*(\d+)\s*([KMG])(?:i?B)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFlaw:
    """Why a value is wrong."""

    what: str  # what the reader accepts, and what it does with this value
    instead: str = ""  # the value that was meant, if that is clear
    stops: bool = False  # whether the job ends at its start because of it
    sure: bool = True


def find_number(value: str) -> int | None:
    """Return the number that C's strtoll with base 0 reads from a text: the leading one, or None if there is none."""
    found = _NUMBER.match(value)
    if found is None:
        return None
    sign, digits = found.groups()
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if sign == "-" else 1)


def _switch(word: str) -> str:
    """Return "1" or "0" for a word that means on or off, else an empty text."""
    return "1" if word in ON_WORDS else "0" if word in OFF_WORDS else ""


def _meant_number(value: str) -> str:
    unit = _WITH_UNIT.fullmatch(value)
    amount = str(int(unit[1]) * UNITS[unit[2].upper()]) if unit else ""
    return _switch(value.strip().strip("\"'").lower()) or amount


def _meant_word(value: str, known: list[str]) -> str:
    word = value.strip().strip("\"'")
    if ADDRESS_FAMILIES.get(word.lower()) in known:
        return ADDRESS_FAMILIES[word.lower()]
    same = [other for other in known if other.lower() == word.lower()]
    return same[0] if same else (find_meant(word.upper(), known) or "")


class _Kind(NamedTuple):
    # By the value and the words of the type. It may also raise ValueError if it does not take the value.
    takes: Callable[[str, list[str]], object]
    what: str
    meant: Callable[[str, list[str]], str] = lambda *_: ""  # the value that was meant, if that is clear
    stops: bool = False


_NO_SUCH_WORD = "{reader} takes {words}; {otherwise}"
_KINDS = {
    "torch-bool": _Kind(
        lambda value, _: value.lower() in TRUE_WORDS | FALSE_WORDS,
        f"torch takes 1 or 0, true or false, yes or no, {_INVALID}",
        lambda value, _: _switch(value.lower()),
        stops=True,
    ),
    "zero-one": _Kind(
        lambda value, _: value in {"0", "1"},
        "torch takes 0 or 1 here, and ignores anything else",
        lambda value, _: _meant_number(value),
    ),
    "one": _Kind(
        lambda value, _: value == "1" or value.strip().lower() not in ON_WORDS,
        "{reader} takes only 1 as on, and reads this as off",
        lambda *_: "1",
    ),
    "threads": _Kind(
        lambda value, _: all(
            text.isascii() and text.isdecimal() and int(text) > 0 for text in map(str.strip, value.split(","))
        ),
        "{reader} takes a number of at least 1; otherwise it uses all CPUs",
    ),
    "words": _Kind(lambda value, words: value.strip().upper() in map(str.upper, words), _NO_SUCH_WORD, _meant_word),
    "exact": _Kind(lambda value, words: value in words, _NO_SUCH_WORD, _meant_word),
    "level": _Kind(lambda value, words: value[:1].isdecimal() or value in words, _NO_SUCH_WORD, _meant_word),
    "debug-level": _Kind(
        lambda value, _: value.upper() in DEBUG_LEVELS,
        'torch fails with "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL" when it is imported',
        lambda value, _: _meant_word(value, DEBUG_LEVELS),
        stops=True,
    ),
    "path": _Kind(lambda value, _: not value.startswith("~"), '"~" is not expanded: this is a folder named "~"'),
    "port": _Kind(
        lambda value, _: value.strip().isascii() and value.strip().isdecimal() and 0 < int(value) < 2**16,
        "{reader} takes a port from 1 to 65535",
    ),
    "host-port": _Kind(lambda *_: False, "{reader} takes host:port, or [address]:port for IPv6"),
    "cidr": _Kind(
        lambda value, _: ipaddress.ip_network(value.strip(), strict=False),
        "{reader} takes a range of addresses, such as 10.0.0.0/8",
    ),
}
_NUMBERS = frozenset({"number", "torch-int", "python-int"})
_LISTS = frozenset({"words-list", "per-collective"})
TYPES = frozenset({*_KINDS, *_NUMBERS, *_LISTS, "text", "hidden"})  # the words that a type may begin with


def check_value(variable: Variable, value: str) -> ValueFlaw | None:
    """Return what is wrong with the value of a variable, or None. An empty value is wrong only for torch."""
    kind, _, rest = variable.type.partition(":")
    if value and value == variable.default:
        return None
    if not value.strip() and not kind.startswith(("torch-", "debug-")):
        return None
    reader, words, flaw = READERS.get(variable.component, "its reader"), rest.split("|"), None
    if kind in _NUMBERS:
        flaw = _check_number(variable, reader, value)
    elif kind in _LISTS:
        flaw = _check_list(reader, value, words, by_collective=kind == "per-collective")
    elif kind in _KINDS:
        _, colon, port = value.rpartition(":")
        row, text = (_KINDS["port"], port) if kind == "host-port" and colon else (_KINDS[kind], value)
        try:
            takes = row.takes(text, words)
        except ValueError:
            takes = False
        if not takes:
            said = row.what.format(
                reader=reader, name=variable.name, words=f"{', '.join(words[:-1])} or {words[-1]}",
                otherwise=OTHERWISE.get(variable.name, "it ignores any other value"),
            )  # fmt: skip
            stops = row.stops or variable.name in STOPPING
            return ValueFlaw(what=said, instead=row.meant(text, words), stops=stops)
    if flaw is not None or kind == "number":
        return flaw
    # A shell would have removed these, but a settings file or `docker --env-file` does not.
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return ValueFlaw(what="the quotation marks are part of the value", instead=value[1:-1])
    text, comment, _ = value.partition(" #")
    if comment:
        return ValueFlaw(what="the comment is part of the value", instead=text.strip())
    if value != value.strip():
        return ValueFlaw(what="the trailing whitespace is part of the value", instead=value.strip())
    return None


def _check_number(variable: Variable, reader: str, value: str) -> ValueFlaw | None:
    kind, _, limits = variable.type.partition(":")
    if kind == "torch-int":
        found = re.match(r"\s*[+-]?\d+", value)
        if found is None:
            what = f"torch takes an integer, {_INVALID.format(name=variable.name)}"
            return ValueFlaw(what=what, instead=_meant_number(value), stops=True)
        number = int(found[0])
    elif kind == "python-int":
        try:
            number = int(value)
        except ValueError:
            what = f"{reader} takes an integer, and fails with a ValueError"
            return ValueFlaw(what=what, instead=_meant_number(value), stops=True)
    else:
        found, number = _NUMBER.match(value), find_number(value) or 0
        if found is None or value[found.end() :].strip()[:1] not in {"", "#"}:  # only a comment does no harm
            # NCCL 2.31.2 logs "set by environment to 0", 2.32.3 "using default".
            reading = "0 (since 2.32 as not set)" if found is None and variable.component == "nccl" else str(number)
            what = f"{reader} takes an integer, and reads this as {reading}"
            return ValueFlaw(what=what, instead=_meant_number(value))
        if number in UNSET_NUMBERS and variable.component == "nccl":
            return None
    low, _, high = limits.partition("..")
    if (not low or number >= int(low)) and (not high or number <= int(high)):
        return None
    span = "0 or 1" if limits == "0..1" else f"{low} to {high}" if high else f"{low} or more"
    return ValueFlaw(what=f"{reader} takes {span}", sure=False)


def _check_list(reader: str, value: str, known: list[str], *, by_collective: bool) -> ValueFlaw | None:
    plain = {_folded(word) for word in known}
    for part in value.strip().split(";") if by_collective else [value]:
        collective, colon, elements = part.rpartition(":") if by_collective else ("", "", part)
        if colon and _folded(collective) not in {_folded(name) for name in COLLECTIVES}:
            return ValueFlaw(what=f"NCCL has no collective {collective.strip()}", sure=False)
        wrong = [word for word in elements.strip().removeprefix("^").split(",") if word and _folded(word) not in plain]
        if wrong:
            return ValueFlaw(what=f"{reader} does not know {wrong[0]}: it takes {', '.join(known)}", sure=False)
    return None


def _folded(word: str) -> str:
    """Return a word in one spelling: NCCL has written both NVLSTree and NVLS_TREE."""
    return word.strip().upper().replace("_", "")


Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableContext:
    """What else matters: the installed versions, the other variables, the machine."""

    versions: dict[str, Version]  # versions of nccl and torch, if known
    variables: dict[str, str]
    ranks_here: int
    under_wrap: bool
    active_port: bool  # an RDMA port is ACTIVE
    no_rdma: bool  # no RDMA device found


# By the word that a condition begins with: whether a value, with the words after that one, meets it.
CONDITIONS: dict[str, Callable[[str, str, VariableContext], bool]] = {
    "is": lambda value, rest, _: (find_number(value) or 0) == int(rest),
    "nonzero": lambda value, _rest, _: bool(find_number(value)),
    "zero": lambda value, _rest, _: value.strip()[:1] == "0" and not find_number(value),
    "true": lambda value, _rest, _: value.lower() in TRUE_WORDS,
    "false": lambda value, _rest, _: value.lower() in FALSE_WORDS,
    "on": lambda value, _rest, _: value.strip().lower() not in OFF_WORDS | {""},
    "set": lambda value, _rest, _: bool(value.strip()),
    "words": lambda value, rest, _: value.strip().upper() == rest,
    "level": lambda value, rest, _: value in {rest, "0"},
    "debug-level": lambda value, rest, _: value.upper() == rest,
    # A list names what to use, and not (with "^") what to exclude.
    "forced": lambda value, _rest, _: any(
        (element := part.rpartition(":")[2].strip()) and not element.startswith("^") for part in value.split(";")
    ),
    "fixed-path": lambda value, _rest, context: (
        bool(value.strip())
        and "%p" not in value
        and not value.startswith(("/dev/", "/proc/"))
        and context.ranks_here > 1
    ),
    # TORCHELASTIC_USE_AGENT_STORE is set without torchrun, which also sets a run id.
    "stray": lambda value, _rest, context: value == "True" and "TORCHELASTIC_RUN_ID" not in context.variables,
}


OWNERS = {"nccl": "NCCL", "torch": "torch", "gloo": "Gloo", "launcher": "torchrun"}
GONE = frozenset({"removed", "bogus"})
WRAP_SETS = frozenset({"TORCH_DISTRIBUTED_DEBUG"})  # what `ddpdoctor wrap` sets for its ranks; there it is no danger
# With these levels of NCCL_DEBUG, NCCL opens NCCL_DEBUG_FILE.
LOGGING_LEVELS = frozenset({"WARN", "INFO", "ABORT", "TRACE"})
LONGEST_SHOWN = 60
COMMON_NCCL = (2, 30, 7)  # our choice if the version is not known: about the version that comes with the newest torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """What is wrong with a variable, and what to set instead."""

    name: str
    summary: str
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.HIGH
    evidence: tuple[str, ...] = ()
    set_name: str = ""  # the variable to set instead; empty if this one should just be removed
    set_value: str | None = None  # the value to set; None: this variable's own value


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


def find_unknown(name: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if a name looks like a known variable but is not one."""
    if find_variable(name) is not None or not looks_known(name):
        return None
    nccl = context.versions.get("nccl", COMMON_NCCL)
    # Nobody means a variable that is gone, or one that is still to come.
    meant = find_meant(
        name,
        (
            variable.name
            for variable in read_variables().values()
            if variable.kind not in GONE | {"build"}
            and not (variable.component == "nccl" and release(variable.since) > nccl)
        ),
    )
    owner = "torch" if name.upper().startswith("TORCH") else "nccl"
    newest, installed = release(NEWEST[owner]), context.versions.get(owner, ())
    newer: tuple[str, ...] = ()
    if installed[: len(newest)] > newest:
        newer = (f"{OWNERS[owner]} {_version_text(installed)} is installed; variables are known up to {NEWEST[owner]}",)
    if meant is None:
        known = f"known variables: NCCL up to {NEWEST['nccl']}, torch up to {NEWEST['torch']}; a plugin may read others"
        summary = f"{name} is not a known variable, and no known name is similar"
        evidence = newer or (known,)
        return Flaw(name=name, summary=summary, severity=Severity.INFO, confidence=Confidence.MEDIUM, evidence=evidence)
    why = ", because names are case-sensitive" if name.upper() == meant else ""
    return Flaw(
        name=name,
        summary=f"nothing reads {name}{why}; did you mean {meant}?",
        severity=Severity.INFO if newer else Severity.WARNING,
        confidence=Confidence.LOW if newer else Confidence.HIGH,
        evidence=newer,
        set_name=meant,
    )


def _version_text(version: Version) -> str:
    return ".".join(map(str, version))


def find_too_new(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if the installed NCCL does not know a variable yet."""
    installed = context.versions.get("nccl", ())
    if variable.component != "nccl" or not variable.since or not installed or variable.kind in GONE:
        return None
    if installed >= release(variable.since):
        return None
    summary = f"{variable.name}={show(value)} has no effect: it needs NCCL {variable.since}"
    evidence = (f"NCCL {_version_text(installed)} is installed",)
    return Flaw(name=variable.name, summary=summary, severity=Severity.INFO, evidence=evidence)


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


def find_deprecated(variable: Variable, value: str, context: VariableContext) -> Flaw | None:  # noqa: ARG001 - all four functions are called alike
    """Return a flaw if a variable is obsolete in the installed version."""
    if variable.kind != "deprecated" and variable.kind not in GONE:
        return None
    installed, until = context.versions.get(variable.component, ()), release(variable.until)
    if installed and until and installed[: len(until)] <= until:  # the last version that used it, or an earlier one
        return None
    owner = OWNERS.get(variable.component, "")
    having = (f"{owner} {_version_text(installed)} is installed",) if installed else ()
    if variable.kind == "deprecated":
        successor = find_variable(variable.replaced_by)
        first = release(successor.since) if successor else ()
        if installed and installed[: len(first)] < first:
            return None
        if successor is None:
            summary = f"{variable.name} is no longer needed: {variable.note}"
            return Flaw(name=variable.name, summary=summary, severity=Severity.INFO, evidence=having)
        summary = f"{variable.name} is an old name: use {successor.name}"
        return Flaw(name=variable.name, summary=summary, evidence=having, set_name=successor.name)
    reasons = [f"{owner} {variable.until} was the last version that read it" if until else "", variable.note]
    reason = "; ".join(filter(None, reasons))
    certain = bool(installed) or not until or until < release(OLDEST[variable.component])
    # It is not put into the command, because its values are different.
    instead = (f"{variable.replaced_by} replaces it, with different values",) if variable.replaced_by else ()
    summary = f"{variable.name} {'has no effect' if certain else 'is obsolete'}: {reason}"
    severity = Severity.WARNING if certain else Severity.INFO
    return Flaw(name=variable.name, summary=summary, severity=severity, evidence=instead + having)


def find_danger(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if a variable has a harmful value."""
    level, _, condition = variable.danger.rpartition(" ")
    word, _, rest = condition.partition(":")
    if not word or not CONDITIONS[word](value, rest, context):
        return None
    if context.under_wrap and variable.name in WRAP_SETS:
        return None
    severity = Severity.INFO if level == "info" else Severity.WARNING
    if variable.name == "NCCL_DEBUG_FILE" and context.variables.get("NCCL_DEBUG", "").upper() not in LOGGING_LEVELS:
        severity = Severity.INFO
    if variable.name == "NCCL_IB_DISABLE" and context.no_rdma:
        why = "this machine has no InfiniBand or RoCE device; with one, it would make NCCL use TCP sockets"
        summary = f"NCCL_IB_DISABLE={show(value)} is not needed here, because {why}"
        return Flaw(name="NCCL_IB_DISABLE", summary=summary, severity=Severity.INFO)
    return Flaw(name=variable.name, summary=f"{variable.name}={show(value)}: {variable.note}", severity=severity)
