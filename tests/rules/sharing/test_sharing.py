"""What the arithmetic of an epoch means: tables of plans in, findings out."""

import pytest

from ddpdoctor.diagnose.files import plan_report
from ddpdoctor.model.data import SamplingPlan, Sharing
from ddpdoctor.model.findings import Outcome, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.INFO


def judged(samples, world_size, batch_size, **more):
    return plan_report(
        SamplingPlan(samples=samples, world_size=world_size, batch_size=batch_size, **more), ("ddpdoctor",)
    )


@pytest.mark.parametrize(
    ("numbers", "more", "expected"),
    [
        ((64, 2, 8), {}, []),
        ((65, 2, 8), {"drop_last": True}, []),
        ((455, 2, 8), {}, [("DD705", N)]),
        ((66, 2, 8), {}, [("DD705", W)]),
        ((66, 2, 1), {}, []),
        ((10, 2, 8), {"drop_last": True}, [("DD705", E)]),
        ((65, 2, 8), {"sharing": Sharing.SPLIT}, [("DD704", E), ("DD705", W)]),
        ((66, 2, 4), {"sharing": Sharing.SPLIT, "drop_last": True}, []),
        ((64, 2, 8), {"sharing": Sharing.NONE}, [("DD701", E)]),
        ((64, 1, 8), {"sharing": Sharing.NONE}, []),
        ((70, 2, 8), {"drop_last": True, "shuffle": False}, [("DD703", N)]),
        ((64, 2, 8), {"accumulation": 3}, [("DD706", N)]),
        ((64, 2, 8), {"accumulation": 4}, []),
    ],
)
def test_a_plan_has_its_findings(numbers, more, expected):
    report = judged(*numbers, **more)
    assert [(finding.code, finding.severity) for finding in report.findings] == expected


def test_who_ends_early_is_named():
    (finding, *_) = judged(9, 4, 2, sharing=Sharing.SPLIT).findings
    assert finding.ranks == (1, 2, 3)
    assert finding.summary.startswith("rank 0 has 2 batches, but ranks 1-3 have 1:")


def test_every_check_says_what_it_saw():
    checks = judged(455, 2, 8, accumulation=4).checks
    assert [check.code for check in checks] == ["DD701", "DD703", "DD704", "DD705", "DD706"]
    assert all(check.seen for check in checks)
    assert checks[-1].seen == "29 batches are 7 steps of 4 batches, 1 batch is left"
    assert checks[-1].outcome is Outcome.PASSED  # what it found is a note
