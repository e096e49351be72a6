"""Declares options without Typer, and those that verbs share. A verb's options are the fields of its ``Options``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)\s*"
# A single letter is binary, as in nccl-tests' -b 8M.
_SIZE_UNITS = {
    "": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_RATE_UNITS = {"": 1.0, "gb/s": 1.0, "gbps": 0.125, "gbit/s": 0.125, "mb/s": 1e-3, "tb/s": 1e3}
_DURATION_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MAX_DIGITS = 9  # Most digits of a whole number. Our choice: no count has more.
MAX_PORT = 65_535
Kind = TypeVar("Kind")
FailOn = Literal["error", "warning", "info", "never"]  # the least severe finding for which the exit status is 1
ReportFormat = Literal["text", "json", "junit", "github", "sarif", "markdown", "html"]
Backend = Literal["gloo", "nccl"]
HANGS = "Hangs"
REPLICAS = "Replicas and data"
NODES = "Nodes and ranks"
COMPARE = "Compare"
REPORT = "Report"
ACTIONS = "When there is a verdict"
METRICS = "Metrics"
# Titles under which --help shows options, in this order.
PANELS = ("Options", HANGS, REPLICAS, NODES, COMPARE, REPORT, ACTIONS, METRICS, "Help")
BEFORE_A_JOB = "Before a job"
RUN_A_JOB = "Run a job"
HUNG_OR_DEAD = "A job that hangs or died"
SAVED_RUN = "Look at a saved run"
LAUNCH = "[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]... | [OPTIONS] -- COMMAND [ARGS]..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What a text such as "5m" is parsed as. A call takes the text and the option's name, and raises ``UserError``."""

    what: str  # what a wrong text is not: "a duration above 0"
    help: str
    units: Mapping[str, float] | None = None  # The factor of each unit. Without them, it is a whole number.
    least: float = math.ulp(0.0)
    most: float = math.inf
    is_whole: bool = False
    convert: Callable[[float], Any] = float

    def __call__(self, text: str, option: str) -> Any:
        """Return the number. Raises ``UserError``, which names ``option``, for anything else."""
        if self.units is None:
            number: float = _parse_whole(text)
        else:
            names = "|".join(map(re.escape, self.units))
            match = re.fullmatch(rf"{_NUMBER}({names})", text.strip().lower(), re.ASCII)
            number = float(match[1]) * self.units[match[2]] if match else math.inf
        is_number = math.isfinite(number) and not (self.is_whole and number != int(number))
        if not is_number or not self.least <= number <= self.most:
            raise UserError(f"{option} is {text!r}, which is not {self.what}", help=self.help)
        return self.convert(number)


parse_duration = Quantity(
    units=_DURATION_UNITS, what="a duration above 0", help="Give seconds, or a unit: 8, 8.0, 8s, 500ms, 5m, 1h."
)
parse_steps = Quantity(
    least=1, convert=int, what="a whole number of steps, 1 or more",
    help="Give a number of optimizer steps such as 50, or auto, or turn it off with --no-consistency.",
)  # fmt: skip
parse_port = Quantity(
    least=1, most=MAX_PORT, convert=int, what="a port",
    help=f"Give a number from 1 to {MAX_PORT}, the same on all nodes.",
)  # fmt: skip
parse_size = Quantity(
    units=_SIZE_UNITS, least=1, is_whole=True, convert=int, what="a size in whole bytes",
    help="Give bytes, or a unit: 4096, 1KiB, 64MiB.",
)  # fmt: skip
parse_share = Quantity(units={"": 1.0, "%": 0.01}, most=1, what="a share up to 100%", help="Give a percentage: 90%.")
parse_bandwidth = Quantity(  # in GB/s
    units=_RATE_UNITS, what="a bandwidth", help="Give gigabytes per second: 460, 460GB/s; or 400Gbit/s."
)
parse_count = Quantity(
    units=_COUNT_UNITS, least=1, convert=round, what="a number of parameters",
    help="Give a number, or a unit: 350M, 1.5B.",
)  # fmt: skip


def parse_ports(text: str, option: str) -> tuple[int, int]:
    """Parse a range of ports, "40000-40100", and return both ends. Raises ``UserError``."""
    low, _, high = text.strip().partition("-")
    ends = _parse_whole(low), _parse_whole(high)
    if not 0 < ends[0] <= ends[1] <= MAX_PORT:
        raise UserError(f"{option} {text} is not a range of ports", help="Give a range such as 40000-40100.")
    return ends


