"""Attempts of several nodes are the same where their agents met: each node counts its own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpdoctor.collect.run.agent_log import read_entries
from ddpdoctor.collect.run.attempts import BEATS_NS, NotThere, attempt_elsewhere, came_later, was_gone
from ddpdoctor.collect.run.nodes import SavedRun, _took_part, read_job
from ddpdoctor.model.nodes import NodeSeen, NodesSeen, Presence
from tests.synthetic import Job, write_gathered


def log(folder: Path, *meetings: int | None, at: int = 9) -> list[dict[str, Any]]:
    """Return the log of a node whose attempts 0, 1, ... came from these meetings, as it is written and read."""
    folder.mkdir()
    common = {"k": "rank", "local_rank": 0, "rank": 0, "pid": 5, "world_size": 2, "at": at}
    rows = [{**common, "attempt": number, "meeting": meeting} for number, meeting in enumerate(meetings)]
    (folder / "agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_entries(folder / "agent.jsonl")


@pytest.mark.parametrize(
    ("own", "other", "attempt", "there"),
    [
        ((0, 1), (0, 1), None, None),
        ((0, 1), (0, 1), 0, 0),
        ((0, 1), (1,), None, None),
        ((0, 1, 2), (1, 2), 1, 0),
        ((1,), (0, 1, 2), None, 1),
        ((None, None), (None, None), 0, 0),
        ((None,), (), None, None),
        ((0,), (None,), 0, "not there"),
        ((0, 1), (1,), 0, "not there"),
        ((0, 1, 2), (0, 1), None, "not there"),
    ],
)
def test_which_attempt_of_another_node_is_the_same(
    tmp_path: Path, own: tuple[int | None, ...], other: tuple[int | None, ...], attempt: int | None, there: object
) -> None:
    folders = log(tmp_path / "own", *own), log(tmp_path / "other", *other)
    if there == "not there":
        with pytest.raises(NotThere):
            attempt_elsewhere(*folders, attempt)
    else:
        assert attempt_elsewhere(*folders, attempt) == there


def test_a_node_that_never_started_ranks_is_read_as_it_is(tmp_path: Path) -> None:
    assert attempt_elsewhere(log(tmp_path / "own", 0), log(tmp_path / "other"), None) is None


@pytest.mark.parametrize(
    ("meetings", "heard_ns", "gone"),
    [
        ((0, 1), 0, True),
        ((0, 1), BEATS_NS, False),
        ((0, 1), None, False),
        ((None,), 0, False),
        ((), 0, False),
    ],
)
def test_who_was_last_heard_before_an_attempt_is_no_part_of_it(
    tmp_path: Path, meetings: tuple[int | None, ...], heard_ns: int | None, *, gone: bool
) -> None:
    own = log(tmp_path / "own", *meetings, at=BEATS_NS + 5)
    assert was_gone(own, heard_ns, None) is gone


@pytest.mark.parametrize(
    ("others", "took_part"),
    [
        ([(0, (1,))], True),  # a static rendezvous starts again without it, and rank 1 is missing
        ([(0, (2,)), (BEATS_NS + 9, (1,))], False),  # an elastic job goes on without it
        ([(0, (1,)), (BEATS_NS + 9, ())], False),
    ],
)
def test_a_lost_node_whose_ranks_an_attempt_waits_for_is_part_of_it(
    tmp_path: Path, others: list[tuple[int, tuple[int, ...]]], *, took_part: bool
) -> None:
    own = SimpleNamespace(agent=log(tmp_path / "own", 0, 1, at=BEATS_NS + 5))
    saved = cast("SavedRun", SimpleNamespace(own=own, others={}))
    found = [(BEATS_NS + 9, ()), *others]
    nodes = tuple(
        NodeSeen(number=number, host="h", presence=Presence.HERE, heard_ns=heard_ns, ranks=ranks)
        for number, (heard_ns, ranks) in enumerate(found)
    )
    members = NodesSeen(expected=2, own=0, nodes=nodes)
    assert _took_part(saved, nodes[1], members, None) is took_part


@pytest.mark.parametrize(
    ("own", "other", "attempt", "later"),
    [
        ((0, 1), (1,), 0, True),
        ((0, 1), (1,), 1, False),
        ((0, 1), (0,), None, False),  # it may have died in the last one before it could send its log
        ((None,), (None,), 0, False),
        ((0,), (), 0, False),
    ],
)
def test_who_joined_later_is_no_part_of_what_was_before(
    tmp_path: Path, own: tuple[int | None, ...], other: tuple[int | None, ...], attempt: int | None, *, later: bool
) -> None:
    assert came_later(log(tmp_path / "own", *own), log(tmp_path / "other", *other), attempt) is later


def test_a_node_that_joined_later_is_in_the_second_attempt_of_the_first(tmp_path: Path) -> None:
    write_gathered(tmp_path, Job(world=4, steps=20, situation="healthy"), 2)
    for folder, before in ((tmp_path, 1), (tmp_path / "nodes" / "1", 0)):
        rows = [json.loads(line) for line in (folder / "agent.jsonl").read_text().splitlines()]
        later = [row | {"attempt": before, "meeting": 1} for row in rows]
        earlier = [row | {"pid": row["pid"] + 50, "meeting": 0, "world_size": 2} for row in rows] if before else []
        (folder / "agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in earlier + later))
    last, first = read_job(tmp_path), read_job(tmp_path, 0)
    assert [(rank.rank, rank.host, rank.attempt) for rank in last.ranks] == [
        (0, "node0", 1), (1, "node0", 1), (2, "node1", 1), (3, "node1", 1)
    ]  # fmt: skip
    assert [(rank.rank, rank.host, rank.attempt) for rank in first.ranks] == [(0, "node0", 0), (1, "node0", 0)]
    assert first.members is not None
    assert [node.number for node in first.members.nodes] == [0]
