"""Options are declared once, and what they say is the same in every verb that has them."""

from typing import Any

import pytest
from typer.main import get_command

from ddpdoctor.cli.options import LAUNCHING, PANELS, VERBS, Argument, Declared, Option, declared_by, load_verb
from ddpdoctor.cli.plain import read_launch, read_plain
from ddpdoctor.cli.verbs import app
from ddpdoctor.model.errors import UserError

MOST_HELP = 55


def options_of(verb: str) -> type[Any]:
    kind: type[Any] = load_verb(verb).Options
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
        "--compare", "--exchange-port", "--format", "--list", "--master-port", "--model", "--nnodes", "--output",
        "--plot", "--reference", "--report-dir", "--timeout",
    }  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_text_is_a_line_of_80_columns(verb: str) -> None:
    declared = declared_by(options_of(verb))
    assert [one.option.help for one in declared if len(one.option.help) > MOST_HELP] == []
    assert len(VERBS[verb].summary) <= MOST_HELP
    summary, *more = (options_of(verb).__doc__ or "").splitlines()
    assert len(summary) <= 80
    assert len(more) <= 6


def test_options_have_a_help_text_and_stand_in_a_panel_that_help_shows() -> None:
    assert [(verb, one.names) for verb, one, option in all_options() if not option.help] == []
    assert {option.panel for _, _, option in all_options()} <= set(PANELS)


def make_context(verb: str, words: list[str]) -> Any:
    group = get_command(app)
    context = group.make_context("ddpdoctor", [verb], resilient_parsing=True)
    return group.get_command(context, verb).make_context(verb, list(words))


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
        ("wrap", "train.py"),
        ("wrap", "--hang-timeout=8s", "--on-hang", "kill", "--debug-level", "off", "--exchange-port=4000", "t.py"),
        ("tune", "--only", "bucket_cap", "--only=no_sync", "--rounds", "6", "--nproc-per-node=3", "t.py", "--lr", "1"),
        ("wrap", "--ignore", "DD601", "--ignore=DD602", "--report-dir", "a", "--format", "json", "--quiet", "t.py"),
        (
            "wrap",
            "--check-every=5",
            "--no-consistency",
            "--allow-different",
            "expert.*",
            "--nproc-per-node=2",
            "-m",
            "t",
        ),
        ("report",),
        ("report", "run", "--format", "csv", "-v", "--plot=a.svg"),
        ("status", "run", "--watch", "--every", "500ms"),
        ("status", "--dump", "--format=json"),
        ("history", "runs", "--format", "json"),
        ("history",),
        ("explain", "DD601"),
        ("explain", "--list"),
        ("demo", "mismatch"),
        ("check-env",),
        ("check-env", "shm", "DD1", "--skip", "clock", "--deep", "--nnodes", "2", "--master-port=1234", "--timeout=1m"),
        ("check-rendezvous", "--nnodes", "1:4", "--port-range", "40000-40100", "--exchange-port", "4000"),
        ("allreduce-bench", "--collective", "all", "--max-size=4KiB", "--iters", "3", "--fail-below", "90%"),
        ("allreduce-bench", "--mode=latency", "--pairs", "--output", "o", "--model-size", "7B", "--reference", "none"),
        ("check-consistency", "--model", "m:f", "--steps", "2", "--find-unused-parameters", "--backend=gloo"),
        ("check-consistency", "--diff", "a", "b", "--fail-on=never"),
        ("check-data", "--samples", "10", "--world-size=2", "--no-shuffle", "--no-set-epoch", "--drop-last"),
        ("check-data", "--shuffle", "--dataset", "m:f", "--grad-accumulation", "4"),
        ("check-checkpoint", "a", "--same", "b", "-v"),
    ],
    ids=" ".join,
)
def test_a_plain_line_is_read_as_typer_does(words: tuple[str, ...]) -> None:
    verb, *rest = words
    made = make_context(verb, rest)
    plain = (read_launch if verb in LAUNCHING else read_plain)(
        options_of(verb), rest, {}, declared_by(options_of(verb))
    )
    assert plain is not None
    for one in declared_by(options_of(verb)):
        given = made.params[one.field]
        expected = tuple(given or ()) if one.is_repeatable else given
        assert (getattr(plain, one.field) or None) == (expected or None), one.field


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--help"),
        ("explain", "DD601", "DD602"),
        ("explain", "--lists"),
        ("demo", "--list=1"),
        ("report", "--format", "xml"),
        ("report", "--plot"),
        ("report", "--plot="),
        ("check-env", "--timeout", "soon"),
        ("check-env", "--nnodes", "0"),
        ("check-env", "--nnodes", "two"),
        ("check-checkpoint",),
        ("check-data", "--epochs", "17"),
    ],
    ids=" ".join,
)
def test_help_and_what_is_refused_are_left_to_typer(words: tuple[str, ...]) -> None:
    assert read_plain(options_of(words[0]), words[1:], {}, declared_by(options_of(words[0]))) is None


def test_a_variable_leaves_the_line_to_typer() -> None:
    kind = options_of("check-rendezvous")
    assert read_plain(kind, ["--nnodes=2"], {"DDPDOCTOR_EXCHANGE_PORT": "4000"}, declared_by(kind)) is None
    assert read_plain(kind, ["--nnodes=2"], {"DDPDOCTOR_EXCHANGE_PORT": ""}, declared_by(kind)) is not None


def test_a_value_that_is_parsed_names_its_option() -> None:
    with pytest.raises(UserError, match="--hang-timeout is 'soon'"):
        make_context("wrap", ["--hang-timeout", "soon", "train.py"])
