"""Help texts: commands and options by subject, and examples to paste."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from typer.core import TyperCommand

from ddpdoctor.cli.options import PANELS

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
    "tune": (
        ("ddpdoctor tune train.py --output /tmp/tried", "which setting makes this job faster?"),
        ("ddpdoctor tune --only bucket_cap --rounds 8 train.py", "one kind of setting, with less noise"),
        ("ddpdoctor tune --scaling 1,2,4 train.py", "what do more ranks gain?"),
    ),
    "status": (
        ("ddpdoctor status", "the latest job of this folder"),
        ("ddpdoctor status RUN --watch", "again every second, until the job ends"),
        ("ddpdoctor status RUN --dump", "the stacks of all ranks; the job goes on"),
    ),
    "attach": (
        ("ddpdoctor attach", "the training job of this machine"),
        ("ddpdoctor attach --slurm 4711", "all nodes of a Slurm job, from the login node"),
        ("ddpdoctor attach --kubectl job-name=train", "all pods with these labels"),
    ),
    "analyze": (
        ("ddpdoctor analyze slurm-4711.out dumps/", "what a job left behind"),
        ("kubectl logs -l job-name=train --prefix | ddpdoctor analyze -", "standard input"),
    ),
    "report": (
        ("ddpdoctor report", "the latest run of this folder"),
        ("ddpdoctor report RUN_DIR --format junit", "for a CI system"),
    ),
    "history": (("ddpdoctor history runs/", "all starts of a job that a scheduler starts again"),),
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
"""Examples by command, "" for the whole program: a command line to paste, and what it does."""


UNWANTED = re.compile(
    r"  \[(\d+<=)?x[<>]=\d+\]|; (\d+<=)?x[<>]=\d+(?=\])|  \[required\]| <(list\[)?(str|path|Path)\]?>"
)
"""Matches what Typer adds and --help leaves out: limits of numbers, which errors name, and types of arguments."""


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write arguments, then options by subject, then the variables that set options."""
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *PANELS)}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            panel = getattr(param, "rich_help_panel", None)
            is_argument = param.param_type_name == "argument"
            default = "Help" if param.name in {"help", "install_completion", "show_completion"} else PANELS[0]
            name, text = (UNWANTED.sub("", part) for part in record)
            sections["Arguments" if is_argument else panel or default].append((name, text))
    for title, rows in sections.items():
        write_section(formatter, title, rows)
    variables = [param.envvar for param in command.get_params(ctx) if isinstance(param.envvar, str)]
    write_names(formatter, "Environment variables that set these options", variables)


def write_section(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    """Write rows under a title, or nothing if there are no rows."""
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def write_names(formatter: Any, title: str, names: list[str]) -> None:
    """Write names under a title, as many in a line as fit, or nothing if there are none."""
    if names:
        with formatter.section(title):
            indent = " " * formatter.current_indent
            for line in textwrap.wrap(" ".join(names), formatter.width - len(indent), break_on_hyphens=False):
                formatter.write(f"{indent}{line}\n")


def write_examples(formatter: Any, name: str) -> None:
    """Write each command on its own line without wrapping, so that it can be pasted."""
    if name not in EXAMPLES:
        return
    with formatter.section("Examples"):
        indent = " " * formatter.current_indent
        for command, what in EXAMPLES[name]:
            formatter.write(f"{indent}{command}\n{indent}    {what}\n")


class Verb(TyperCommand):
    """A command whose help shows options by subject, then examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options by subject."""
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write examples."""
        write_examples(formatter, ctx.info_name)
