"""What changes would gain, and when gradients are ready, on real ranks."""

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.cli.report import read_run
from ddpdoctor.collect.recorded import read_gradient_times
from ddpdoctor.diagnose.compare import compare_reports
from ddpdoctor.model.codec import decode
from ddpdoctor.model.steps import GradientTimes
from ddpdoctor.model.tuning import SpeedComparison
from tests.scenarios.harmless.alone import read_rings
from tests.scenarios.running import JOBS, PATIENT, doctor, finish, free_port, hold_to_schema, run, start
from tests.scenarios.speed.catalog import run_way

# It is recorded on real ranks when each gradient is ready, in which buckets they go out, and what is unused.


pytestmark = pytest.mark.usefixtures("preloaded_python")

SLEEP_MS = 10.0
WEIGHT_BYTES, BIAS_BYTES = 16 * 16 * 4, 16 * 4


@pytest.mark.kept
@pytest.mark.parametrize(("unused", "expected"), [("never", [[0, 1]]), ("changing", []), ("fixed", [])])
def test_when_each_gradient_is_ready_and_whether_any_goes_unused(
    unused: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """A needless find_unused_parameters is reported; a branch that was left out once keeps that silent."""
    ran = run("gradient_times", tmp_path, "--speed", *PATIENT, ranks=2, args=(unused,))
    assert ran.status == 0, ran.stderr
    found = [one for one in ran.report["findings"] if one["kind"] == "find-unused-needless"]
    assert [one["ranks"] for one in found] == expected, ran.stderr
    assert all("find_unused_parameters" in one["fix"] for one in found)
    read = [read_gradient_times(list(ring.notes)) for ring in read_rings(tmp_path)]
    assert [len(models) for models in read if models] == [1, 1]
    for times in [models[0] for models in read if models]:
        if unused == "fixed":
            hold_to_layers(times)
        else:
            assert (times.finds_unused, times.same_unused) == (True, unused == "never"), times


def hold_to_layers(times: GradientTimes) -> None:
    """Each gradient is ready one layer after the other."""
    assert times.sizes_bytes == (WEIGHT_BYTES, BIAS_BYTES) * 5
    weights = [ready for ready in times.ready_ms[::2] if ready is not None]
    assert len(weights) == 5
    assert all(before - after >= SLEEP_MS for before, after in pairwise(weights)), times
    assert times.compute_end_ms >= weights[0] - 1
    assert times.bucket_bytes == (2 * (WEIGHT_BYTES + BIAS_BYTES),) * 2 + (WEIGHT_BYTES + BIAS_BYTES,)
    assert times.cap_bytes == int(0.002 * 2**20)
    assert (times.finds_unused, times.static_graph, times.unused_bytes) == (False, False, 0)


# What a change would gain is predicted from a real run, and again with a curve that allreduce-bench measured.


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a job whose buffers take long to send."""
    folder = tmp_path_factory.mktemp("slow") / "run"
    ran = finish(
        start(JOBS / "speed" / "buffers.py", folder, "--speed", *PATIENT, ranks=2, args=("mask",)), folder
    )  # fmt: skip
    assert ran.status == 0
    return folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a bench of this machine."""
    folder = tmp_path_factory.mktemp("bench")
    options = ("--max-size", "1MiB", "--factor", "32", "--iters", "3", "--warmup", "1", "--mode", "throughput")
    ran = doctor("allreduce-bench", "--nproc-per-node", "2", "--report-dir", str(folder / "run"), *options)
    assert (folder / "run" / "report.json").exists(), ran.stderr
    return folder / "run" / "report.json"


def predictions(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["setting"]: one for one in report["data"]["speed"]["predictions"]}


@pytest.mark.nightly
def test_a_run_predicts_what_its_buffers_cost(slow: Path) -> None:
    report = json.loads((slow / "report.json").read_text())
    (finding,) = (one for one in report["findings"] if one["kind"] == "buffer-broadcast")
    predicted = predictions(report)["buffers_off"]
    assert 1 - predicted["ratio"] == pytest.approx(finding["share"])
    shown = doctor("report", str(slow)).stdout
    assert "what a change would gain (predicted)" in shown
    assert "no broadcast of buffers" in shown


@pytest.mark.nightly
def test_a_measured_curve_is_used_in_place_of_the_run(slow: Path, bench: Path) -> None:
    ran = doctor("report", str(slow), "--curve", str(bench), "--format", "json")
    assert ran.returncode == 0, ran.stderr
    by_curve, by_run = predictions(json.loads(ran.stdout)), predictions(json.loads((slow / "report.json").read_text()))
    assert by_curve["buffers_off"] == by_run["buffers_off"]
    assert not any("fitted to this run" in one["assumes"] for one in by_curve.values())


@pytest.mark.nightly
def test_what_is_no_curve_is_refused(slow: Path, bench: Path) -> None:
    for arguments, says in (
        ((str(slow), "--curve", str(slow)), "is not a report of allreduce-bench"),
        ((str(slow), "--curve", "/nowhere"), "/nowhere does not exist"),
        ((str(bench), "--curve", str(bench)), "run"),
    ):
        ran = doctor("report", *arguments)
        assert ran.returncode == 2, arguments
        assert says in ran.stderr
        assert "Traceback" not in ran.stderr


# ``tune --scaling`` launches a job with several numbers of ranks, and says what more ranks cost.


JOB = JOBS / "speed" / "scaling.py"


def tune(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A command does not take torchrun's options.
    port = () if "--" in arguments else (f"--master-port={free_port()}",)
    return doctor("tune", *port, f"--report-dir={tmp_path / 'run'}", *arguments)


BATCHES = [("of_each_rank", "weak"), ("of_all_ranks", "strong")]


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "kind"), BATCHES)
def test_the_batch_of_a_rank_decides_which_efficiency_is_shown(tmp_path: Path, way: str, kind: str) -> None:
    ran = tune(tmp_path, "--scaling", "1,2", str(JOB), way)
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    hold_to_schema(report)
    scaling = report["data"]["scaling"]
    assert [(one["kind"], one["ranks"]) for one in scaling["launches"]] == [("alone", 1), ("share", 2), ("job", 2)]
    (row,) = scaling["rows"]
    assert row["kind"] == kind
    assert row["threads"] * row["contention"] * row["communication"] == pytest.approx(row["efficiency"])
    assert scaling["predicted"] or scaling["reason"]
    assert report["findings"] == []
    assert f"{kind} efficiency" in ran.stderr
    assert "scaling efficiency (measured)" in doctor("report", tmp_path / "run").stdout


def test_a_job_that_is_too_short_has_no_efficiency(tmp_path: Path) -> None:
    ran = tune(tmp_path, "--scaling", "1,2", str(JOB), "short")
    assert ran.returncode == 4
    assert "launch 1 has no result" in ran.stderr
    assert not (tmp_path / "run" / "report.json").exists()


# Two real runs compared: of a phase that changed, the change is told from the noise.


@pytest.mark.alone
@pytest.mark.nightly
def test_input_that_workers_prepare_takes_less_of_the_step(tmp_path: Path) -> None:
    runs = []
    for way in ("no_workers", "hidden"):
        (tmp_path / way).mkdir()
        runs.append((way, read_run(run_way(f"input_bound {way}", tmp_path / way).folder)))
    found = decode(SpeedComparison, compare_reports(*runs).data["comparison"])
    data = next(one.time for one in found.phases if one.phase == "data loading")
    assert data.is_change
    assert data.high_ms < 0
    assert {one.name: (one.first, one.second) for one in found.unequal}["loader workers per rank"][0] == "0"
