"""What a trial shows, from its blocks: one conclusion, whatever the settings did."""

import pytest

from ddpdoctor.model.findings import Place
from ddpdoctor.model.tuning import AGAIN, BASE, RatioRange, TrialRecord, TrialStop, TriedBlock, TuneVerdict
from ddpdoctor.rules.tuning.trial import (
    KNOBS,
    TITLES,
    check_noise,
    conclude,
    fix_of,
    plan_restarts,
    predict_restarts,
    title_of_setting,
)
from tests.rules.speed.jobs import rank, state

QUIET = {BASE: 1.0, AGAIN: 1.01}
CAP = "bucket_cap=1048576"
WHERE = (Place(rank=0, file="train.py", line=7, function="main"),)


def trial(ratios, wobble=(), late=(), refused=(), rounds=4):
    """Return a trial on two ranks in which a step of the base takes 100 ms.

    Args:
        ratios: By setting, its step in relation to that of the base.
        wobble: By round, what "again" takes more.
        late: Settings that were tried after the others.
        refused: Pairs of setting and reason.
        rounds: How often each was tried.
    """
    blocks = [
        TriedBlock(round=number + (rounds if name in late else 0), setting=name, ranks_ms=columns)
        for name, ratio in ratios.items()
        for number in range(rounds)
        for columns in [_steps(ratio + (wobble[number] if wobble and name == AGAIN else 0.0))]
    ]
    blocks += [TriedBlock(round=rounds + number, setting=BASE, ranks_ms=_steps(1.0)) for number in range(rounds)]
    settings = tuple(name for name in ratios if name not in late)
    return TrialRecord(settings=settings, late=late, rounds=rounds, blocks=tuple(blocks), refused=refused)


def _steps(ratio):
    """Return five steps of two ranks. In one of them a rank is late, which the median leaves out."""
    return ((90 * ratio,) * 5, (100 * ratio,) * 4 + (700 * ratio,))


def result_of(record, **more):
    assert record.has_result
    return conclude(record, **{"predictions": {}, **more})


def test_the_best_setting_is_the_line_to_change():
    result = result_of(trial({**QUIET, CAP: 0.7, "static_graph": 0.9}), where=WHERE)
    assert (result.verdict, result.step_ms, result.where) == (TuneVerdict.CHANGE, 100, WHERE)
    assert result.fix == "DistributedDataParallel(..., bucket_cap_mb=1)"
    assert result.conclusion == "bucket_cap_mb=1 makes the step 30% shorter (30% to 30%)"
    assert check_noise(result).problems == ()


@pytest.mark.parametrize(
    ("frameworks", "fix"),
    [
        ({"lightning"}, "DDPStrategy(bucket_cap_mb=1)"),
        ({"transformers", "accelerate"}, "TrainingArguments(ddp_bucket_cap_mb=1)"),
        ({"accelerate"}, "DistributedDataParallelKwargs(bucket_cap_mb=1)"),
    ],
)
def test_the_line_is_in_the_words_of_the_framework(frameworks, fix):
    assert result_of(trial({**QUIET, CAP: 0.7}), frameworks=frozenset(frameworks)).fix == fix


def test_effects_under_five_percent_are_not_worth_changing():
    result = result_of(trial({**QUIET, CAP: 0.96}))
    assert (result.verdict, result.conclusion, result.fix) == (
        TuneVerdict.NOTHING, "nothing here is worth changing", "",
    )  # fmt: skip


def test_a_gain_within_the_noise_is_none():
    result = result_of(trial({**QUIET, CAP: 0.85}, wobble=(0.2, -0.1, 0.0, 0.1)))
    assert result.verdict is TuneVerdict.NOISY
    assert [problem.summary for problem in check_noise(result).problems] == [
        "step times differ too much between rounds to measure what a setting gains"
    ]


def test_a_gain_above_the_noise_is_named_all_the_same():
    result = result_of(trial({**QUIET, CAP: 0.5}, wobble=(0.2, -0.1, 0.0, 0.1)))
    assert result.verdict is TuneVerdict.CHANGE
    assert check_noise(result).problems == ()


def test_what_trains_differently_is_never_the_line_to_change():
    result = result_of(trial({**QUIET, "bf16_autocast": 0.5, "accumulate=4": 0.6, CAP: 0.8}))
    assert result.fix == "DistributedDataParallel(..., bucket_cap_mb=1)"
    assert result.conclusion.endswith(
        "; autocast to bf16 makes it 50% shorter, but trains differently (changes numerics)"
    )
    alone = result_of(trial({**QUIET, "bf16_autocast": 0.5}))
    assert (alone.verdict, alone.fix) == (TuneVerdict.NOTHING, "")
    assert alone.conclusion.startswith("nothing here is worth changing; autocast to bf16 makes it 50% shorter")


def test_leaving_the_reduction_out_is_no_advice():
    result = result_of(trial({**QUIET, "unreduced": 0.4}))
    assert (result.verdict, result.conclusion) == (TuneVerdict.NOTHING, "nothing here is worth changing")


