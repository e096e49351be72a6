"""What a trial shows, from its blocks: one conclusion, whatever the settings did."""

from ddpdoctor.model.findings import Place
from ddpdoctor.model.tuning import AGAIN, BASE, RatioRange, TrialRecord, TrialStop, TriedBlock
from ddpdoctor.rules.tuning.trial import KNOBS, TITLES, conclude, fix_of, title_of_setting
from tests.golden import table

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


def test_a_trial_that_was_cut_short_has_no_result():
    record = trial({**QUIET, CAP: 0.7})
    for blocks in (record.blocks[1:], ()):
        cut = TrialRecord(settings=record.settings, rounds=4, blocks=blocks)
        assert not cut.has_result
    assert not TrialRecord().has_result


def test_each_setting_has_a_title_and_one_that_can_be_used_a_line():
    assert set(TITLES) - {AGAIN, "unreduced"} == set(KNOBS)
    for name in KNOBS:
        value = {"bucket_cap": "=524288", "accumulate": "=4", "workers": "=2", "threads": "=2"}.get(name, "")
        for frameworks in (frozenset(), *(frozenset({one}) for one in KNOBS[name] if one)):
            assert "{" not in title_of_setting(name + value) + fix_of(name + value, frameworks)
    assert title_of_setting("bucket_cap=524288") == "bucket_cap_mb=0.5"


# What is tried by restarts: what a running job cannot change, if the job's own record or the user calls for it.


def record(ratios, **more):
    blocks = [
        TriedBlock(round=number, setting=name, ranks_ms=((100.0 * ratio,) * 5,))
        for name, ratio in ratios.items()
        for number in range(4)
    ]
    return TrialRecord(settings=tuple(ratios), rounds=4, blocks=tuple(blocks), stop=TrialStop.DONE, **more)


test_rows = table("tuning", "ddpdoctor.model.tuning ddpdoctor.rules.tuning.trial tests.rules.speed.jobs", globals())
