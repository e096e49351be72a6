"""The real pynvml in the real child, against a driver's library that we compile; and hangs of the real kernel."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.collect.bounded import run_child, start_program, wait_for_program
from ddpdoctor.collect.gpus import GpuCount, count_gpus, gpus_of, read_gpus, read_uuids
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.reading import NotRead, Why
from tests.nvml_driver import compile_driver
from tests.scenarios.check_env.running import check_env

MODULE = "ddpdoctor.collect.gpus"
KMSG = Path("/dev/kmsg")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Return the folder of a libnvidia-ml.so.1 that answers as a driver with two GPUs."""
    return compile_driver(tmp_path_factory.mktemp("driver"))


def machine(driver, state=""):
    """Return the variables of a machine that has this driver."""
    return {"LD_LIBRARY_PATH": str(driver), "FAKE_NVML": state}


def ask_nvml(driver, state="", limit_s=60.0):
    return gpus_of(run_child(MODULE, (), {**os.environ, **machine(driver, state)}, limit_s), limit_s)


def test_structures_come_through_ctypes(driver):
    gpus = ask_nvml(driver)
    assert (gpus.driver, gpus.cuda_driver) == ("580.95.05", "13.0")
    first, second = gpus.devices
    assert (first.bus_id, second.bus_id) == ("0000:1b:00.0", "0000:43:00.0")
    assert (first.sram_threshold_exceeded, second.sram_threshold_exceeded) == (False, True)
    assert (first.fabric_state, first.fabric_status) == ("completed", "success")
    assert (first.memory_total_bytes, first.memory_used_bytes) == (80 * 2**30, 4 * 2**20)
    assert (second.remapped_uncorrectable, second.remap_pending) == (1, True)
    assert [link.index for link in second.nvlinks if not link.active] == [7]
    assert (first.temperature_c, first.persistence, first.mig_enabled) == (None, None, None)
    assert [(pair.ancestor, pair.p2p) for pair in gpus.pairs] == [("node", "ok")]
    (process,) = first.processes
    assert (process.pid, process.used_bytes, process.ours) == (os.getpid(), 600 * 2**20, True)


def test_a_gpu_that_hangs_is_abandoned_and_named(driver):
    gpus = ask_nvml(driver, "hang", limit_s=5.0)
    assert [gpu.error for gpu in gpus.devices] == [None, "it did not answer in time"]
    assert gpus.devices[0].uuid.startswith("GPU-0")


def test_a_lost_gpu_a_library_that_does_not_fit_the_driver_and_one_without_a_driver(driver):
    assert [gpu.error for gpu in ask_nvml(driver, "lost").devices] == [None, "GPU is lost"]
    assert ask_nvml(driver, "mismatch").init_error == "LIB_RM_VERSION_MISMATCH"
    with pytest.raises(NotRead) as missing:
        ask_nvml(driver, "unloaded")
    assert missing.value.unread.why is Why.ABSENT


def test_gpus_are_counted_and_a_driver_that_cannot_be_asked_is_not_taken_for_none(driver):
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    counts = [
        count_gpus(env | {"FAKE_NVML": state, **visible}) for state, visible in (
            ("", {}), ("", {"CUDA_VISIBLE_DEVICES": "1"}), ("lost", {}), ("unloaded", {}), ("mismatch", {})
        )
    ]  # fmt: skip
    unknown = GpuCount(unknown="NVML returned no answer: it says LIB_RM_VERSION_MISMATCH")
    assert counts == [*(GpuCount(count=count) for count in (2, 1, 2, 0)), unknown]


@pytest.mark.parametrize("state", ["dead", "hang"])
def test_a_count_that_hangs_is_given_up(driver, state):
    system = System(env={**os.environ, **machine(driver, state)})
    with pytest.raises(NotRead) as missing:
        read_uuids(system, 2.0)
    assert missing.value.unread.why is Why.TIMEOUT
    assert missing.value.unread.reason.startswith(
        "NVML did not answer within 2 s: the NVIDIA driver or a GPU hangs. See"
    )


