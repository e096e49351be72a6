"""What is tried by restarts: what a running job cannot change, if the job's own record or the user calls for it."""

import pytest

from ddpdoctor.model.tuning import AGAIN, BASE, RatioRange, TrialRecord, TrialStop, TriedBlock, TuneVerdict
from ddpdoctor.rules.tuning.restarts import plan_restarts, predict_restarts
from ddpdoctor.rules.tuning.result import conclude
from tests.rules.speed.jobs import rank, state

DONE = TrialRecord(stop=TrialStop.DONE)
HOOK = "the script has registered a communication hook"
FIXED = TrialRecord(stop=TrialStop.CANNOT_SWITCH, reason=HOOK, fits=("bucket_cap=1048576", "buffers_off"))
WAITING = state(*(rank(n, {"data": 80.0, "forward": 20.0, "backward": 30.0, "exposed": 0.0}) for n in range(2)))
QUIET = state(rank(0), rank(1))
MANY_THREADS = state(rank(0, threads=8), rank(1, threads=8))


@pytest.mark.parametrize(
    ("trial", "speed", "kinds", "only", "settings"),
    [
        (FIXED, QUIET, (), (), ("bucket_cap=1048576", "buffers_off")),
        (FIXED, None, (), ("buffers_off",), ("buffers_off",)),
        (FIXED, WAITING, ("input-bound",), (), ("bucket_cap=1048576", "buffers_off", "workers=2", "workers=4")),
        (DONE, WAITING, ("input-bound",), (), ("workers=2", "workers=4")),
        (DONE, QUIET, (), ("workers",), ("workers=1", "workers=2")),
        (DONE, None, (), ("workers",), ("workers=1", "workers=2")),
        (DONE, MANY_THREADS, ("cpu-oversubscribed",), (), ("threads=1",)),
        (DONE, MANY_THREADS, (), ("threads", "buffers_off"), ("threads=1",)),
    ],
)
def test_what_the_record_or_the_user_calls_for_is_tried(trial, speed, kinds, only, settings):
    plan = plan_restarts(trial, speed, kinds, only)
    assert plan.settings == settings
    assert plan.refused == ()
    assert plan.why


@pytest.mark.parametrize(
    ("trial", "kinds", "only"),
    [
        (DONE, (), ()),
        (DONE, ("straggler", "bucket-size"), ()),
        (DONE, ("input-bound",), ("static_graph",)),
        (TrialRecord(stop=TrialStop.DONE, fits=FIXED.fits), (), ()),
        (FIXED, (), ("static_graph",)),
    ],
)
def test_nothing_else_is_restarted(trial, kinds, only):
    assert plan_restarts(trial, WAITING, kinds, only) is None


def test_threads_that_are_right_already_are_not_tried():
    plan = plan_restarts(DONE, QUIET, (), ("threads",))
    assert (plan.settings, plan.refused) == ((), (("threads", "a rank has 1 already: the cores / the ranks"),))
    assert plan_restarts(DONE, None, (), ("threads",)).refused == (("threads", "unknown number of cores"),)


def test_the_reason_for_restarts_is_said():
    assert plan_restarts(FIXED, None, (), ()).why == f"the settings of this job cannot be changed while it runs: {HOOK}"
    several = TrialRecord(stop=TrialStop.SEVERAL_MODELS, models=2, fits=("static_graph",))
    assert plan_restarts(several, None, (), ()).why.endswith("there are 2 models of DistributedDataParallel")
    assert "input-bound" in plan_restarts(DONE, WAITING, ("input-bound",), ()).why


def test_workers_are_predicted_by_their_number():
    found = predict_restarts(WAITING, ("workers=2", "workers=4", "static_graph"))
    assert set(found) == {"workers=2", "workers=4"}
    assert found["workers=2"].ratio == pytest.approx(1 - 80 / 132.5, abs=0.02)
    assert found["workers=4"].ratio <= found["workers=2"].ratio
    assert predict_restarts(None, ("workers=2",)) == {}


def record(ratios, **more):
    blocks = [
        TriedBlock(round=number, setting=name, ranks_ms=((100.0 * ratio,) * 5,))
        for name, ratio in ratios.items()
        for number in range(4)
    ]
    return TrialRecord(settings=tuple(ratios), rounds=4, blocks=tuple(blocks), stop=TrialStop.DONE, **more)


def test_rows_of_the_running_job_and_of_restarts_stand_in_one_table_each_against_its_own_base():
    in_turns = record({BASE: 1.0, AGAIN: 1.0, "static_graph": 0.9})
    restarted = record({BASE: 2.0, AGAIN: 2.02, "workers=2": 1.0, "workers=4": 0.97}, by_restarts=True)
    result = conclude(in_turns, restarted, predictions={"workers=2": RatioRange(ratio=0.4, low=0.4, high=0.5)})
    rows = {(row.setting, row.by_restarts): row for row in result.rows}
    assert list(rows) == [
        (AGAIN, False), ("static_graph", False), (AGAIN, True), ("workers=2", True), ("workers=4", True)
    ]  # fmt: skip
    assert rows["workers=2", True].measured.ratio == pytest.approx(0.5)
    assert rows["workers=2", True].predicted.ratio == 0.4
    assert result.verdict is TuneVerdict.CHANGE
    assert result.noise.high == pytest.approx(1.01)
    assert result.step_ms == 100


def test_the_fewest_workers_that_gain_about_as_much_are_named():
    result = conclude(record({BASE: 1.0, AGAIN: 1.0, "workers=2": 0.32, "workers=4": 0.3}), predictions={})
    assert result.fix == "DataLoader(num_workers=2, persistent_workers=True)"
    more = conclude(record({BASE: 1.0, AGAIN: 1.0, "workers=2": 0.5, "workers=4": 0.3}), predictions={})
    assert more.fix == "DataLoader(num_workers=4, persistent_workers=True)"
    hugging = conclude(
        record({BASE: 1.0, AGAIN: 1.0, "workers=2": 0.5}), predictions={}, frameworks=frozenset({"transformers"})
    )
    assert hugging.fix.startswith("TrainingArguments(dataloader_num_workers=2")
