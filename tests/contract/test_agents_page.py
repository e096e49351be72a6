"""docs/agents.md is short, and the commands, options and fields that it names are there."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.cli.listing import VERBS, load_verb
from ddpdoctor.cli.options import Option, declared_by

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
SCHEMA = json.loads((files("ddpdoctor.report") / "schema.json").read_text(encoding="utf-8"))
COMMANDS = re.findall(r"`ddpdoctor ([a-z-]+)([^`]*)`", PAGE)
FIELDS = re.findall(r"`((?:verdict|job)\.[a-z_.\[\]0-9]+)`", PAGE)


def test_it_is_read_in_one_go() -> None:
    assert len(PAGE.splitlines()) <= 60


@pytest.mark.parametrize(("verb", "words"), COMMANDS)
def test_a_command_has_the_options_that_it_is_given(verb: str, words: str) -> None:
    assert verb in VERBS
    declared = declared_by(load_verb(verb).Options)
    known = {name for one in declared if isinstance(one.option, Option) for name in one.names}
    assert {word for word in words.split() if word.startswith("--")} <= known


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_is_in_the_schema(path: str) -> None:
    objects: dict[str, Any] = {"verdict": SCHEMA["$defs"]["finding"], "job": SCHEMA["$defs"]["job"]}
    holder, _, name = path.partition(".")
    assert name.partition("[")[0] in objects[holder]["properties"]


def test_commands_and_fields_are_found_on_the_page() -> None:
    assert {verb for verb, _ in COMMANDS} >= {"attach", "report", "analyze", "wrap", "explain", "check-env"}
    assert len(FIELDS) > 5
