"""Help texts: commands and options by subject, and examples to paste."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

COMMAND_GROUPS = {
    "Run a job and find out what is wrong": ("wrap", "report", "explain", "demo"),
    "Before a job": ("check-env", "check-rendezvous", "allreduce-bench"),
    "Model, data and checkpoints": ("check-consistency", "check-data", "check-checkpoint"),
}
OPTION_GROUPS = {
    "Hangs": ("--hang-timeout", "--on-hang", "--debug-level"),
    "Replicas and data": ("--check-every", "--no-consistency", "--allow-different"),
    "Nodes and ranks": (
        "--nnodes", "--node-rank", "--master-addr", "--master-port", "--nproc-per-node", "--rdzv-endpoint",
        "--exchange-port", "--timeout",
    ),
    "Compare": ("--compare", "--fail-below", "--expect", "--reference", "--diff"),
    "Report": (
        "--format", "--report-dir", "--fail-on", "--verbose", "--quiet", "--ignore", "--plot", "--redact", "--output",
    ),
    "Help": ("--version", "--install-completion", "--show-completion", "--help"),
}  # fmt: skip
"""Title to options. What no group names stands first, under "Options"."""
EXAMPLES = {
    "": (
        ("ddpdoctor demo", "see a job with a fault diagnosed"),
        ("ddpdoctor wrap train.py --epochs 10", "run your job under watch"),
        ("ddpdoctor check-env", "is this machine fit to train?"),
    ),
    "wrap": (
        ("ddpdoctor wrap train.py --epochs 10", "one rank per GPU, or two on a CPU"),
        ("ddpdoctor wrap --nproc-per-node 4 -m package.train", "a module, on four ranks"),
        ("ddpdoctor wrap -- accelerate launch train.py", "any launcher"),
        ("srun --ntasks-per-node=1 ddpdoctor wrap train.py", "many nodes, one report"),
    ),
    "report": (
        ("ddpdoctor report", "the latest run of this folder"),
        ("ddpdoctor report RUN_DIR --format junit", "for a CI system"),
    ),
    "explain": (("ddpdoctor explain DD601", "what a code means, and what to do"),),
    "demo": (("ddpdoctor demo mismatch", "another fault; --list names them"),),
    "check-env": (
        ("ddpdoctor check-env", "this machine"),
        ("torchrun --nproc-per-node 8 -m ddpdoctor check-env", "all machines of a job"),
        ("ddpdoctor check-env gpu-count shm", "these checks only"),
    ),
    "check-rendezvous": (
        ("ddpdoctor check-rendezvous --nnodes 2 --node-rank 0 --master-addr node0", "on each node, with its own rank"),
    ),
    "allreduce-bench": (
        ("ddpdoctor allreduce-bench --max-size 64MiB --budget 15s", "two ranks on this machine"),
        ("torchrun --nproc-per-node 8 -m ddpdoctor allreduce-bench", "where the job runs"),
    ),
    "check-consistency": (
        ("ddpdoctor check-consistency --model train:build_model", "train it for a few steps"),
        ("ddpdoctor check-consistency --diff a.pt b.pt", "what differs between two files"),
    ),
    "check-data": (
        ("ddpdoctor check-data --samples 455 --world-size 2 --batch-size 8", "the arithmetic alone"),
        ("torchrun --nproc-per-node 4 -m ddpdoctor check-data --dataset train:make_loader", "what each rank draws"),
    ),
    "check-checkpoint": (
        ("ddpdoctor check-checkpoint last.pt --model train:build_model", "is it whole, and would it load?"),
    ),
}
"""By verb, "" for the whole program: a command to paste, and what it does."""


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    titles = {option: title for title, options in OPTION_GROUPS.items() for option in options}
    order = ("Arguments", "Options", *OPTION_GROUPS)
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in order}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            is_argument = param.param_type_name == "argument"
            title = "Arguments" if is_argument else next((titles[o] for o in param.opts if o in titles), "Options")
            sections[title].append(record)
    for title, rows in sections.items():
        _write_section(formatter, title, rows)


def _write_section(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def write_torchrun_options(formatter: Any) -> None:
    """Write the names of torchrun's options."""
    from ddpdoctor.launch.command.torchrun_table import TORCHRUN_OPTIONS

    with formatter.section("torchrun's options, passed on to it"):
        names = " ".join(name for name in TORCHRUN_OPTIONS if name.startswith("--"))
        indent = " " * formatter.current_indent
        for line in textwrap.wrap(names, formatter.width - len(indent), break_on_hyphens=False):
            formatter.write(f"{indent}{line}\n")


def _write_examples(formatter: Any, name: str) -> None:
    """Write each command on a line of its own, whole, so that it can be pasted."""
    if name not in EXAMPLES:
        return
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        for command, what in EXAMPLES[name]:
            formatter.write(f"{indent}{command}\n{indent}    {what}\n")


class Verb(TyperCommand):
    """A verb whose help shows options by subject, then examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options by subject."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write examples."""
        _write_examples(formatter, ctx.info_name)


class Verbs(TyperGroup):
    """The program, whose help shows verbs by subject, then examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write verbs by subject, then options."""
        width = max(map(len, self.commands))
        for title, names in COMMAND_GROUPS.items():
            limit = formatter.width - 6 - width
            rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
            _write_section(formatter, title, rows)
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the signature is Typer's
        """Write examples."""
        _write_examples(formatter, "")
