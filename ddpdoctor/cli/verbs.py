"""Reads the command line with Typer. A command's module is imported when the command is called."""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ddpdoctor import __version__
from ddpdoctor.cli.config import nearest, read_declared
from ddpdoctor.cli.options import PANELS, REPORT, VERBS, Argument, load_verb
from ddpdoctor.model.errors import MEANINGS, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpdoctor.cli.options import Declared

SKILL = Path(__file__).parents[1] / "skills" / "ddpdoctor"  # the folder that coding agents load

# A command ("" is the whole program), an example to paste, and what it does.
EXAMPLES = (
    ("", "ddpdoctor demo", "see a job with a fault diagnosed"),
    ("", "ddpdoctor wrap train.py --epochs 10", "run your job under watch"),
    ("", "ddpdoctor check-env", "can this machine train?"),
    ("wrap", "ddpdoctor wrap train.py --epochs 10", "one rank per GPU, or two on a CPU"),
    ("wrap", "ddpdoctor wrap --nproc-per-node 4 -m package.train", "a module, on four ranks"),
    ("wrap", "ddpdoctor wrap -- accelerate launch train.py", "any launcher"),
    ("wrap", "srun --ntasks-per-node=1 ddpdoctor wrap train.py", "many nodes, one report"),
    ("tune", "ddpdoctor tune train.py --output /tmp/tried", "which setting makes this job faster?"),
    ("tune", "ddpdoctor tune --only bucket_cap --rounds 8 train.py", "one kind of setting, with less noise"),
    ("tune", "ddpdoctor tune --scaling 1,2,4 train.py", "what is the gain of more ranks?"),
    ("status", "ddpdoctor status", "the latest job of this folder"),
    ("status", "ddpdoctor status RUN --watch", "again every two seconds, until the job ends"),
    ("status", "ddpdoctor status RUN --dump", "the stacks of all ranks; the job continues"),
    ("attach", "ddpdoctor attach", "the training job of this machine"),
    ("attach", "ddpdoctor attach --slurm 4711", "all nodes of a Slurm job, from the login node"),
    ("attach", "ddpdoctor attach --kubectl job-name=train", "all pods with these labels"),
    ("analyze", "ddpdoctor analyze slurm-4711.out dumps/", "what a job left behind"),
    ("analyze", "kubectl logs -l job-name=train --prefix | ddpdoctor analyze -", "standard input"),
    ("report", "ddpdoctor report", "the latest run of this folder"),
    ("report", "ddpdoctor report RUN_DIR --format junit", "for a CI system"),
    ("history", "ddpdoctor history runs/", "all starts of a job that a scheduler restarts"),
    ("mcp", "ddpdoctor mcp", "the command that a coding agent's client starts"),
    ("mcp", f"cp -r {SKILL} ~/.agents/skills/", "the skill that tells an agent what to run"),
    ("explain", "ddpdoctor explain DD601", "what a code means, and what to do"),
    ("demo", "ddpdoctor demo mismatch", "another fault; --list names them"),
    ("check-env", "ddpdoctor check-env", "this machine"),
    ("check-env", "torchrun --nproc-per-node 8 -m ddpdoctor check-env", "all machines of a job"),
    ("check-env", "ddpdoctor check-env gpu-count shm", "these checks only"),
    ("check-rendezvous", "ddpdoctor check-rendezvous --nnodes 2 --node-rank 0 --master-addr node0", "on each node"),
    ("allreduce-bench", "ddpdoctor allreduce-bench --max-size 64MiB --budget 15s", "two ranks on this machine"),
    ("allreduce-bench", "torchrun --nproc-per-node 8 -m ddpdoctor allreduce-bench", "where the job runs"),
    ("check-consistency", "ddpdoctor check-consistency --model train:build_model", "train it for a few steps"),
    ("check-consistency", "ddpdoctor check-consistency --diff a.pt b.pt", "what differs between two files"),
    ("check-data", "ddpdoctor check-data --samples 455 --world-size 2 --batch-size 8", "arithmetic only"),
    ("check-data", "torchrun --nproc-per-node 4 -m ddpdoctor check-data --dataset train:make_loader", "as ranks draw"),
    ("check-checkpoint", "ddpdoctor check-checkpoint last.pt --model train:build_model", "would it load?"),
)
UNWANTED = re.compile(r"  \[required\]| <(list\[)?(str|path|Path)\]?>")  # what Typer adds, and --help leaves out
# The error for a wrong command line: click's, or that of the click inside newer versions of Typer.
UsageError: Any = typer.BadParameter.__bases__[0]
SPLIT = "ddpdoctor.split"
# Commands that take seconds before they show anything else.
SLOW = frozenset(VERBS) - {"config", "demo", "explain", "mcp", "status", "tune", "wrap"}


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
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
    if examples := [row[1:] for row in EXAMPLES if row[0] == name]:
        with formatter.section("Examples"):
            indent = " " * formatter.current_indent
            for command, what in examples:
                formatter.write(f"{indent}{command}\n{indent}    {what}\n")


