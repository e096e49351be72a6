"""What differs between two runs, from their reports."""

from dataclasses import replace

import pytest

from ddpdoctor.diagnose.differences import diff_reports
from ddpdoctor.model.codec import decode
from ddpdoctor.model.findings import Confidence, Finding, JobStatus, JobSummary, RankRow, Report, Severity
from ddpdoctor.model.run_differences import RunDifferences
from ddpdoctor.report.contents import read_content

HUNG = Finding(
    code="DD601",
    kind="stuck",
    severity=Severity.ERROR,
    confidence=Confidence.HIGH,
    summary="rank 1 is stuck",
    ranks=(1,),
)


def job(*, environment=(), torch="2.13.0", step_ms=10.0, command=("train.py",), ranks=2, verdict=None, **data):
    rows = tuple(RankRow(rank=n, local_rank=n, host="a", pid=None, state="exit status 0") for n in range(ranks))
    return Report(
        command=("ddpdoctor", "wrap", "--report-dir", f"run-{step_ms}", *command),
        started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z",
        job=JobSummary(world_size=ranks, nnodes=1, status=JobStatus.FINISHED, exit_status=0), verdict=verdict,
        findings=() if verdict is None else (verdict,), checks=(), ranks=rows, tool_version="1",
        data={
            "run": {"torch_version": torch, "environment": dict(environment), "debug_level": "OFF"},
            "steps": [{"rank": n, "step_ms": step_ms, "waited_ms": 1.0} for n in range(ranks)], **data,
        },
    )  # fmt: skip


def machine(**facts):
    return Report(
        command=("ddpdoctor", "check-env"), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z",
        job=None, verdict=None, findings=(), checks=(), ranks=(), tool_version="1",
        data={"hosts": ["a"], "nodes": [{"host": "a", "pid": 7, "processes": [{"variables": {}}], **facts}]},
    )  # fmt: skip


def differences(first, second):
    found = decode(RunDifferences, diff_reports(("A", first), ("B", second)).data["run_differences"])
    return [(one.topic.value, one.name, one.first, one.second) for one in found.differences]


def headline(first, second):
    return read_content(diff_reports(("A", first), ("B", second))).headline


def test_equal_runs_do_not_differ_and_the_topics_are_named() -> None:
    assert differences(job(step_ms=10.0), job(step_ms=10.9)) == []
    assert headline(job(), job()).startswith("no difference found (compared: version, variable, setting, machine, pace")


def test_the_most_telling_difference_comes_first() -> None:
    first = job(environment={"NCCL_DEBUG": "INFO"}.items())
    second = job(
        environment={"NCCL_IB_DISABLE": "1"}.items(), torch="2.12.0", step_ms=30.0, command=("train.py", "--lr=1"),
        verdict=HUNG,
    )  # fmt: skip
    assert differences(first, second) == [
        ("verdict", "DD601 stuck", "", "rank 1 is stuck"),
        ("version", "torch", "2.13.0", "2.12.0"),
        ("variable", "NCCL_IB_DISABLE", "", "1"),
        ("variable", "NCCL_DEBUG", "INFO", ""),
        ("setting", "command line", "wrap train.py", "wrap train.py --lr=1"),
        ("pace", "step in ms", "10", "30"),
    ]
    assert headline(first, second) == "the runs differ in torch: 2.13.0 in A, 2.12.0 in B, and 3 more differences"


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({"gpus": {"driver": "550.1"}}, {"gpus": {"driver": "560.2"}}, [("version", "gpus.driver", "550.1", "560.2")]),
        ({"limits": {"nofile": 1024}}, {"limits": {"nofile": 4096}}, [("machine", "limits.nofile", "1024", "4096")]),
        ({"load": {"one": 1.0}}, {"load": {"one": 9.0}}, []),
        ({"pid": 1}, {"pid": 2}, []),
        ({"gpus": [{"name": "H100"}]}, {"gpus": [{"name": "H100"}] * 2}, [("machine", "gpus.count", "1", "2")]),
    ],
)
def test_machines_are_compared_without_what_always_differs(first, second, found) -> None:
    assert differences(machine(**first), machine(**second)) == found


def test_the_same_verdict_with_other_numbers_is_no_difference() -> None:
    assert differences(job(verdict=HUNG), job(verdict=replace(HUNG, summary="rank 2 is stuck"))) == []


def test_bandwidth_model_and_data_are_compared() -> None:
    def run(plateau, tensors, delivered):
        stream = {"model": 1, "kinds": ["parameter"], "clock": "end", "tensors": tensors}
        return job(
            curves=[{"collective": "all_reduce", "plateau_gb_s": plateau}], consistency={"streams": [stream]},
            shares={"delivered": delivered},
        )  # fmt: skip

    assert differences(run(10.0, 8, 100), run(5.0, 9, 90)) == [
        ("model", "tensors of model 1", "8", "9"),
        ("data", "delivered", "100", "90"),
        ("bandwidth", "all_reduce in GB/s", "10", "5"),
    ]


def test_what_one_run_does_not_know_is_said() -> None:
    shown = diff_reports(("A", job()), ("B", machine()))
    assert "pace" in decode(RunDifferences, shown.data["run_differences"]).not_compared
