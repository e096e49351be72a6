"""What a report says of the job's state: one that is made while the launcher lives claims no end."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.build import job_status
from ddpdoctor.model.facts import Life
from ddpdoctor.model.findings import Confidence, Finding, JobStatus, Judgment, Severity
from tests.rules.speed.jobs import job, rank


def judgment(*findings: tuple[str, str, Severity]) -> Judgment:
    made = [
        Finding(code=code, kind=kind, severity=severity, confidence=Confidence.HIGH, summary="s")
        for code, kind, severity in findings
    ]
    return Judgment(findings=tuple(made), checks=(), certain=False)


HANG = judgment(("DD601", "stuck", Severity.ERROR))
NAN = judgment(("DD504", "nonfinite-grad", Severity.ERROR))
AT_EXIT = judgment(("DD612", "exit-abort", Severity.INFO))


@pytest.mark.parametrize(
    ("life", "ended", "launcher_status", "judged", "status"),
    [
        (Life.RUNNING, False, None, HANG, JobStatus.RUNNING),
        (Life.RUNNING, False, None, NAN, JobStatus.RUNNING),
        (Life.EXITED, False, None, HANG, JobStatus.RUNNING),  # its ranks ended while the evidence was taken
        (Life.EXITED, False, None, NAN, JobStatus.RUNNING),
        (Life.EXITED, True, 0, NAN, JobStatus.FINISHED),
        (Life.EXITED, True, 1, NAN, JobStatus.FAILED),
        (Life.EXITED, True, 1, AT_EXIT, JobStatus.FINISHED),
    ],
)
def test_the_status(
    life: Life,
    ended: bool,  # noqa: FBT001 - a column of the table
    launcher_status: int | None,
    judged: Judgment,
    status: JobStatus,
) -> None:
    seen = replace(job(replace(rank(0), life=life)), ended=ended, launcher_status=launcher_status)
    assert job_status(seen, judged, hung=False, interrupted=False) is status
