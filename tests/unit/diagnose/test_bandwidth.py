"""From a bench to its report and exit status."""

import json
from dataclasses import replace

import pytest

from ddpdoctor.diagnose.bandwidth import (
    BenchReportOptions,
    build_report,
    check_ranks,
    exit_status,
    read_baseline,
)
from ddpdoctor.model.bandwidth import Advice, Comparison, Curve, Ending, Measurement, Member, Position, Stop, Wrong
from ddpdoctor.model.codec import decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Check, JobStatus, Outcome, Severity
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.rules.bandwidth.curves import Baseline
from tests.rules.bandwidth.build import GIB, H200, MIB, bench, members, row, sweep, upto

FULL = sweep(upto(H200, GIB))
SLOW = sweep({size: gb_s / 2 for size, gb_s in upto(H200, GIB).items()})
NOISY = sweep({MIB: 1.0, 2 * MIB: 1.0}, noise=0.2)
CODES = ["DD401", "DD402", "DD403", "DD404", "DD405", "DD406"]
WRONG = Wrong(
    rank=3, host="node0", collective=FULL[0].collective, dtype="float32", redop="sum", in_place=False, size_bytes=MIB,
    index=5, expected=6.0, found=7.0, count=1,
)  # fmt: skip


def cpus(rows=(), **changes):
    return bench(rows, device="cpu", name="AMD EPYC", **changes)


def position(rank, **changes):
    given = {"phase": "measure", "what": "all_reduce float32 1 MiB", "op": "all_reduce", "inside": True, **changes}
    return Position(rank=rank, group=(0, 1), calls=7, stale_s=70.0, **given)


def checks(report):
    return {check.code: check.outcome for check in report.checks}


def test_a_healthy_bench():
    report = build_report(bench(FULL), BenchReportOptions(command=("ddpdoctor", "allreduce-bench", "--api-key", "x")))

    assert (report.findings, report.verdict) == ((), None)
    assert [check.code for check in report.checks] == CODES
    assert all(check.group == "bandwidth" for check in report.checks)
    assert checks(report)["DD405"] is Outcome.PASSED
    assert report.job is not None
    assert (report.job.world_size, report.job.nnodes, report.job.status) == (8, 1, JobStatus.FINISHED)
    assert [(one.rank, one.host, one.state, one.gpu) for one in report.ranks][3] == (3, "node0", "finished", 3)
    assert report.command[-1] == "***"
    assert report.started_at <= report.ended_at
    assert exit_status(report, Severity.INFO) == 0


def test_the_report_holds_all_that_was_measured_and_what_follows_and_comes_back_from_json():
    made = replace(bench(FULL, wrong=(WRONG,)), notes=("warm",))
    baseline = Baseline(name="monday.json", results=FULL, members=made.members, settings=made.settings)

    report = build_report(made, BenchReportOptions(baseline=baseline, fail_below=0.9, model_size=350_000_000))
    data = parse_report(render_json(report)).data

    assert data["verb"] == "allreduce-bench"
    assert (data["world_size"], data["hosts"], data["notes"]) == (8, ["node0"], ["warm"])
    assert tuple(decode(Measurement, one) for one in data["results"]) == FULL
    assert tuple(decode(Member, one) for one in data["members"]) == made.members
    assert [decode(Wrong, one) for one in data["wrong"]] == [WRONG]
    assert [decode(Curve, one).plateau_from_bytes for one in data["curves"]] == [256 * MIB]
    assert len(decode(Comparison, data["comparison"]).changes) == len(FULL)
    assert decode(Advice, data["advice"]).model_bytes == 1_400_000_000
    empty = {name for name, value in data.items() if value in ([], None)}
    assert empty == {"arrivals", "pairs", "nodes", "left_out", "loads", "nccl_logs", "reasons", "stop"}


def test_nothing_measured_is_a_report_too():
    report = build_report(cpus(), BenchReportOptions())

    assert set(checks(report).values()) == {Outcome.SKIPPED}
    assert report.data["advice"] is None
    assert exit_status(report, Severity.INFO) == 0