def test_with_accumulation_the_mean_counts_since_one_step_in_four_reduces():
    blocks = [
        TriedBlock(round=number, setting=name, ranks_ms=(steps,))
        for number in range(4)
        for name, steps in (
            (BASE, (100.0,) * 5),
            (AGAIN, (100.0,) * 5),
            ("accumulate=4", (40.0, 40.0, 40.0, 100.0) * 2),
        )
    ]
    record = TrialRecord(settings=(BASE, AGAIN, "accumulate=4"), rounds=4, blocks=tuple(blocks))
    assert result_of(record).rows[1].measured == RatioRange(ratio=0.55, low=0.55, high=0.55)


def test_a_setting_that_was_refused_has_its_reason_and_the_others_their_results():
    record = trial({**QUIET, CAP: 0.7}, refused=(("bf16_reduction", "torch has none for Gloo"),))
    rows = {row.setting: row for row in result_of(record).rows}
    assert (rows["bf16_reduction"].measured, rows["bf16_reduction"].reason) == (None, "torch has none for Gloo")
    assert rows[CAP].is_gain


def test_a_late_setting_that_stopped_the_job_leaves_the_others_their_results():
    record = trial({**QUIET, CAP: 0.7})
    cut = TrialRecord(settings=record.settings, late=("find_unused_off",), rounds=4, blocks=record.blocks)
    rows = {row.setting: row for row in result_of(cut).rows}
    assert rows["find_unused_off"].reason == "the job ended while it was tried"
    assert rows[CAP].is_gain


def test_late_settings_are_compared_with_the_base_of_their_own_rounds():
    result = result_of(trial({**QUIET, "find_unused_off": 0.8}, late=("find_unused_off",)))
    assert result.fix == "DistributedDataParallel(..., find_unused_parameters=False)"


def test_without_any_setting_there_is_nothing_to_say():
    record = trial(QUIET, refused=(("static_graph", "it does not fit this job"),))
    result = result_of(record)
    assert (result.verdict, result.conclusion) == (TuneVerdict.NOTHING, "no setting could be tried")


def test_a_trial_that_was_cut_short_has_no_result():
    record = trial({**QUIET, CAP: 0.7})
    for blocks in (record.blocks[1:], ()):
        cut = TrialRecord(settings=record.settings, rounds=4, blocks=blocks)
        assert not cut.has_result
    assert not TrialRecord().has_result


def test_predictions_stand_beside_what_was_measured():
    expected = RatioRange(ratio=0.8, low=0.7, high=0.9)
    rows = {row.setting: row for row in result_of(trial({**QUIET, CAP: 0.7}), predictions={CAP: expected}).rows}
    assert rows[CAP].predicted == expected
    assert rows[AGAIN].predicted is None


def test_each_setting_has_a_title_and_one_that_can_be_used_a_line():
    assert set(TITLES) - {AGAIN, "unreduced"} == set(KNOBS)
    for name in KNOBS:
        value = {"bucket_cap": "=524288", "accumulate": "=4", "workers": "=2", "threads": "=2"}.get(name, "")
        for frameworks in (frozenset(), *(frozenset({one}) for one in KNOBS[name] if one)):
            assert "{" not in title_of_setting(name + value) + fix_of(name + value, frameworks)
    assert title_of_setting("bucket_cap=524288") == "bucket_cap_mb=0.5"


def test_the_note_says_how_wide_the_noise_is():
    result = result_of(trial({**QUIET, CAP: 1.0}, wobble=(0.2, -0.1, 0.0, 0.1)))
    (problem,) = check_noise(result).problems
    assert "-9% to +21%" in problem.evidence[0]


# What is tried by restarts: what a running job cannot change, if the job's own record or the user calls for it.


DONE = TrialRecord(stop=TrialStop.DONE)
HOOK = "the script has registered a communication hook"
FIXED = TrialRecord(stop=TrialStop.CANNOT_SWITCH, reason=HOOK, fits=("bucket_cap=1048576", "buffers_off"))
WAITING = state(*(rank(n, {"data": 80.0, "forward": 20.0, "backward": 30.0, "exposed": 0.0}) for n in range(2)))
QUIET_RECORD = state(rank(0), rank(1))
MANY_THREADS = state(rank(0, threads=8), rank(1, threads=8))


@pytest.mark.parametrize(
    ("trial", "speed", "kinds", "only", "settings"),
    [
        (FIXED, QUIET_RECORD, (), (), ("bucket_cap=1048576", "buffers_off")),
        (FIXED, None, (), ("buffers_off",), ("buffers_off",)),
        (FIXED, WAITING, ("input-bound",), (), ("bucket_cap=1048576", "buffers_off", "workers=2", "workers=4")),
        (DONE, WAITING, ("input-bound",), (), ("workers=2", "workers=4")),
        (DONE, QUIET_RECORD, (), ("workers",), ("workers=1", "workers=2")),
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
    plan = plan_restarts(DONE, QUIET_RECORD, (), ("threads",))
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
