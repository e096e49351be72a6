"""Declares options, and defines those that several commands share. They can be read without Typer.

The options of a command are the fields of its dataclass ``Options``. Each field is annotated with an ``Option`` or
``Argument``. The default is that of the field, or ``typed(...)`` if a text such as "2m" is parsed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddpdoctor.cli.values import MAX_PORT, parse_duration, parse_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Kind = TypeVar("Kind")

FailOn = Literal["error", "warning", "info", "never"]
"""The least severe finding for which the exit status is 1."""
ReportFormat = Literal["text", "json", "junit", "github", "sarif", "markdown", "html"]
Backend = Literal["gloo", "nccl"]

HANGS = "Hangs"
REPLICAS = "Replicas and data"
NODES = "Nodes and ranks"
COMPARE = "Compare"
REPORT = "Report"
ACTIONS = "When there is a verdict"
METRICS = "Metrics"
PANELS = ("Options", HANGS, REPLICAS, NODES, COMPARE, REPORT, ACTIONS, METRICS, "Help")
"""Titles under which --help shows options, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option. Several commands may share it."""

    help: str
    """A line of 80 columns. If it ends with a colon, --help adds the choices."""
    names: tuple[str, ...] = ()
    """Empty: the field's name with dashes."""
    panel: str = PANELS[0]
    metavar: str | None = None
    variable: str | None = None
    """An environment variable that may set it."""
    parse: Callable[[str, str], Any] | None = None
    """Takes the text and the option's name; raises ``UserError``."""
    min: int | None = None
    max: int | None = None
    ignores_case: bool = False
    declared: Option | None = None
    """The option that this one was derived from."""

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
    type: Any
    """The type without ``None``. For a repeatable option, the type of one value."""
    option: Option | Argument
    default: Any
    """The default before parsing, or ``MISSING`` if a value is required."""
    is_repeatable: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of an option."""
        given = self.option.names if isinstance(self.option, Option) else ()
        return given or (f"--{self.field.replace('_', '-')}",)

    @property
    def is_flag(self) -> bool:
        """Return whether the option takes no value."""
        return self.type is bool

    def parse(self, text: str) -> Any:
        """Convert a text to the value. Raises ``UserError``."""
        if isinstance(self.option, Option) and self.option.parse is not None:
            return self.option.parse(text, self.names[0])
        return Path(text) if self.type is Path else text


def typed(text: str) -> Any:
    """Make the default of a parsed option from the text that a user would type."""
    return field(metadata={"typed": text})


def declared_by(kind: type[Any]) -> tuple[Declared, ...]:
    """Return the options and arguments that a command's dataclass declares, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for one in fields(kind):
        base, *notes = get_args(hints[one.name]) if get_origin(hints[one.name]) is Annotated else (hints[one.name],)
        for note in notes:
            parts = [part for part in get_args(base) if part is not type(None)]
            is_optional = len(parts) < len(get_args(base))
            base = parts[0] if is_optional else base
            is_repeatable = get_origin(base) is tuple and get_args(base)[-1] is ...
            kept = one.metadata.get("typed", one.default)
            found.append(
                Declared(
                    field=one.name,
                    type=get_args(base)[0] if is_repeatable else base,
                    option=note,
                    default=None if kept in {"", ()} else kept,
                    is_repeatable=is_repeatable,
                )
            )
    return tuple(found)


def build(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Make a command's options from parsed values. A missing value or None means the default."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**{name: value for name, value in given.items() if value is not None})


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
FORMAT = Option(names=("--format",), panel=REPORT, metavar="FORMAT", help="Format:")
FAIL_ON = Option(names=("--fail-on",), panel=REPORT, metavar="LEVEL", help="Exit 1 on:")
IGNORE = Option(names=("--ignore",), panel=REPORT, metavar="CODE", help="Leave out this code; may be repeated.")
REPORT_DIR = Option(names=("--report-dir",), panel=REPORT, metavar="DIR", help="Also save report.json in this folder.")
OUTPUT = Option(names=("--output", "-o"), panel=REPORT, metavar="FILE", help="Write the report to this file.")
HTML = Option(names=("--html",), panel=REPORT, metavar="FILE", help="Also write the report as an HTML page.")
PLOT = Option(names=("--plot",), panel=REPORT, metavar="FILE", help="Draw the curves: .png, .svg or .html.")
VERBOSE = Option(names=("--verbose", "-v"), panel=REPORT, help="Show every check and what it saw.")
LIST = Option(names=("--list",), help="List them and exit.")
ALLOW_DIFFERENT = Option(
    names=("--allow-different",), panel=REPLICAS, metavar="GLOB",
    help="Tensors that may differ, such as 'expert.*'.",
)  # fmt: skip
BACKEND = Option(
    names=("--backend",),
    help="Process group backend.  [default: nccl on GPUs]",
)
NPROC_PER_NODE = Option(
    names=("--nproc-per-node",), panel=NODES, metavar="N", min=1,
    help="Ranks to start here.  [default: one per GPU, else 2]",
)  # fmt: skip
NNODES = Option(names=("--nnodes",), panel=NODES, metavar="N", help="Number of nodes of the job.")
NODE_RANK = Option(names=("--node-rank",), panel=NODES, metavar="N", min=0, help="This node's number, from 0.")
MASTER_ADDR = Option(names=("--master-addr",), panel=NODES, metavar="HOST", help="Name or address of node 0.")
MASTER_PORT = Option(
    names=("--master-port",), panel=NODES, metavar="PORT", min=1, max=MAX_PORT, help="A free port on node 0."
)
EXCHANGE_PORT = Option(
    names=("--exchange-port",), panel=NODES, metavar="PORT", variable="DDPDOCTOR_EXCHANGE_PORT", parse=parse_port,
    help="Port on the first node where the nodes meet.",
)  # fmt: skip
RUN_DIR = Argument(metavar="[RUN_DIR]", help="A run folder or its report.json.  [default: the latest]")
MODEL = Option(
    names=("--model",), metavar="MODULE:FUNCTION", help="A function of yours that returns the model.",
)  # fmt: skip
SAVED = Option(names=("--compare",), panel=COMPARE, metavar="REPORT", help="A saved run to compare with.")
REFERENCE = Option(names=("--reference",), panel=COMPARE, help="What the result is compared with.")
