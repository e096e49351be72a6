"""Turns of phrase that are to go do not come back. ``python -m tests.english PATTERN`` names each place."""

import json

from tests import english


def test_no_pattern_is_found_more_often_than_before() -> None:
    held, found = json.loads(english.HELD.read_text()), english.find()
    assert held.keys() == found.keys()
    assert {name: len(places) for name, places in found.items() if len(places) > held[name]} == {}


def test_each_pattern_finds_its_habit_and_no_plain_sentence() -> None:
    import re

    said = {
        "fronted of": ("Of each try the first 3 steps are left out.", "The first 3 steps of each try are skipped."),
        "things that speak": ("the report says it", "the report shows it"),
        "ranks that come": ("a rank comes late", "a rank joins late"),
        "nobody, whom": ("nobody prepared it", "no process prepared it"),
        "is no": ("CPU use is no progress", "CPU use is not progress; it is no longer there"),
        "of its own": ("a limit of its own", "its own limit"),
        "and not": ("measured and not assumed", "measured instead of assumed"),
        "literary": ("it starts anew", "it starts again"),
    }
    assert said.keys() == english.PATTERNS.keys()
    for name, (turn, plain) in said.items():
        pattern = re.compile(english.PATTERNS[name], re.MULTILINE)
        assert (bool(pattern.search(turn)), bool(pattern.search(plain))) == (True, False), name