def explain_use(error: Any, command: str) -> UserError:
    """Say in our words what is wrong with a command line that Typer refuses."""
    name, param, params = getattr(error, "option_name", ""), getattr(error, "param", None), []
    what, hint = error.message, f"`{command} --help` lists the options."
    if error.ctx is not None:
        params = error.ctx.command.get_params(error.ctx)
    if hasattr(error, "possibilities"):
        names = [option for param in params for option in param.opts if option.startswith("--")]
        what, hint = f"{command} has no option {name}", nearest(name, names, hint)
    elif name:
        what = f"the option {name} {'takes no' if 'not take' in what else 'needs a'} value"
    elif param is not None and not what:
        what = f"{command} needs {param.metavar or param.name}"
    elif param is not None:  # all other values are parsed by ``Declared.parse``
        what, hint = f"{param.envvar} is neither true nor false", "Set it to 1 or 0, or unset it."
    return UserError(what, help=hint)


class Verb(TyperCommand):
    """A command whose help shows options by subject, then examples."""

    format_options = write_options

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter, ctx.info_name)


class RankVerb(Verb):
    """A command that a launcher may start in each rank. A wrong command line is reported only once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Without a launcher, errors are shown as for every command."""
        try:
            return super().parse_args(ctx, args)
        except (UsageError, UserError) as error:
            from ddpdoctor.cli.ranks import refuse

            status = refuse(error if isinstance(error, UserError) else explain_use(error, ctx.command_path))
            if status is None:
                raise
            raise typer.Exit(status) from error