def test_a_plan_that_is_in_a_hurry_keeps_what_nvml_said_by_then(driver):
    """As of `wrap`, which reads the machine of a job that hangs."""
    system = System(env={**os.environ, **machine(driver, "hang")})
    gpus = read_gpus(system, ReadingPlan(sections=frozenset(), limit_s=6.0))
    assert [gpu.error for gpu in gpus.devices] == [None, "it did not answer in time"]


def test_check_env_finds_what_is_wrong(driver):
    kinds = ("ecc-unc", "row-remap", "sram-threshold", "nvlink", "other-procs")
    seen = check_env(*kinds, torch=True, **machine(driver))
    found = {kind: summary for kind, _, summary, _ in seen.findings}
    assert seen.status == 1
    assert found["ecc-unc"].startswith("GPU 1 had memory errors")
    assert found["row-remap"].startswith("GPU 1 has a bad memory row") or "GPU 0 remapped" in found["row-remap"]
    assert found["sram-threshold"].startswith("GPU 1")
    assert found["nvlink"].startswith("GPU 1 has NVLinks that are down")
    assert "other-procs" not in found


def test_check_env_blames_a_lost_gpu(driver):
    seen = check_env("gpu-count", **machine(driver, "lost"))
    _, severity, summary, _ = seen.only()
    assert (seen.status, severity) == (1, "error")
    assert summary.startswith("GPU 1 does not respond")


HANGS = """
import ctypes, os, sys
print("started", flush=True)
ctypes.CDLL(None).prctl(15, b"nvidia-smi", 0, 0, 0)
# The child opens a pipe that nobody writes to before it becomes another program; until then the kernel keeps its parent
# in state D, as posix_spawn waits as vfork does.
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""
LOOK = """
import time
from ddpdoctor.collect.kernel import find_stuck
from ddpdoctor.collect.system import System
print([(one.pid, one.name) for one in find_stuck(System(), time.sleep)])
"""


def until_it_hangs(pid):
    """Wait until a process has its name, and then comes into state D."""
    stat, until = Path(f"/proc/{pid}/stat"), time.monotonic() + 200
    while "(nvidia-smi) D " not in stat.read_text():
        assert time.monotonic() < until, "it did not come to hang"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="state D is Linux's")
def test_a_process_that_the_kernel_does_not_wake_is_found(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", HANGS, str(pipe)], stdout=subprocess.PIPE, text=True) as hung:
        try:
            assert hung.stdout.readline() == "started\n"
            until_it_hangs(hung.pid)
            ran = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=200, check=True)
            assert f"({hung.pid}, 'nvidia-smi')" in ran.stdout, ran.stdout + ran.stderr
        finally:
            os.close(os.open(pipe, os.O_WRONLY))
    ran = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=200, check=True)
    assert str(hung.pid) not in ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="state D is Linux's")
def test_a_child_that_no_signal_ends_is_left_behind(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = start_program([sys.executable, "-c", HANGS, str(pipe)])
    try:
        until_it_hangs(child.pid)
        ended = wait_for_program(child, 1.0)
        assert (ended.out, ended.status) == ("started\n", None)
        # This one dies of the signal sooner or later; one that hangs in a driver does not.
        assert child.returncode is None, "its end was waited for"
    finally:
        os.close(os.open(pipe, os.O_WRONLY))
        child.communicate(timeout=200)


def test_a_line_of_the_real_log(driver):
    """A line that we write to the kernel's log as root is found, with its age, and judged for a GPU that is here."""
    try:
        KMSG.write_text(f"NVRM: Xid (PCI:0000:43:00): 13, pid={os.getpid()}, written by a test of ddpdoctor\n")
    except OSError as error:
        pytest.skip(f"the kernel's log cannot be written: {error}")
    summaries = [summary for _, _, summary, _ in check_env("xid", torch=True, **machine(driver)).findings]
    assert "GPU 1 had Xid 13: a fault in a program's kernel" in summaries
