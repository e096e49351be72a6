"""Records of recorders and watchers are read field by field: what is damaged costs its field and no other."""

from __future__ import annotations

import pytest

from ddpdoctor.collect.recorded import read_all, read_frame, read_or_none, read_record
from ddpdoctor.collect.run.watched import WatchedChild, WatchedRank, parse_watch
from ddpdoctor.model.causes import ProcessCauses
from ddpdoctor.model.facts import BeforeCall, Raised
from ddpdoctor.model.reducer import Fault, ReducerSaid
from ddpdoctor.model.stacks import Frame

FRAME = Frame(file="train.py", line=7, function="main", user=True)
WRITTEN = {"f": "train.py", "l": 7, "n": "main", "u": 1}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (WRITTEN, FRAME),
        (["train.py", 7, "main"], FRAME),
        ({"f": "train.py", "l": "?"}, Frame(file="train.py", line=0, function="", user=False)),
        ({}, None),
        (None, None),
        ("train.py", None),
        (["train.py"], None),
    ],
)
def test_a_frame(entry, expected):
    assert read_frame(entry) == expected


def test_a_damaged_value_costs_its_field_and_no_other():
    note = {"type": "ValueError", "at": "then", "main": 1, "call": 3, "frames": [WRITTEN, 3, {}], "ranks": [1, "2", 3],
            "reducer": {"what": "unheard of"}}  # fmt: skip
    assert read_record(Raised, note, message="m") == Raised(
        type="ValueError", message="m", time_ns=0, thread_is_main=True, uncaught=False, in_call=None, frames=(FRAME,),
        of_ranks=(1, 3),
    )  # fmt: skip


def test_a_record_that_cannot_do_without_a_damaged_field_is_dropped():
    sound = {"what": "static", "names": ["w"], "count": 1, "of": 2, "frame": WRITTEN}
    found = ReducerSaid(what=Fault.STATIC, names=("w",), count=1, of=2, site=FRAME)
    assert read_all(ReducerSaid, [sound, {"what": 3}, "x"]) == (found,)
    assert read_or_none(ReducerSaid, {"what": 3}) is None


def test_what_the_watcher_saw_is_read_and_damaged_fields_are_named():
    row = {
        "state": "S",
        "frozen_since_ns": "long",
        "ended_ns": 2**70,
        "dumps": [[0, 9, 5], "x"],
        "children": [{"pid": 8, "ticks": 5, "state": "R", "name": "python"}],
        "before_call": {"until_ns": 3, "lines": [["train.py", 7, "main"]]},
        "causes": {"memory": 3, "children_count": 2},
    }
    assert parse_watch({"now_ns": 7, "processes": {"42": row, "x": row, "43": 3}}).processes == {
        42: WatchedRank(
            state="S",
            dumps=((0, 9, 5),),
            children=(WatchedChild(pid=8, ticks=5, state="R", name="python"),),
            before_call=BeforeCall(until_ns=3, lines=(FRAME,)),
            causes=ProcessCauses(children_count=2),
            why="what the watcher saw of it is damaged (ended_ns, frozen_since_ns)",
        )
    }
