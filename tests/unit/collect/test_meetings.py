"""Attempts of several nodes are the same where their agents met: each node counts its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.collect.meetings import NotThere, attempt_elsewhere


def log(folder: Path, *meetings: int | None) -> Path:
    """Write the log of a node whose attempts 0, 1, ... came from these meetings."""
    folder.mkdir()
    common = {"k": "rank", "local_rank": 0, "rank": 0, "pid": 5, "world_size": 2, "at": 9}
    rows = [{**common, "attempt": number, "meeting": meeting} for number, meeting in enumerate(meetings)]
    (folder / "agent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


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
