"""The commands in Typer: for --help, completion, and command lines that ``cli.plain`` does not handle.

A command's module is imported when the command is called.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ddpdoctor import __version__
from ddpdoctor.cli.config_files import read_declared
from ddpdoctor.cli.help import Verb, write_examples, write_names, write_options, write_section
from ddpdoctor.cli.listing import VERBS, load_verb
from ddpdoctor.cli.options import PANELS, Argument, Option, build
from ddpdoctor.model.exit_status import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.cli.options import Declared

UsageError: Any = typer.BadParameter.__bases__[0]
"""The error for a wrong command line: click's, or that of the click inside newer versions of Typer."""


class RankVerb(Verb):
    """A command that a launcher may start in each rank. A wrong command line is reported only once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Without a launcher, errors are shown as for every command."""
        from ddpdoctor.model.errors import UserError

        try:
            return super().parse_args(ctx, args)
        except (UsageError, UserError) as error:
            from ddpdoctor.cli.ranks import refuse

            hint = f"ddpdoctor {ctx.info_name} --help lists the options."
            problem = error if isinstance(error, UserError) else UserError(error.format_message(), help=hint)
            status = refuse(problem)
            if status is None:
                raise
            raise typer.Exit(status) from error


class LaunchVerb(Verb):
    """Gives Typer only ddpdoctor's own options. Those of torchrun and the script bypass it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line first, and keep the rest of it for ``Options.split``."""
        from ddpdoctor.launch.command_line import split_command

        params = self.get_params(ctx)
        own = {
            name: not getattr(param, "is_flag", False)
            for param in params
            for name in (*param.opts, *param.secondary_opts)
        }
        split = split_command(args, own)
        ctx.meta[SPLIT] = split
        return super().parse_args(ctx, list(split.own))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write ddpdoctor's options, then the names of torchrun's."""
        from ddpdoctor.launch.command_line import TORCHRUN_OPTIONS

        super().format_options(ctx, formatter)
        names = [name for name in TORCHRUN_OPTIONS if name.startswith("--")]
        write_names(formatter, "torchrun's options, passed on to it", names)


SPLIT = "ddpdoctor.split"
KINDS = {
    "wrap": LaunchVerb, "tune": LaunchVerb, "allreduce-bench": RankVerb, "check-consistency": RankVerb,
    "check-data": RankVerb,
}  # fmt: skip


class Verbs(TyperGroup):
    """The program. It builds the called command, and lists all commands by subject."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is Typer's
        """Return the names of all commands."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the signature is Typer's
        """Return a command, or None if the name is unknown."""
        return make_command(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Let Typer suggest commands with similar names."""
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write commands by subject, then options."""
        width = max(map(len, VERBS))
        for panel in dict.fromkeys(verb.panel for verb in VERBS.values()):
            rows = [(name.ljust(width), verb.summary) for name, verb in VERBS.items() if verb.panel == panel]
            write_section(formatter, panel, rows)
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the signature is Typer's
        """Write the meanings of exit statuses, then examples."""
        write_section(formatter, "Exit status", [(str(int(one)), meaning) for one, meaning in MEANINGS.items()])
        write_examples(formatter, "")


def make_command(name: str) -> Any:
    """Build a command with the options that its module declares."""
    module, verb = load_verb(name), VERBS[name]
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(
        name, cls=KINDS.get(name, Verb),
        help=module.Options.__doc__, short_help=verb.summary, options_metavar=verb.usage,
        context_settings={"help_option_names": ["--help", "-h"]},
    )(_callback(module.Options, module.run, read_declared(name, says=False)))  # fmt: skip
    return get_command(alone)


def _callback(kind: type[Any], run: Callable[[Any], int], declared: Iterable[Declared]) -> Callable[..., None]:
    """Return a function with one parameter per option, as Typer requires."""

    def call(ctx: typer.Context, **values: Any) -> None:
        split = {"split": ctx.meta[SPLIT]} if SPLIT in ctx.meta else {}
        raise typer.Exit(run(build(kind, values | split)))

    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_parameter(one) for one in declared]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


def _parameter(one: Declared) -> inspect.Parameter:
    kind: Any = str if isinstance(one.option, Option) and one.option.parse else one.type
    kind = list[kind] if one.is_repeatable else kind
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    note = _argument(one.option) if isinstance(one.option, Argument) else _option(one, one.option)
    kind = kind | None if default is None else kind
    annotation = Annotated[kind, note]
    return inspect.Parameter(one.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _argument(argument: Argument) -> Any:
    return typer.Argument(metavar=argument.metavar, help=argument.help, show_default=argument.shows_default)


def _option(one: Declared, option: Option) -> Any:
    return typer.Option(
        *one.names,
        help=_help(one, option),
        metavar=option.metavar,
        envvar=option.variable,
        show_envvar=False,
        parser=one.parse if option.parse else None,
        min=option.min,
        max=option.max,
        case_sensitive=not option.ignores_case,
        rich_help_panel=option.panel,
    )


def _help(one: Declared, option: Option) -> str:
    return f"{option.help} {', '.join(get_args(one.type))}" if option.help.endswith(":") else option.help


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpdoctor {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="ddpdoctor",
    help="Diagnoses distributed PyTorch training: which rank hung or died, at which line, why, and what to do.",
    cls=Verbs,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
            rich_help_panel=PANELS[-1],
        ),
    ] = False,
) -> None:
    pass
