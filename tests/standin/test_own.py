"""What a GPU that is lent cannot show: devices that fail when they are asked to, two GPUs, NVML with faults."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.judging import Ran, assert_blamed, assert_recorded, assert_silent, outcomes, report_of
from tests.gpu.running import JOBS, ROOT
from tests.nvml_driver import compile_driver
from tests.scenarios.hosts import require
from tests.scenarios.running import clean_environment, free_port, marked_lines, words_of
from tests.standin import environment
from tests.standin.conftest import TORCH

pytestmark = pytest.mark.standin
LOST = {"214": "uncorrectable ECC error", "719": "unspecified launch failure"}


def assert_fault_of_rank_1(verdict: dict[str, Any]) -> None:
    """The script's own call raises the error, unless torch's watchdog sees it first and aborts the process."""
    assert (verdict["kind"] in {"crash", "killed"}, verdict["ranks"]) == (True, [1]), verdict


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("214", marks=pytest.mark.gpu_job("lost_214")),
        pytest.param("719", marks=[pytest.mark.gpu_job("lost_719"), pytest.mark.full]),
    ],
)
def test_lost(ran: Ran, code: str) -> None:
    """The device of rank 1 fails in a kernel; rank 0 waits for it on its own device."""
    report = report_of(ran(f"lost_{code}"))
    assert_fault_of_rank_1(report["verdict"])
    if report["verdict"]["kind"] == "crash":
        assert LOST[code] in report["verdict"]["summary"]
        assert any("GPU" in said for said in report["verdict"]["evidence"]), report["verdict"]
    assert_recorded(report)


XIDS = {"logged": "Xid 48 of this process", "fallen": "Xid 79 without a process", "innocent": "Xid 48 of process 1,"}


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu_job(f"lost_{name}")) for name in XIDS])
def test_xid(ran: Ran, name: str) -> None:
    """The kernel's log has the driver's words of the fault: the verdict has its number, and what to do with that GPU.

    Of another process's GPU the words are shown, and nothing is to be done with it.
    """
    require("unshare", "mount")
    verdict = report_of(ran(f"lost_{name}"))["verdict"]
    assert_fault_of_rank_1(verdict)
    assert any(XIDS[name] in said for said in verdict["evidence"]), verdict
    assert ("0000:1b:00.0" in verdict["fix"] or "reboot" in verdict["fix"]) is (name != "innocent"), verdict


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.gpu_job(f"stall_{n}")) for n in ("off", "detail")])
def test_no_data_move(ran: Ran, name: str) -> None:
    """Both ranks are in reduction 11, their kernels have started, and no data move: no rank is at fault."""
    verdict = assert_blamed(ran(f"stall_{name}"), "transport", [0, 1], "faults", "stall")
    assert "collective 11" in verdict["summary"]
    assert verdict["fix"].startswith("check in this order"), verdict["fix"]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.gpu_job(f"stall_{n}")) for n in ("healthy", "untimed", "compared")]
)
def test_a_reduction_that_takes_twice_the_hang_timeout_healthy(ran: Ran, name: str) -> None:
    """It is reported, and taken back when it moves again; the job is not stopped, timed or not, or under DETAIL.

    torch 2.15 does not tell then that the reduction is pending: no rank is said to be stuck in code of its own.
    """
    done = ran(f"stall_{name}")
    assert_silent(done)
    assert "withdrawn" in done.stderr
    assert "move again" in done.stderr
    assert "the report of DD611 transport is withdrawn" in done.stderr
    assert "DD601" not in done.stderr


STUCK = {
    "sleeper_timed": "sleeper",
    "spins": "sleeper",
    "limit_cleanup": "watchdog",
    "limit_blocking": "watchdog",
    "two_gpus_sleeper": "sleeper",
}


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in STUCK])
def test_stuck(ran: Ran, name: str) -> None:
    """Kernels that torch times.

    A host that waits for its device on a core of its own, as CUDA's does; an abort at the group's limit that leaves
    rank 0 alive, into an error; calls that wait for their device; a GPU for each rank.
    """
    assert_blamed(ran(name), "stuck", [1], STUCK[name])


@pytest.mark.full
@pytest.mark.gpu_job("watchdog_crowded")
def test_a_rank_that_sleeps_has_not_moved_when_it_gets_a_core(ran: Ran) -> None:
    """Threads of both ranks wait for a core after the report, which holds until torch ends the rank that waits."""
    done = ran("watchdog_crowded")
    print((done.folder / "waited").read_text())
    assert_blamed(done, "stuck", [1], "watchdog")
    assert "the job keeps running" in done.stderr
    assert "withdrawn" not in done.stderr


@pytest.mark.full
@pytest.mark.gpu_job("two_gpus_trains")
def test_a_gpu_for_each_rank_healthy(ran: Ran) -> None:
    """Replicas on two devices are equal."""
    report = assert_silent(ran("two_gpus_trains"))
    assert outcomes(report)["param-drift"] == "passed"


@pytest.mark.full
@pytest.mark.gpu_job("check_env_nvml")
def test_nvml(ran: Ran, tmp_path, monkeypatch) -> None:
    """check-env asks both torch's CUDA build and the driver, which agree on two GPUs; GPU 1 has faults."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compile_driver(tmp_path)))
    report = report_of(ran("check_env_nvml"))
    found = outcomes(report)
    assert "crashed" not in found.values()
    assert (found["gpu-count"], found["ecc-unc"]) == ("passed", "failed"), found


@pytest.mark.full
@pytest.mark.gpu_job("check_env_hung")
def test_a_driver_that_does_not_answer(ran: Ran) -> None:
    """check-env reports it after its limit, and the process that asked does not outlive it."""
    done = ran("check_env_hung")
    assert done.status == 1
    assert outcomes(report_of(done))["gpu-count"] == "failed"
    assert done.left == ""


@pytest.mark.full
def test_attach_asks_torch_what_is_pending(tmp_path: Path) -> None:
    """A job without ddpdoctor, which has the pipe of torch's flight recorder: attach names the rank that sleeps."""
    asked = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_", "TORCH_DIST_USE_NCCL2": "0"}
    asked |= dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), f"{tmp_path}/trace_")
    asked |= dict.fromkeys(
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"
    )  # torch before 2.9: the last
    (script, *function), python = words_of("sleeper", JOBS), str(environment.make(TORCH))
    launcher = (python, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    env = clean_environment(PYTHONPATH=str(ROOT), FAKECUDA_DEVICES="1", SEEDED="1", **asked)
    job = subprocess.Popen([*launcher, script, str(tmp_path / "result"), *function], env=env)
    attach = (sys.executable, "-m", "ddpdoctor", "attach", "--pid", str(job.pid), "--folder", str(tmp_path))
    report: dict[str, Any] = {}
    try:
        for _ in range(10):  # each takes seconds: the job has to come to its tenth step
            looked = subprocess.run([*attach, "--format", "json"], capture_output=True, text=True, check=False)
            report = json.loads(looked.stdout or "{}")
            if report.get("verdict"):
                break
    finally:
        job.terminate()
        job.wait(60)
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == ("stuck", [1]), verdict
    assert "all_reduce #11" in verdict["summary"], verdict
    assert verdict["where"][0]["line"] in marked_lines("sleeper", jobs=JOBS), verdict