class LaunchVerb(Verb):
    """Gives Typer only ddpdoctor's own options. Those of torchrun and the script bypass it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from ddpdoctor.launch.command_line import split_command

        params = [(param, not getattr(param, "is_flag", False)) for param in self.get_params(ctx)]
        own = {name: takes for param, takes in params for name in (*param.opts, *param.secondary_opts)}
        split = split_command(args, own)
        ctx.meta[SPLIT] = split
        return super().parse_args(ctx, list(split.own))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from ddpdoctor.launch.command_line import TORCHRUN_OPTIONS

        super().format_options(ctx, formatter)
        names = [name for name in TORCHRUN_OPTIONS if name.startswith("--")]
        write_names(formatter, "torchrun's options, passed on to it", names)


KINDS = {
    "wrap": LaunchVerb, "tune": LaunchVerb, "allreduce-bench": RankVerb, "check-consistency": RankVerb,
    "check-data": RankVerb,
}  # fmt: skip


class Verbs(TyperGroup):
    """The program. It builds the called command, and lists all commands by subject."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is Typer's
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with the options that its module declares, or None if the name is unknown."""
        if cmd_name not in VERBS:
            raise UserError(f"unknown command: {cmd_name}", help=nearest(cmd_name, VERBS))
        module, verb = load_verb(cmd_name), VERBS[cmd_name]
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(
            cmd_name, cls=KINDS.get(cmd_name, Verb),
            help=module.Options.__doc__, short_help=verb.summary, options_metavar=verb.usage,
            context_settings={"help_option_names": ["--help", "-h"], "allow_extra_args": True},
        )(_callback(module, read_declared(cmd_name, module.Options, says=not ctx.resilient_parsing)))  # fmt: skip
        return get_command(alone)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, VERBS))
        for panel in dict.fromkeys(verb.panel for verb in VERBS.values()):
            rows = [(name.ljust(width), verb.summary) for name, verb in VERBS.items() if verb.panel == panel]
            write_section(formatter, panel, rows)
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the signature is Typer's
        write_section(formatter, "Exit status", [(str(int(status)), meaning) for status, meaning in MEANINGS.items()])
        write_examples(formatter, "")


JSON = typer.Option("--json", help="Short for --format json.", rich_help_panel=REPORT)


def _callback(module: Any, declared: Iterable[Declared]) -> Callable[..., None]:
    """Return a function with one parameter per option, as Typer requires. It leaves what to do in ``obj``."""

    def call(ctx: typer.Context, **values: Any) -> None:
        if ctx.args:
            hint = f"`{ctx.command_path} --help` lists the options."
            raise UserError(f"{ctx.command_path} takes no argument {ctx.args[0]}", help=hint)
        # A missing value or None means the default.
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if SPLIT in ctx.meta:
            values["split"] = ctx.meta[SPLIT]
        if values.pop("json", False):
            values["format"] = "json"
        options = module.Options(**{name: value for name, value in values.items() if value is not None})
        name = ctx.info_name or ""  # a command that starts ranks shows it in the first of them
        if name in SLOW and os.environ.get("RANK", "" if name in KINDS else "0") == "0":
            from ddpdoctor.cli.output import show_status

            show_status(f"ddpdoctor {name}: {VERBS[name].summary.rstrip('.')}")
        ctx.obj.append((module.run, options))

    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("ctx", by_name, annotation=typer.Context)]
    for declaration in declared:
        option, text, default = declaration.option, declaration.option.help, declaration.default
        kind: Any = declaration.type
        choices = get_args(kind)
        if isinstance(option, Argument):
            note = typer.Argument(metavar=option.metavar, help=text, show_default=option.shows_default)
        else:
            note = typer.Option(
                *declaration.names, metavar=option.metavar or "|".join(choices) or None, envvar=option.variable,
                show_envvar=False, help=f"{text} {', '.join(choices)}" if text.endswith(":") else text,
                parser=None if kind is bool else declaration.parse, rich_help_panel=option.panel,
                autocompletion=declaration.complete if choices else None,
            )  # fmt: skip
            kind = kind if kind is bool else str
        kind = list[kind] if declaration.is_repeatable else kind
        annotation: Any = Annotated[kind | None if default is None else kind, note]
        default = inspect.Parameter.empty if default is MISSING else default
        parameters.append(inspect.Parameter(declaration.field, by_name, default=default, annotation=annotation))
        if declaration.field == "format":
            parameters.append(inspect.Parameter("json", by_name, default=False, annotation=Annotated[bool, JSON]))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


app = typer.Typer(
    name="ddpdoctor",
    help="Diagnoses distributed PyTorch training: which rank hung or died, at which line, why, and what to do.",
    cls=Verbs, context_settings={"help_option_names": ["--help", "-h"]}, rich_markup_mode=None,
    pretty_exceptions_enable=False, no_args_is_help=True, invoke_without_command=True,
)  # fmt: skip
VERSION = typer.Option("--version", is_eager=True, help="Show the version and exit.", rich_help_panel=PANELS[-1])


@app.callback()
def _options(ctx: typer.Context, version: Annotated[bool, VERSION] = False) -> None:
    if version:
        typer.echo(f"ddpdoctor {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        raise UserError("no command was given", help="`ddpdoctor --help` lists the commands.")


def read_command_line(words: Sequence[str]) -> tuple[Callable[[Any], int], Any]:
    """Return a verb's ``run`` and its options, to run outside Typer, which handles errors differently.

    Help, completion and wrong use end the process. Raises ``UserError``.
    """
    asked: list[tuple[Callable[[Any], int], Any]] = []
    try:
        status = app(list(words), prog_name="ddpdoctor", obj=asked, standalone_mode=False)
    except UsageError as error:
        if not words:  # the help
            error.show()
            sys.exit(error.exit_code)
        verb = next((word for word in words if word in VERBS), "")
        raise explain_use(error, f"ddpdoctor {verb}".strip()) from error
    if not asked:
        sys.exit(status)
    return asked[0]
