"""A plain command line of ``wrap`` is read without Typer. ``tests/contract/test_options.py`` compares the two."""

from pathlib import Path

import pytest

from ddpdoctor.cli.options import declared_by
from ddpdoctor.cli.plain import read_launch
from ddpdoctor.cli.wrap import Options
from ddpdoctor.model.errors import UserError


def read(*arguments: str, **env: str) -> Options | None:
    options: Options | None = read_launch(Options, list(arguments), env, declared_by(Options))
    return options


def test_a_plain_line_is_taken_apart() -> None:
    asked = read("--nproc-per-node=2", "--hang-timeout", "8s", "--debug-level=off", "--quiet", "train.py", "--quiet")
    assert asked is not None
    assert (asked.hang_timeout_s, asked.debug_level, asked.quiet, asked.on_hang) == (8.0, "OFF", True, "auto")
    assert (asked.split.script, asked.split.script_args) == ("train.py", ("--quiet",))
    assert asked.split.torchrun == ("--nproc-per-node=2",)


def test_the_options_of_consistency_are_read_as_typed() -> None:
    asked = read("--check-every=5", "--allow-different", "expert.*", "--allow-different=head", "train.py")
    assert asked is not None
    assert (asked.check_every, asked.no_consistency, asked.allow_different) == ("5", False, ("expert.*", "head"))
    off = read("--no-consistency", "train.py")
    assert off is not None
    assert (off.check_every, off.no_consistency) == ("auto", True)


def test_the_last_value_holds_and_codes_add_up() -> None:
    asked = read("--ignore", "DD601", "--report-dir=a", "--ignore=DD602", "--report-dir", "b", "train.py")
    assert asked is not None
    assert (asked.ignore, asked.report_dir) == (("DD601", "DD602"), Path("b"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--nproc-per-node", "2", "-h"),
        ("--on-hang", "wait", "train.py"),
        ("--format=junit", "train.py"),
        ("--report-dir=", "train.py"),
        ("--hang-timeout", "soon", "train.py"),
    ],
)
def test_help_and_what_is_refused_are_left_to_typer(arguments: tuple[str, ...]) -> None:
    assert read(*arguments) is None


def test_a_setting_from_a_variable_is_left_to_typer() -> None:
    assert read("train.py", DDPDOCTOR_QUIET="1") is None
    assert read("train.py", DDPDOCTOR_QUIET="") is not None


def test_wrong_use_is_reported_as_ever() -> None:
    with pytest.raises(UserError, match="no script"):
        read("--quiet")
