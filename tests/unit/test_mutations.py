import ast

import pytest

from tests.bench.mutations import changes

SOURCE = '''"""A module."""

LIMIT = 30


def decide(values: list[3], limit=None):
    """Say what."""
    found = [value for value in values if value]  # ü: places count bytes
    if found and limit:
        raise ValueError(f"{found[7]}")
    return "é", len(found) <= LIMIT
'''
CASES = {
    "number": ("off by one: 30 -> 31", "LIMIT = (31)"),
    "comparison": ("off by one: len(found) <= LIMIT -> len(found) < LIMIT", '"é", (len(found) < LIMIT)'),
    "filter": ("negated: value", "if (not (value))]"),
    "condition": ("negated: found and limit", "if (not (found and limit)):"),
    "part of a condition": ("negated: limit", "found and (not (limit)):"),
    "statement": ('dropped: raise ValueError(f"{found[7]}")', "        (None)\n    return"),
    "return": ('dropped: return "é", len(found) <= LIMIT', '")\n    (None)\n'),
}


@pytest.mark.parametrize(("what", "part"), CASES.values(), ids=CASES)
def test_each_kind_of_change_is_made_in_its_place(what, part):
    (source,) = (change.source for change in changes(SOURCE) if change.what == what)
    assert part in source


def test_each_change_parses_and_differs():
    found = [change.source for change in changes(SOURCE)]
    trees = {ast.dump(ast.parse(source)) for source in [SOURCE, *found]}
    assert len(trees) == len(found) + 1


def test_texts_annotations_and_f_strings_stay():
    assert not any(
        change.what.startswith(("off by one: 3 ", "off by one: 7 ", 'dropped: """')) for change in changes(SOURCE)
    )
