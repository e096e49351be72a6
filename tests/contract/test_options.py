"""Options are declared once, and what they say is the same in every verb that has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from typer.main import get_command

from ddpdoctor.cli.options import PANELS, Argument, Declared, Option, declared_by
from ddpdoctor.cli.plain import read_plain
from ddpdoctor.cli.verbs import VERBS, app
from ddpdoctor.model.errors import UserError


def options_of(verb: str) -> type[Any]:
    kind: type[Any] = import_module(f"ddpdoctor.cli.{verb.replace('-', '_')}").Options
    return kind


def all_options() -> list[tuple[str, Declared, Option]]:
    found = [(verb, one) for verb in VERBS for one in declared_by(options_of(verb))]
    return [(verb, one, one.option) for verb, one in found if isinstance(one.option, Option)]


def test_an_option_of_several_verbs_has_one_declaration() -> None:
    declared: dict[str, Option] = {}
    for verb, one, option in all_options():
        origin = option.declared or option
        for name in one.names:
            assert declared.setdefault(name, origin) is origin, f"{verb} declares {name} anew"


def test_what_verbs_say_differently_of_an_option_is_known() -> None:
    """Where a help text differs, what the option does differs: who is waited for, where a report goes."""
    texts: dict[str, set[str]] = {}
    for _, one, option in all_options():
        texts.setdefault(one.names[0], set()).add(option.help)
    assert {name for name, said in texts.items() if len(said) > 1} == {
        "--exchange-port", "--fail-on", "--format", "--hang-timeout", "--list", "--master-port", "--model", "--nnodes",
        "--node-rank", "--plot", "--reference", "--report-dir", "--timeout",
    }  # fmt: skip


def test_options_have_a_help_text_and_stand_in_a_panel_that_help_shows() -> None:
    assert [(verb, one.names) for verb, one, option in all_options() if not option.help] == []
    assert {option.panel for _, _, option in all_options()} <= set(PANELS)


@pytest.mark.parametrize("verb", VERBS)
def test_typer_has_what_is_declared(verb: str) -> None:
    group = get_command(app)
    context = group.make_context("ddpdoctor", [verb, "--help"], resilient_parsing=True)
    params = {param.name: param for param in group.get_command(context, verb).params}
    for one in declared_by(options_of(verb)):
        param = params.pop(one.field)
        assert bool(getattr(param, "is_flag", False)) == one.is_flag
        if isinstance(one.option, Argument):
            continue
        assert set(param.opts + param.secondary_opts) == {part for name in one.names for part in name.split("/")}
        assert (param.envvar, param.multiple) == (one.option.variable, one.is_repeatable)
    assert params == {}


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("--hang-timeout=8s", "--on-hang", "kill", "--debug-level", "off", "--quiet", "--exchange-port=4000", "t.py"),
        ("--ignore", "DD601", "--ignore=DD602", "--report-dir", "a", "--format", "json", "--fail-on=info", "t.py"),
        ("--check-every=5", "--no-consistency", "--allow-different", "expert.*", "--nproc-per-node=2", "-m", "t"),
    ],
)
def test_wrap_reads_a_plain_line_as_typer_does(words: tuple[str, ...]) -> None:
    group = get_command(app)
    context = group.make_context("ddpdoctor", ["wrap"], resilient_parsing=True)
    made = group.get_command(context, "wrap").make_context("wrap", list(words))
    plain = read_plain(list(words), {})
    assert plain is not None
    for one in declared_by(options_of("wrap")):
        given = made.params[one.field]
        expected = (tuple(given) if given else ()) if one.is_repeatable else given
        assert getattr(plain, one.field) == expected, one.field


def test_a_value_that_is_parsed_names_its_option() -> None:
    with pytest.raises(UserError, match="--hang-timeout is 'soon'"):
        read_plain(["--hang-timeout", "soon", "train.py"], {})
