"""Launches that try settings: their order, what they take, and what is left of them if they end early."""

import json

import pytest

from ddpdoctor.diagnose.restarts import describe_plan, order_launches, read_launch, restarts_record
from ddpdoctor.model.tuning import AGAIN, BASE, RestartPlan, TriedBlock

PLAN = RestartPlan(settings=("workers=2", "threads=1"), why="the ranks wait", launch_s=10.0)
BLOCKS = [
    TriedBlock(round=number, setting=setting, ranks_ms=((1.0,),))
    for number in range(4)
    for setting in (BASE, AGAIN, "workers=2")
]


def test_each_round_has_the_scripts_settings_twice_and_each_other_one_once():
    order = order_launches(PLAN, 4)
    assert order == order_launches(PLAN, 4)
    for number in range(4):
        assert sorted(setting for one, setting in order if one == number) == sorted((BASE, AGAIN, *PLAN.settings))


def test_it_is_said_beforehand_how_many_launches_there_are_and_how_long_they_take():
    assert describe_plan(PLAN, 4) == (
        "the ranks wait. Tried by restarts: num_workers=2, OMP_NUM_THREADS=1, in 4 rounds: 16 launches, about 3 min "
        "in all"
    )


def test_a_setting_that_failed_leaves_the_others_their_results():
    record = restarts_record(PLAN, 4, BLOCKS, {"threads=1": "the job hung with it"}, "")
    assert record.has_result
    assert record.by_restarts
    assert record.refused == (("threads=1", "the job hung with it"),)


def test_launches_that_were_stopped_have_no_result():
    record = restarts_record(PLAN, 4, BLOCKS, {"threads=1": "the job hung with it"}, "interrupted")
    assert not record.has_result
    assert record.refused == (("workers=2", "interrupted"), ("threads=1", "the job hung with it"))


@pytest.mark.parametrize(("setting", "found"), [("workers=2", True), ("base", False)])
def test_a_launch_is_a_block_of_its_round(setting, found, tmp_path):
    (tmp_path / "tuning").mkdir()
    line = {"round": 0, "setting": "workers=2", "steps_ns": [2_000_000]}
    (tmp_path / "tuning" / "0.jsonl").write_text(json.dumps(line) + "\n")
    block = TriedBlock(round=3, setting="workers=2", ranks_ms=((2.0,),))
    assert read_launch(tmp_path, setting, 3) == (block if found else None)
