"""`allreduce-bench` from end to end, on real ranks with tiny sizes."""

import json
import os
import re
import signal
import sys

import jsonschema
import psutil
import pytest

from tests.scenarios.bandwidth.running import BENCH, FAULTS, QUICK, bench, by_hand, finish, start, torchrun
from tests.scenarios.running import SCHEMA, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")

SIZES = [1024, 2048, 4096]


def check_results(report, *, ranks, iterations=3):
    """Hold what every healthy quick run has to have."""
    data = report["data"]
    assert report["job"]["status"] == "finished"
    assert report["job"]["world_size"] == data["world_size"] == ranks
    assert [member["rank"] for member in data["members"]] == list(range(ranks))
    assert [row["rank"] for row in report["ranks"]] == list(range(ranks))
    latency = [one for one in data["results"] if one["mode"] == "latency"]
    throughput = [one for one in data["results"] if one["mode"] == "throughput"]
    assert [one["size_bytes"] for one in latency] == [one["size_bytes"] for one in throughput] == SIZES
    assert {one["iterations"] for one in latency} == {iterations}
    for one in data["results"]:
        assert one["wrong"] == 0
        assert one["count"] == one["size_bytes"] // 4
        assert one["algbw_gb_s"] == pytest.approx(one["size_bytes"] / one["p50_us"] / 1000)
        assert 0 < one["min_us"] <= one["p50_us"] <= one["p95_us"]
    return data


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two ranks in a folder, with all files that one can write."""
    folder = tmp_path_factory.mktemp("saved")
    done = bench(*QUICK, "--report-dir", "run", "--output", "table.txt", "--plot", "curve.svg", cwd=folder)
    assert (done.status, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_by_itself_it_starts_ranks_and_writes_its_files(saved):
    report = json.loads((saved / "run" / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    data = check_results(report, ranks=2)
    assert all(one["busbw_gb_s"] == one["algbw_gb_s"] for one in data["results"])  # 2 (n - 1) / n is 1
    assert data["settings"]["backend"] == "gloo"
    assert {member["variables"]["OMP_NUM_THREADS"] for member in data["members"]} == {"1"}
    table = (saved / "table.txt").read_text()
    assert re.search(r"4 KiB +1024 ", table)
    assert "busbw" in table
    assert "<svg" in (saved / "curve.svg").read_text()

    again = finish(start(*BENCH[:3], "report", "run", cwd=saved))
    shown, first = again.stdout.splitlines(), table.splitlines()
    assert shown[1] == f"{first[1]}; report in run"
    assert shown[2:8] == first[2:8]


def test_a_saved_run_is_compared_with_size_by_size(saved):
    done = bench(*QUICK, "--compare", "run", "--fail-below", "1%", "--format", "json", cwd=saved)

    assert done.status == 0
    changes = done.report["data"]["comparison"]["changes"]
    assert [(one["mode"], one["size_bytes"]) for one in changes if one["mode"] == "latency"] == [
        ("latency", size) for size in SIZES
    ]
    assert len(changes) == 6
    assert bench(*QUICK, "--report-dir", "run", cwd=saved).status == 2


def test_under_torchrun_rank_0_alone_reports(tmp_path):
    done = torchrun(*QUICK, "--format", "json", "--collective", "all_reduce", "--backend", "gloo", cwd=tmp_path)

    assert done.status == 0
    check_results(done.report, ranks=2)
    assert "ddpdoctor:" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_collectives_and_dtypes_each_have_their_rows():
    options = ("--collective", "all_reduce,all_gather", "--collective", "send_recv", "--dtype", "float32,bfloat16")
    done = finish(start(*BENCH, "--min-size", "4KiB", *QUICK, *options, "--format", "csv"))

    assert done.status == 0
    assert done.stderr.count("choose with --nproc-per-node") == 1
    header, *rows = [line.split(",") for line in done.stdout.splitlines()]
    assert {(row[0], row[1]) for row in rows} == {
        (collective, dtype)
        for collective in ("all_reduce", "all_gather", "send_recv")
        for dtype in ("float32", "bfloat16")
    }
    assert header[:6] == ["collective", "dtype", "redop", "mode", "in_place", "size_bytes"]


def test_an_altered_element_is_named_with_rank_index_expected_and_found():
    ran = bench(*QUICK, "--format", "json", PYTHONPATH=str(FAULTS), WRONG_RANK="1")
    report = ran.report
    verdict = report["verdict"]
    (wrong,) = report["data"]["wrong"]

    assert (ran.status, verdict["code"], verdict["kind"], verdict["ranks"]) == (1, "DD401", "wrong-data", [1])
    assert (wrong["rank"], wrong["size_bytes"], wrong["index"], wrong["count"]) == (1, 2048, 137, 1)
    assert wrong["found"] == wrong["expected"] + 1
    assert {row["wrong"] for row in report["data"]["results"] if row["size_bytes"] == 2048} == {1}
    assert {row["wrong"] for row in report["data"]["results"] if row["size_bytes"] != 2048} == {0}
    reported = " ".join([verdict["summary"], *verdict["evidence"]])
    assert all(word in reported for word in ("137", "2 KiB", "float32"))


# Ranks that do not agree, that Slurm starts, and that outlive who started them.


def test_a_rank_with_other_settings_is_named_with_its_values():
    done = by_hand(QUICK, (*QUICK, "--max-size", "64MiB", "--dtype", "bfloat16"), QUICK)

    assert [one.status for one in done] == [2, 2, 2]
    assert "--max-size: 4 KiB on ranks 0 and 2, 64 MiB on rank 1" in done[0].stderr
    assert "--dtype: float32 on ranks 0 and 2, bfloat16 on rank 1" in done[0].stderr
    assert "Nothing was measured" in done[0].stderr
    assert [(one.stdout, one.stderr) for one in done[1:]] == [("", ""), ("", "")]
    assert done[0].stdout == ""


def test_a_torch_that_cannot_be_imported_is_reported_once(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object')")
    done = bench(*QUICK, PYTHONPATH=str(tmp_path))

    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.count("torch cannot be imported: libcudnn.so.9: cannot open shared object") == 1
    assert "check-env" in done.stderr


def test_tasks_of_a_step_are_ranks(slurm):
    step = ("srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "ddpdoctor", "allreduce-bench")
    done = slurm.run(*step, *QUICK, "--format", "json", check=False, OMP_NUM_THREADS="1")

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    data = report["data"]
    assert data["hosts"] == ["dd0", "dd1"]
    assert [member["local_rank"] for member in data["members"]] == [0, 0]
    assert len(data["results"]) == 6

    wrong = slurm.run(*step, "--min-size", "2KiB", "--max-size", "1KiB", check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("--min-size 2 KiB is above --max-size 1 KiB") == 1


@pytest.mark.cold  # a forked Python has one more child
def test_ranks_end_with_the_ddpdoctor_that_started_them():
    process = start(*BENCH, "--nproc-per-node", "2", "--budget", "600s", "--max-size", "1KiB")
    ranks = []

    def has_ranks():
        ranks[:] = psutil.Process(process.pid).children()
        return len(ranks) == 2 and all("allreduce-bench" in rank.cmdline() for rank in ranks)

    try:
        assert wait_for(has_ranks)
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=200)
        assert alive == []
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        finish(process)
