"""What the ranks of a trial wrote is read, also where a file is cut off or damaged."""

import json

import pytest

from ddpdoctor.collect.run.trial_record import read_trial
from ddpdoctor.model.tuning import TrialRecord, TrialStop, TriedBlock

PLAN = {"plan": ["base", "again"], "rounds": 1, "forwards": 1, "needs": 26}
LINES = [
    PLAN,
    {"tries": "again", "round": 0},
    {"round": 0, "setting": "again", "steps_ns": [2_000_000, 3_000_000]},
    {"tries": "base", "round": 0},
    {"round": 0, "setting": "base", "steps_ns": [1_000_000, 4_000_000]},
    {"end": "done", "steps": 26},
]


def write(folder, *ranks):
    (folder / "tuning").mkdir(exist_ok=True)
    for number, lines in enumerate(ranks):
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        (folder / "tuning" / f"{number}.jsonl").write_text(text)


def test_blocks_of_all_ranks_stand_together(tmp_path):
    write(tmp_path, LINES, LINES)
    trial = read_trial(tmp_path)
    assert trial.blocks[0] == TriedBlock(round=0, setting="again", ranks_ms=((2.0, 3.0), (2.0, 3.0)))
    assert (trial.stop, trial.needed_steps, trial.has_result) == (TrialStop.DONE, 26, True)


def test_a_block_that_one_rank_did_not_end_is_left_out(tmp_path):
    write(tmp_path, LINES, LINES[:4])
    trial = read_trial(tmp_path)
    assert [block.setting for block in trial.blocks] == ["again"]
    assert (trial.trying, trial.has_result) == ("base", False)


@pytest.mark.parametrize(
    "rest", ['{"round": 0, "setti', "null\n", "[1]\n", '{"round": 0, "steps_ns": ["x"]}\n', "\0\n"]
)
def test_a_damaged_line_costs_only_itself(rest, tmp_path):
    write(tmp_path, [*LINES[:3], rest], [*LINES[:3], rest])
    trial = read_trial(tmp_path)
    assert ([block.setting for block in trial.blocks], trial.stop) == (["again"], TrialStop.CUT_SHORT)


def test_a_rank_that_follows_another_does_not_say_how_the_trial_ended(tmp_path):
    write(tmp_path, [PLAN, {"end": "with another rank"}], [PLAN, {"end": "cannot switch", "reason": "a hook"}])
    trial = read_trial(tmp_path)
    assert (trial.stop, trial.reason) == (TrialStop.CANNOT_SWITCH, "a hook")


def test_the_reason_of_the_rank_that_refused_counts(tmp_path):
    other = {"refused": "static_graph", "reason": "another rank refuses it"}
    own = {"refused": "static_graph", "reason": "RuntimeError: no"}
    write(tmp_path, [PLAN, other], [PLAN, own], [PLAN, other])
    assert read_trial(tmp_path).refused == (("static_graph", "RuntimeError: no"),)


def test_a_launch_with_one_setting_has_a_block_and_no_plan(tmp_path):
    lines = [
        {"launch": "base", "fits": ["static_graph"], "forwards": 1, "needs": 30},
        {"round": 0, "setting": "base", "steps_ns": [2_000_000]},
        {"end": "cannot switch", "reason": "a hook"},
    ]
    write(tmp_path, lines, lines)
    trial = read_trial(tmp_path)
    assert (trial.fits, trial.needed_steps, trial.forwards, trial.has_result) == (("static_graph",), 30, 1, False)
    assert trial.blocks == (TriedBlock(round=0, setting="base", ranks_ms=((2.0,), (2.0,))),)


def test_a_run_without_a_trial_has_an_empty_record(tmp_path):
    assert read_trial(tmp_path) == TrialRecord()
