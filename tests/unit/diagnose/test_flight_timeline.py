"""The pictures of `analyze`: times come from the dumps of flight recorders, and waits from what all sources say."""

import pytest

from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.model.codec import decode
from ddpdoctor.model.pictures import RankWaits, Timeline
from ddpdoctor.report.text.report import render_text
from tests.flight_dumps import SCRIPT, recorders, write


def analyzed(folder):
    return analyze([str(folder)], ("ddpdoctor", "analyze"), "2026-01-01T00:00:00.000+00:00")


def hung(folder, late=1, world=3, calls=30):
    """All ranks make so many all_reduces, and all but one the next."""
    for one in recorders(world):
        for _ in range(calls):
            one.call()
        if one.rank != late:
            one.call(state="scheduled", line=41)
        write(folder, one.rank, one.body())
    return analyzed(folder)


def test_the_lanes_show_calls_and_the_wait_that_has_no_end(tmp_path):
    report = hung(tmp_path)
    timeline = decode(Timeline, report.data["timeline"])
    assert timeline.classes == ((0, 2), (1,))
    waiting, late, folded = timeline.lanes
    assert [one.number for one in waiting.detail] == list(range(1, 32))
    last = waiting.detail[-1]
    assert (last.kind.value, last.label, last.end_ms, last.shape) == ("wait", "all_reduce", None, "float32 [1024]")
    assert last.place == "train.py:41 in step"
    assert (late.detail[-1].kind.value, late.detail[-1].end_ms, late.blamed) == ("host", None, True)
    assert folded.detail == ()
    assert late.detail[0].end_ms - late.detail[0].start_ms == pytest.approx(0.002)
    (fault,) = timeline.events
    assert (fault.ranks, fault.at_ms) == ((1,), pytest.approx(29.002))
    assert timeline.started_at.startswith("2026-09-21T")
    text = render_text(report, width=None, color=False, run_dir=None)
    assert "DD601 stuck, rank 1 v" in text


def test_the_waits_are_those_of_the_sources(tmp_path):
    waits = decode(RankWaits, hung(tmp_path).data["waits"])
    assert [(one.ranks, one.blamed) for one in waits.classes] == [((0, 2), False), ((1,), True)]
    assert (waits.links, waits.classes[0].place) == (((0, 1),), f"{SCRIPT}:41 in step")


def test_two_groups_in_opposite_order_are_a_circle(tmp_path):
    pair = {"1": [0, 1], "2": [0, 1]}
    for one in recorders(2, pair):
        for _ in range(5):
            one.call()
        for group in ("1", "2") if one.rank == 0 else ("2", "1"):
            one.call(group=group, state="scheduled")
        write(tmp_path, one.rank, one.body())
    report = analyzed(tmp_path)
    assert report.verdict.kind == "deadlock"
    assert decode(RankWaits, report.data["waits"]).links == ((0, 1), (1, 0))


def test_calls_whose_ends_are_not_known_have_no_length(tmp_path):
    for one in recorders(2):
        for _ in range(5):
            one.call()
        body = one.body()
        for entry in body["entries"]:
            entry["time_discovered_completed_ns"] = "soon"
        write(tmp_path, one.rank, body)
    timeline = decode(Timeline, analyzed(tmp_path).data["timeline"])
    assert {one.end_ms - one.start_ms for one in timeline.lanes[0].detail[:-1]} == {0.0}


def test_without_dumps_there_is_no_timeline(tmp_path):
    (tmp_path / "job.log").write_text("[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad\n")
    data = analyzed(tmp_path).data
    assert (data["timeline"], data["waits"]) == (None, None)
