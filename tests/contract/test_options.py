"""Options are declared once, and what they say is the same in every verb that has them."""

import os
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ddpdoctor.cli.options import METRICS, PANELS, REPORT, VERBS, Argument, Option, declared_by, load_verb
from ddpdoctor.cli.verbs import app, read_command_line
from ddpdoctor.model.errors import UserError
from tests.golden import words

MOST_HELP = 55


def options_of(verb):
    kind: type[Any] = load_verb(verb).Options
    return kind


def all_options():
    found = [(verb, one) for verb in VERBS for one in declared_by(options_of(verb))]
    return [(verb, one, one.option) for verb, one in found if isinstance(one.option, Option)]


def test_an_option_of_several_verbs_has_one_declaration():
    declared: dict[str, Option] = {}
    for verb, one, option in all_options():
        origin = option.declared or option
        for name in one.names:
            assert declared.setdefault(name, origin) is origin, f"{verb} declares {name} anew"


def test_what_verbs_say_differently_of_an_option_is_known():
    """Where a help text differs, what the option does differs: who is waited for, where a report goes."""
    texts: dict[str, set[str]] = {}
    for _, one, option in all_options():
        texts.setdefault(one.names[0], set()).add(option.help)
    assert {name for name, said in texts.items() if len(said) > 1} == {
        "--compare", "--exchange-port", "--format", "--list", "--master-port", "--model", "--nnodes", "--output",
        "--plot", "--reference", "--report-dir", "--timeout",
    }  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_text_is_a_line_of_80_columns(verb):
    declared = declared_by(options_of(verb))
    assert [one.option.help for one in declared if len(one.option.help) > MOST_HELP] == []
    assert len(VERBS[verb].summary) <= MOST_HELP
    summary, *more = (options_of(verb).__doc__ or "").splitlines()
    assert len(summary) <= 80
    assert len(more) <= 6


def test_options_have_a_help_text_and_stand_in_a_panel_that_help_shows():
    assert [(verb, one.names) for verb, one, option in all_options() if not option.help] == []
    assert {option.panel for _, _, option in all_options()} <= set(PANELS)


@pytest.mark.parametrize("verb", VERBS)
def test_typer_has_what_is_declared(verb):
    group = get_command(app)
    context = group.make_context("ddpdoctor", [verb, "--help"], resilient_parsing=True)
    params = {param.name: param for param in group.get_command(context, verb).params}
    for one in declared_by(options_of(verb)):
        param = params.pop(one.field)
        assert bool(getattr(param, "is_flag", False)) == (one.type is bool)
        if isinstance(one.option, Argument):
            continue
        assert set(param.opts + param.secondary_opts) == {part for name in one.names for part in name.split("/")}
        assert (param.envvar, param.multiple) == (one.option.variable, one.is_repeatable)
    assert set(params) == ({"json"} if "format" in {one.field for one in declared_by(options_of(verb))} else set())


def read(*words):
    return read_command_line(words)[1]


def asked_by(line):
    """Return what a command line asks for: the options that it gives another value than they have."""
    try:
        asked = read(*line.split())
    except SystemExit as ended:
        return f"ends with status {ended.code or 0}"
    given = ((one.name, getattr(asked, one.name), one) for one in fields(asked))
    return {name: value for name, value, one in given if value != one.default} or "its defaults"


test_words = words(__name__, asked_by=asked_by)


def test_a_variable_that_is_neither_true_nor_false_is_named(monkeypatch):
    monkeypatch.setenv("DDPDOCTOR_QUIET", "banana")
    with pytest.raises(UserError, match="DDPDOCTOR_QUIET is neither true nor false"):
        read("wrap", "t.py")


def test_a_variable_sets_an_option_unless_it_is_empty(monkeypatch):
    monkeypatch.setenv("DDPDOCTOR_QUIET", "")
    monkeypatch.setenv("DDPDOCTOR_EXCHANGE_PORT", "4000")
    asked = read("wrap", "t.py")
    assert (asked.quiet, asked.exchange_port) == (False, 4000)


# Outputs that cannot be written are refused by every verb before anything is measured or started.


LINES = {
    "wrap": [("probe.py",)],
    "tune": [("probe.py",)],
    "report": [("run",)],
    "bundle": [("run", "--yes")],
    "check-env": [("shm",), ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--timeout", "1h")],
    "check-rendezvous": [("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--timeout", "1h")],
    "allreduce-bench": [("--nproc-per-node", "2"), ("--nproc-per-node", "1")],
    "check-consistency": [("--model", "probe:make"), ("--diff", "probe.py", "probe.py")],
    "check-data": [("--samples", "9", "--world-size", "2"), ("--dataset", "probe:make", "--world-size", "2")],
    "check-checkpoint": [("probe.py",)],
    "analyze": [("probe.py",)],
    "attach": [("--pid", "1")],
}
"""Command lines that would leave a file "started", say something on stdout, or wait for an hour, were they run."""
UNUSABLE = {
    "file/below": "Not a directory", "readonly/new": "Read-only file system", "full/new": "No space left on device",
}  # fmt: skip
FILES_ONLY = {"missing/new": "No such file or directory", ".": "Is a directory"}
REASONS = {"a file": "File exists", **UNUSABLE, **FILES_ONLY}


def outputs_of(verb):
    """Return the options that name what a verb writes."""
    declared = declared_by(load_verb(verb).Options)
    return [one for one in declared if one.type is Path and getattr(one.option, "panel", "") in {METRICS, REPORT}]


def cases():
    """Return each output of each verb in each unusable place; of a verb's further command lines one place is enough."""
    found = []
    outputs = [(verb, one) for verb in VERBS for one in outputs_of(verb)]
    for verb, one in outputs:
        is_folder = one.names[0] == "--report-dir"
        places = ["a file", *UNUSABLE] if is_folder else [*UNUSABLE, *FILES_ONLY]
        for number, line in enumerate(LINES[verb]):
            for place in places if number == 0 else places[1:2]:
                name = f"{verb} {' '.join(line)} {one.names[0]} {place}"
                found.append(pytest.param(verb, line, one.names[0], place, id=name))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the command lines name, a full file system and a read-only one where root may mount them."""
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "probe.py").write_text("open('started', 'w')\n")
    (folder / "file").write_text("")
    (folder / "a file").write_text("")
    mounted = [name for name, options in (("full", "size=4k"), ("readonly", "ro")) if mount(folder / name, options)]
    if "full" in mounted:
        (folder / "full" / "filling").write_bytes(b"x" * 4096)
    yield folder
    for name in mounted:
        subprocess.run(["umount", "-l", str(folder / name)], check=False, timeout=20)


def mount(place, options):
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0


def test_every_verb_that_writes_has_a_command_line_here():
    assert {verb for verb in VERBS if outputs_of(verb)} == set(LINES)


@pytest.mark.parametrize(("verb", "line", "option", "place"), cases())
def test_an_output_that_cannot_be_written_is_refused_before_anything_else(folder, run_in, verb, line, option, place):
    mounted = place.partition("/")[0]
    if mounted in {"full", "readonly"} and not os.path.ismount(folder / mounted):
        pytest.skip("only root may mount a file system")
    named = f"{place}.svg" if option == "--plot" and place != "." else place
    before = sorted(folder.rglob("*"))
    done = run_in(folder, verb, option, named, *line)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("ddpdoctor: error:") == len(done.stderr.strip().splitlines()) - 1 == 1, done.stderr
    assert place in done.stderr
    assert REASONS[place] in done.stderr or (option == "--plot" and place == ".")
    assert sorted(folder.rglob("*")) == before
