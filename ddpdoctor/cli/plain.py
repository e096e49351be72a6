"""Reads a plain command line of ``wrap`` without Typer, whose import would keep the ranks waiting for 0.15 s.

Whatever is not plain (help, a value that is refused, a setting from a variable) is Typer's, by ``cli.wrap``; a test
holds the two to the same options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ddpdoctor.launch.command.command_line import HELP_OPTIONS, split_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.launch.command.command_line import SplitCommand
    from ddpdoctor.launch.command.options import DebugLevel, FailOn, OnHang, OutputFormat

DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of ``wrap``: its variable, its default, and the values it may have where those are few."""

    variable: str
    default: Any = None
    choices: tuple[str, ...] = ()
    is_flag: bool = False
    is_repeatable: bool = False
    ignores_case: bool = False


OPTIONS = {
    "--hang-timeout": Option(variable="DDPDOCTOR_HANG_TIMEOUT", default="300"),
    "--on-hang": Option(variable="DDPDOCTOR_ON_HANG", default="auto", choices=("auto", "kill", "report")),
    "--debug-level": Option(variable="DDPDOCTOR_DEBUG_LEVEL", choices=("DETAIL", "INFO", "OFF"), ignores_case=True),
    "--report-dir": Option(variable="DDPDOCTOR_REPORT_DIR"),
    "--format": Option(variable="DDPDOCTOR_FORMAT", default="text", choices=("text", "json")),
    "--fail-on": Option(variable="DDPDOCTOR_FAIL_ON", default="never", choices=("error", "warning", "info", "never")),
    "--quiet": Option(variable="DDPDOCTOR_QUIET", default=False, is_flag=True),
    "--ignore": Option(variable="DDPDOCTOR_IGNORE", is_repeatable=True),
    "--check-every": Option(variable="DDPDOCTOR_CHECK_EVERY", default="50"),
    "--no-consistency": Option(variable="DDPDOCTOR_NO_CONSISTENCY", default=False, is_flag=True),
    "--allow-different": Option(variable="DDPDOCTOR_ALLOW_DIFFERENT", is_repeatable=True),
    "--exchange-port": Option(variable="DDPDOCTOR_EXCHANGE_PORT"),
}
"""The options of ``wrap`` that are ddpdoctor's own, as ``cli.wrap`` declares them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command line of ``wrap``, taken apart, with its values as they were typed."""

    split: SplitCommand
    hang_timeout: str
    on_hang: OnHang
    debug_level: DebugLevel | None
    report_dir: Path | None
    format: OutputFormat
    fail_on: FailOn
    quiet: bool
    ignore: tuple[str, ...]
    check_every: str
    no_consistency: bool
    allow_different: tuple[str, ...]
    exchange_port: str | None


def read_plain(arguments: list[str], env: Mapping[str, str]) -> Asked | None:
    """Take the arguments after ``wrap`` apart; None where Typer is needed.

    Raises ``UserError``: see ``split_command``.
    """
    if any(env.get(option.variable) for option in OPTIONS.values()):
        return None
    split = split_command(arguments, {name: not option.is_flag for name, option in OPTIONS.items()})
    values = None if HELP_OPTIONS & set(split.own) else _read_values(split.own)
    if values is None:
        return None
    report_dir = values["--report-dir"]
    return Asked(
        split=split,
        hang_timeout=values["--hang-timeout"],
        on_hang=cast("OnHang", values["--on-hang"]),
        debug_level=cast("DebugLevel | None", values["--debug-level"]),
        report_dir=None if report_dir is None else Path(report_dir),
        format=cast("OutputFormat", values["--format"]),
        fail_on=cast("FailOn", values["--fail-on"]),
        quiet=values["--quiet"],
        ignore=tuple(values["--ignore"] or ()),
        check_every=values["--check-every"],
        no_consistency=values["--no-consistency"],
        allow_different=tuple(values["--allow-different"] or ()),
        exchange_port=values["--exchange-port"],
    )


def _read_values(words: Iterable[str]) -> dict[str, Any] | None:
    """Return each option's value; None where one is not among its choices, or is empty."""
    values = {name: option.default for name, option in OPTIONS.items()}
    rest = iter(words)
    for word in rest:
        name, attached, value = word.partition("=")
        option = OPTIONS[name]
        if option.is_flag:
            values[name] = True
            continue
        value = value if attached else next(rest, "")
        value = value.upper() if option.ignores_case else value
        if not value or (option.choices and value not in option.choices):
            return None
        values[name] = [*(values[name] or []), value] if option.is_repeatable else value
    return values
