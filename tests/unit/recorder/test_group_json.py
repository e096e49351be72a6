"""Long lists of members are parsed once and shared; all else is what plain JSON says."""

import json
from typing import Any

import pytest

from ddpdoctor.recorder.storage.group_json import parse_group_json

WORLD = list(range(400))


def entry(ranks: Any, **more: Any) -> bytes:
    return json.dumps({"groups": [{"name": "0", "ranks": ranks, "backend": "gloo", "enqueued": 7}], **more}).encode()


def ranks_in(data: bytes) -> Any:
    return parse_group_json(data)["groups"][0]["ranks"]


def test_equal_lists_of_members_are_one_tuple() -> None:
    first, second = ranks_in(entry(WORLD, pid=1)), ranks_in(entry(WORLD, pid=2))
    assert first == tuple(WORLD)
    assert first is second


def test_notes_and_several_groups_are_filled_in_order() -> None:
    evens = WORLD[::2]
    both = b"[%s, %s]" % (entry(WORLD), entry(evens))
    assert [note["groups"][0]["ranks"] for note in parse_group_json(both)] == [tuple(WORLD), tuple(evens)]


@pytest.mark.parametrize(
    "ranks", [[0, 1, 2], [*WORLD, "1"], [*WORLD, 1.5], [*WORLD, -1], [*WORLD, 2**70], [[0], *WORLD], [], None, -1]
)
def test_other_lists_stay_as_they_are(ranks: list[Any]) -> None:
    assert parse_group_json(entry(ranks)) == json.loads(entry(ranks))


def test_lists_that_are_no_members_stay_as_they_are() -> None:
    other = json.dumps({"handled": {"ranks": WORLD, "text": '"ranks": [1], "backend":'}, "groups": 3}).encode()
    assert parse_group_json(other) == json.loads(other)


def test_a_number_in_place_of_members_refers_to_no_list_beyond_the_last() -> None:
    groups = [{"ranks": WORLD, "backend": "gloo"}, {"ranks": -2}, {"ranks": 1}, "text"]
    data = json.dumps({"groups": groups}).encode()
    assert parse_group_json(data)["groups"][1:] == groups[1:]


@pytest.mark.parametrize("data", [b"", b'{"groups": [{"ranks": [' + b"1, " * 400, b"[" + b"1," * 2**20 + b"1]"])
def test_what_is_cut_off_or_too_large_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|more than"):
        parse_group_json(data)
