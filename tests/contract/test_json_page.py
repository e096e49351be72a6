"""docs/json.md describes the schema: the same fields, the same values, and the data of each verb."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest

from ddpdoctor.cli.listing import VERBS, load_verb
from ddpdoctor.cli.options import declared_by
from ddpdoctor.diagnose.bundles import DATA_KEYS
from ddpdoctor.report.contents import BUILDERS

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
SCHEMA = json.loads((files("ddpdoctor.report") / "schema.json").read_text(encoding="utf-8"))
OBJECTS = {
    "The report": SCHEMA, "A job": SCHEMA["$defs"]["job"], "A finding": SCHEMA["$defs"]["finding"],
    "A place": SCHEMA["$defs"]["place"], "A check": SCHEMA["$defs"]["check"], "A rank": SCHEMA["$defs"]["rankRow"],
}  # fmt: skip
"""The objects of the schema, by the heading under which the page describes them."""
NAME = re.compile(r"`([\w-]+)`")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Return the cells of the rows of a section's table."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


def allowed_values(described: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    for one in described["properties"].values():
        found |= {value for value in one.get("enum", ()) if value is not None}
    return found


@pytest.mark.parametrize("title", OBJECTS)
def test_the_page_has_the_fields_of_the_schema_and_no_others(title: str) -> None:
    named = [name for cells in rows(title) for name in NAME.findall(cells[0])]
    assert sorted(named) == sorted(OBJECTS[title]["properties"])


@pytest.mark.parametrize("title", OBJECTS)
def test_the_page_has_every_value_that_a_field_may_take(title: str) -> None:
    assert allowed_values(OBJECTS[title]) <= set(NAME.findall(section(title)))


def test_the_page_has_the_version_of_the_schema() -> None:
    version = SCHEMA["properties"]["schema_version"]["const"]
    assert [cells[1].strip() for cells in rows("The report") if "schema_version" in cells[0]] == [str(version)]


def test_the_page_has_the_data_of_each_verb() -> None:
    named = {name for cells in rows("What `data` holds") for name in NAME.findall(cells[1])}
    assert DATA_KEYS | BUILDERS.keys() <= named


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_that_writes_json_is_on_the_page(verb: str) -> None:
    formats = [get_args(one.type) for one in declared_by(load_verb(verb).Options) if one.field == "format"]
    assert not any("json" in choices for choices in formats) or f"[{verb}]({verb}.md)" in PAGE