def _parse_whole(text: str) -> int:
    return int(text) if text.strip().isdecimal() and text.isascii() and len(text.strip()) <= _MAX_DIGITS else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option. Several commands may share it."""

    help: str  # A line of 80 columns. If it ends with a colon, --help adds the choices.
    names: tuple[str, ...] = ()  # empty: the field's name with dashes
    panel: str = PANELS[0]
    metavar: str | None = None
    variable: str | None = None  # an environment variable that may set it
    parse: Callable[[str, str], Any] | None = None  # takes the text and the option's name; raises ``UserError``
    min: int | None = None
    max: int | None = None
    ignores_case: bool = False
    declared: Option | None = None  # the option that this one was derived from

    def but(self, **changes: Any) -> Option:
        """Return the option with changes for one command, such as another help text or variable."""
        return replace(self, declared=self.declared or self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A positional argument."""

    help: str
    metavar: str
    shows_default: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A field of a command's ``Options``."""

    field: str
    type: Any  # The type without ``None``. For a repeatable option, the type of one value.
    option: Option | Argument
    names: tuple[str, ...]  # of an option
    default: Any  # the default before parsing, or ``MISSING`` if a value is required
    is_repeatable: bool

    def parse(self, value: Any, name: str = "") -> Any:
        """Return what a text stands for. Raises ``UserError`` for a wrong one, with the option's name or ``name``."""
        text = str(value)
        option, choices, name = self.option, get_args(self.type), name or self.names[0]
        if isinstance(option, Argument) or self.type is Path:
            return Path(text) if self.type is Path else text
        if option.parse is not None:
            return option.parse(text, name)
        if self.type is int:
            low, high = option.min, option.max
            number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
            if number is None or (low is not None and number < low) or (high is not None and number > high):
                limits = "" if low is None else f" from {low}{'' if high is None else f' to {high}'}"
                raise UserError(f"{name} cannot be {text!r}", help=f"Give a whole number{limits}.")
            return number
        text = text.upper() if option.ignores_case else text
        if choices and text not in choices:
            raise UserError(f"{name} cannot be {text!r}", help=f"Give {', '.join(choices[:-1])} or {choices[-1]}.")
        return text

    def complete(self, incomplete: str) -> list[str]:
        return [choice for choice in get_args(self.type) if str(choice).startswith(incomplete)]


def typed(text: str) -> Any:
    """Make the default of a parsed option from the text that a user would type."""
    return field(metadata={"typed": text})


def declared_by(kind: type[Any]) -> tuple[Declared, ...]:
    """Return what a verb's dataclass declares. If it has ``VARIABLES``, variables with that prefix set its options."""
    variables = getattr(kind, "VARIABLES", "")
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for each in fields(kind):
        base, *notes = get_args(hints[each.name]) if get_origin(hints[each.name]) is Annotated else (hints[each.name],)
        for note in notes:
            parts = [part for part in get_args(base) if part is not type(None)]
            is_optional = len(parts) < len(get_args(base))
            base = parts[0] if is_optional else base
            is_repeatable = get_origin(base) is tuple and get_args(base)[-1] is ...
            kept = each.metadata.get("typed", each.default)
            option = note
            own_names = note.names if isinstance(note, Option) else ()
            names = own_names or (f"--{each.name.replace('_', '-')}",)
            if variables and isinstance(note, Option):
                option = note.but(variable=variables + names[0].lstrip("-").replace("-", "_").upper())
            found.append(
                Declared(
                    field=each.name, type=get_args(base)[0] if is_repeatable else base, option=option, names=names,
                    default=None if kept in {"", ()} else kept, is_repeatable=is_repeatable,
                )
            )  # fmt: skip
    return tuple(found)


def settings_of(options: Any, kind: type[Kind], /, **others: Any) -> Kind:
    """Make settings from the options with the same names, and from ``others``."""
    names = set(kind.__slots__) - others.keys()  # type: ignore[attr-defined]
    return kind(**{name: getattr(options, name) for name in names if hasattr(options, name)}, **others)