@pytest.mark.parametrize(
    ("made", "wanted", "fail_on", "status"),
    [
        (bench(FULL), BenchReportOptions(), Severity.ERROR, 0),
        # The table warns.
        (bench(SLOW), BenchReportOptions(), Severity.ERROR, 0),
        (bench(SLOW), BenchReportOptions(), Severity.WARNING, 1),
        (bench(SLOW), BenchReportOptions(use_reference=False), Severity.WARNING, 0),
        (bench(SLOW), BenchReportOptions(expect_gb_s=400.0), Severity.ERROR, 1),
        (bench(SLOW), BenchReportOptions(expect_gb_s=400.0), None, 0),
        # What was demanded and cannot be determined
        (cpus(NOISY), BenchReportOptions(expect_gb_s=1.0), Severity.ERROR, 4),
        (cpus(NOISY), BenchReportOptions(expect_gb_s=1.0), None, 4),
        (cpus(NOISY), BenchReportOptions(expect_gb_s=1.0), Severity.INFO, 1),
        (cpus(NOISY), BenchReportOptions(), Severity.INFO, 0),
        (cpus(), BenchReportOptions(expect_gb_s=1.0), Severity.ERROR, 4),
        (bench(FULL, wrong=(WRONG,)), BenchReportOptions(), Severity.ERROR, 1),
    ],
)
def test_exit_status(made, wanted, fail_on, status):
    assert exit_status(build_report(made, wanted), fail_on) == status


def test_wrong_data_are_the_verdict_before_any_figure():
    report = build_report(bench(SLOW, wrong=(WRONG,)), BenchReportOptions(expect_gb_s=400.0))

    assert [finding.code for finding in report.findings] == ["DD401", "DD405"]
    assert report.verdict is not None
    assert (report.verdict.kind, report.verdict.ranks, report.verdict.hosts) == ("wrong-data", (3,), ("node0",))


def test_noise_is_never_the_verdict():
    report = build_report(cpus(NOISY), BenchReportOptions(expect_gb_s=1.0))

    assert [finding.kind for finding in report.findings] == ["too-noisy"]
    assert report.verdict is None


def test_against_a_saved_run():
    saved = parse_report(render_json(build_report(cpus(sweep({MIB: 1.0, 2 * MIB: 2.0})), BenchReportOptions())))
    baseline = read_baseline(saved, "monday.json")
    now = cpus([row(MIB, 1.0), row(2 * MIB, 1.0)])

    shown = build_report(now, BenchReportOptions(baseline=baseline))
    demanded = build_report(now, BenchReportOptions(baseline=baseline, fail_below=0.9))

    assert shown.findings == ()
    assert exit_status(shown, Severity.INFO) == 0
    assert [finding.kind for finding in demanded.findings] == ["below-reference"]
    assert "throughput of 2 MiB reaches 50%" in demanded.findings[0].summary
    assert exit_status(demanded, Severity.ERROR) == 1


def test_a_saved_run_of_another_number_of_ranks_is_inconclusive():
    four = cpus(sweep({MIB: 1.0}, ranks=4), ranks=4)
    baseline = Baseline(name="m.json", results=four.results, members=four.members, settings=four.settings)

    report = build_report(cpus(sweep({MIB: 1.0})), BenchReportOptions(baseline=baseline, fail_below=0.9))

    assert checks(report)["DD405"] is Outcome.INCONCLUSIVE
    assert exit_status(report, Severity.ERROR) == 4


def test_an_interrupted_bench_keeps_what_it_has():
    made = replace(bench(FULL[:5]), stop=Stop(ending=Ending.INTERRUPTED, phase="measure", signal="SIGINT"))

    report = build_report(made, BenchReportOptions(expect_gb_s=400.0))

    assert report.job is not None
    assert report.job.status is JobStatus.INTERRUPTED
    assert len(report.data["results"]) == 5
    assert report.data["stop"]["signal"] == "SIGINT"
    assert exit_status(report, Severity.ERROR) == 130