TIMEOUT = Option(
    names=("--timeout",), panel=NODES, metavar="DURATION", parse=parse_duration,
    help="How long to wait for the slowest rank: 30s, 2m.",
)  # fmt: skip
HANG_TIMEOUT = Option(
    names=("--hang-timeout",), panel=HANGS, metavar="DURATION", parse=parse_duration,
    help="No progress this long is a hang.",
)  # fmt: skip
FORMAT = Option(panel=REPORT, metavar="FORMAT", help="Format:")
FAIL_ON = Option(panel=REPORT, metavar="LEVEL", help="Exit 1 on:")
IGNORE = Option(panel=REPORT, metavar="CODE", help="Leave out this code; may be repeated.")
REPORT_DIR = Option(panel=REPORT, metavar="DIR", help="Also save report.json in this folder.")
OUTPUT = Option(names=("--output", "-o"), panel=REPORT, metavar="FILE", help="Write the report to this file.")
HTML = Option(panel=REPORT, metavar="FILE", help="Also write the report as an HTML page.")
PLOT = Option(panel=REPORT, metavar="FILE", help="Draw the curves: .png, .svg or .html.")
VERBOSE = Option(names=("--verbose", "-v"), panel=REPORT, help="Show every check and what it found.")
LIST = Option(names=("--list",), help="List them and exit.")
ALLOW_DIFFERENT = Option(panel=REPLICAS, metavar="GLOB", help="Tensors that may differ, such as 'expert.*'.")
BACKEND = Option(help="Process group backend.  [default: nccl on GPUs]")
NPROC_PER_NODE = Option(
    names=("--nproc-per-node",), panel=NODES, metavar="N", min=1,
    help="Ranks to start here.  [default: one per GPU, else 2]",
)  # fmt: skip
NNODES = Option(panel=NODES, metavar="N", help="Number of nodes of the job.")
NODE_RANK = Option(panel=NODES, metavar="N", min=0, help="This node's number, from 0.")
MASTER_ADDR = Option(panel=NODES, metavar="HOST", help="Name or address of node 0.")
MASTER_PORT = Option(panel=NODES, metavar="PORT", min=1, max=MAX_PORT, help="A free port on node 0.")
EXCHANGE_PORT = Option(
    names=("--exchange-port",), panel=NODES, metavar="PORT", variable="DDPDOCTOR_EXCHANGE_PORT", parse=parse_port,
    help="Port on the first node that the nodes connect to.",
)  # fmt: skip
RUN_DIR = Argument(metavar="[RUN_DIR]", help="A run folder or its report.json.  [default: the latest]")
MODEL = Option(names=("--model",), metavar="MODULE:FUNCTION", help="Your function that returns the model.")
SAVED = Option(names=("--compare",), panel=COMPARE, metavar="REPORT", help="A saved run to compare with.")
REFERENCE = Option(names=("--reference",), panel=COMPARE, help="What the result is compared with.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The options of commands that judge something and report it."""

    verbose: Annotated[bool, VERBOSE] = False
    format: Annotated[ReportFormat, FORMAT] = "text"
    fail_on: Annotated[FailOn, FAIL_ON] = "error"
    ignore: Annotated[tuple[str, ...], IGNORE] = ()
    report_dir: Annotated[Path | None, REPORT_DIR] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A command in the list of ``ddpdoctor --help``."""

    panel: str
    summary: str
    usage: str = "[OPTIONS]"


VERBS = {
    "check-env": Listed(panel=BEFORE_A_JOB, summary="Check versions, variables, network and GPUs."),
    "check-rendezvous": Listed(panel=BEFORE_A_JOB, summary="Check that the nodes of a job can connect and start."),
    "allreduce-bench": Listed(panel=BEFORE_A_JOB, summary="Measure collectives; find a slow rank, link or host."),
    "check-consistency": Listed(panel=BEFORE_A_JOB, summary="Check that all ranks train the same model."),
    "check-data": Listed(panel=BEFORE_A_JOB, summary="Check how the samples are split between ranks."),
    "check-checkpoint": Listed(panel=BEFORE_A_JOB, summary="Check that checkpoints are complete and would load."),
    "wrap": Listed(panel=RUN_A_JOB, summary="Run a training script; explain a hang or a crash.", usage=LAUNCH),
    "tune": Listed(panel=RUN_A_JOB, summary="Try DDP settings; name the one that saves most time.", usage=LAUNCH),
    "demo": Listed(panel=RUN_A_JOB, summary="Run a small job with a fault and diagnose it."),
    "config": Listed(panel=RUN_A_JOB, summary="Show the options that files and variables set."),
    "status": Listed(panel=RUN_A_JOB, summary="Show what a job under wrap does right now."),
    "attach": Listed(panel=HUNG_OR_DEAD, summary="Find out why a running job makes no progress."),
    "analyze": Listed(panel=HUNG_OR_DEAD, summary="Find the cause in logs, dumps and stacks."),
    "report": Listed(panel=SAVED_RUN, summary="Show the report of a saved run."),
    "history": Listed(panel=SAVED_RUN, summary="Show the restarts of a job and what they cost."),
    "explain": Listed(panel=SAVED_RUN, summary="Explain a code or an error message."),
    "diff": Listed(panel=SAVED_RUN, summary="Show what differs between two runs."),
    "mcp": Listed(panel=SAVED_RUN, summary="Serve reports to a coding agent (MCP)."),
    "bundle": Listed(panel=SAVED_RUN, summary="Pack a report without secrets, for an issue."),
}


def load_verb(name: str) -> Any:
    """Return a verb's module: ``Options``, whose docstring is its help, and ``run``, which returns the exit status."""
    return import_module(f"ddpdoctor.cli.{name.replace('-', '_')}")