def test_where_each_rank_was_when_the_bench_stopped():
    positions = (
        position(0, states={"0": "S", "1": "T", "2": "", "3": "S"}),
        position(4, inside=False, stack=("bench.py:3 main",)),
        position(5, error="RuntimeError: no route to host", inside=False),
    )
    made = replace(cpus(ranks=6), stop=Stop(ending=Ending.HUNG, phase="measure", positions=positions))

    report = build_report(made, BenchReportOptions())

    assert [one.state for one in report.ranks] == [
        "in all_reduce",
        "stopped",
        "gone",
        "did not answer",
        "between calls, in phase measure",
        "raised RuntimeError: no route to host",
    ]
    assert report.ranks[4].stack == ("bench.py:3 main",)
    assert report.job is not None
    assert report.job.status is JobStatus.HUNG
    assert report.verdict is not None
    assert report.verdict.code.startswith("DD6")
    assert exit_status(report, Severity.ERROR) == 1


def test_a_bench_that_did_not_end_is_no_success_whatever_is_found():
    made = replace(bench(FULL), stop=Stop(ending=Ending.FAILED, phase="measure"))

    assert exit_status(build_report(made, BenchReportOptions()), None) == 4


def test_a_part_that_raises_is_a_crashed_check_and_the_rest_stays():
    # A row of which the count is nothing, as no bench measures it, but a damaged file may hold.
    made = cpus([replace(row(MIB, 1.0), count=0), row(2 * MIB, 1.0)])

    report = build_report(made, BenchReportOptions(model_size=1000))

    assert len(report.data["results"]) == 2
    assert [check.id for check in report.checks if check.outcome is Outcome.CRASHED] == ["advice"]
    assert "ZeroDivisionError" in next(check.reason for check in report.checks if check.id == "advice")
    assert exit_status(report, Severity.ERROR) == 3


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data.update(verb="check-env"), "is not a report of allreduce-bench"),
        (lambda data: data.update(results=[]), "has no measurements"),
        (lambda data: data.update(results="x"), "cannot be read: a list was expected"),
        (lambda data: data["results"][0].pop("p50_us"), "cannot be read: p50_us: it is missing"),
        (lambda data: data["results"][0].update(p50_us=0), "has an invalid time"),
        (lambda data: data["results"][0].update(p50_low_us="nan"), "has an invalid time"),
        (lambda data: data.pop("members"), "cannot be read"),
    ],
)
def test_a_damaged_baseline_says_what_is_wrong_with_it(spoil, says):
    plain = json.loads(render_json(build_report(cpus(sweep({MIB: 1.0})), BenchReportOptions())))
    spoil(plain["data"])

    with pytest.raises(UserError) as raised:
        read_baseline(parse_report(json.dumps(plain)), "monday.json")

    assert says in raised.value.message
    assert raised.value.status == 2


def test_checks_of_a_report_are_those_of_the_rules():
    report = build_report(bench(FULL), BenchReportOptions())

    assert report.checks[0] == Check(
        id="wrong-data", code="DD401", group="bandwidth", outcome=Outcome.PASSED,
        seen="the results of 16 measured cases are correct",
    )  # fmt: skip


def test_hosts_are_in_the_order_of_their_ranks():
    report = build_report(replace(bench(FULL), members=tuple(reversed(members(8, 2)))), BenchReportOptions())

    assert report.data["hosts"] == ["node1", "node0"]
    assert report.job is not None
    assert report.job.nnodes == 2


def test_a_baseline_of_another_number_of_ranks_is_wrong_use():
    baseline = Baseline(name="m.json", results=FULL, members=members(8), settings=bench().settings)

    check_ranks(baseline, 8)
    with pytest.raises(UserError, match=r"--compare m\.json is a run of 8 ranks, and this one has 2"):
        check_ranks(baseline, 2)
