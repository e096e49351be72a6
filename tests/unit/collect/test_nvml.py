"""What NVML answers becomes facts: recorded machines, each failing state, and the child process."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from ddpdoctor.collect import gpus as facts
from ddpdoctor.collect.bounded import ChildEnd, run_child
from ddpdoctor.collect.gpus import HUNG, P2P, gpus_of, read_gpu_facts, read_gpus
from ddpdoctor.collect.software import is_nvidia_here
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.node import GpuProcess, NvLink
from ddpdoctor.model.reading import NotRead, Why
from tests.machines import load_machine, shared_machine
from tests.nvml import load_nvml

H100_BUS = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
PLAN = ReadingPlan(sections=frozenset({"gpus"}))


def read(machine, *states, files=(), env=None):
    """Return the last facts of a recorded machine, which are all that can be known."""
    *_, gpus = read_gpu_facts(load_nvml(machine, *states), shared_machine(machine, *files, env=env))
    return gpus


@pytest.mark.parametrize("machine", ["nvlink8", "roce8"])
def test_eight_gpus_behind_nvswitches(machine):
    gpus = read(machine)
    assert (gpus.driver, gpus.cuda_driver, gpus.init_error) == ("580.95.05", "13.0", None)
    assert [gpu.bus_id for gpu in gpus.devices] == [f"0000:{bus}:00.0" for bus in H100_BUS]
    assert len({gpu.uuid for gpu in gpus.devices}) == 8
    assert gpus.persistenced
    assert gpus.fabric_manager
    assert gpus.host_pids
    assert [(gpu.driver, gpu.device, gpu.open_error) for gpu in gpus.on_bus] == [("nvidia", 0x2330, None)] * 8
    assert len(gpus.pairs) == 28
    assert {(pair.ancestor, pair.p2p) for pair in gpus.pairs} == {("node", "ok")}
    one = gpus.devices[0]
    assert (one.name, one.vbios, one.error) == ("NVIDIA H100 80GB HBM3", "96.00.A5.00.01", None)
    assert (one.ecc_enabled, one.ecc_uncorrected_volatile, one.ecc_corrected_volatile) == (True, 0, 0)
    assert (one.remapped_uncorrectable, one.remap_pending, one.remap_failed) == (0, False, False)
    assert (one.retired_pages, one.retired_pending, one.sram_threshold_exceeded) == (None, None, False)
    assert (one.clock_event_reasons, one.temperature_c, one.slowdown_temperature_c) == (1, 31, 87)
    assert (one.power_limit_mw, one.default_power_limit_mw) == (700_000, 700_000)
    assert (one.app_clock_sm_mhz, one.default_app_clock_sm_mhz, one.max_clock_sm_mhz) == (1980, 1980, 1980)
    assert (one.persistence, one.mig_enabled, one.compute_mode) == (True, False, "default")
    assert (one.memory_total_bytes, one.memory_used_bytes, one.processes) == (85_520_809_984, 4_194_304, ())
    assert one.nvlinks == tuple(NvLink(index=link, active=True, errors=None) for link in range(18))
    assert (one.fabric_state, one.fabric_status) == ("completed", "success")


def test_two_consumer_cards():
    gpus = read("workstation2")
    screen, other = gpus.devices
    assert [process.name for process in screen.processes] == ["Xorg", "gnome-shell"]
    assert all(process.graphics and not process.ours for process in screen.processes)
    assert (other.ecc_enabled, other.ecc_uncorrected_volatile, other.mig_enabled) == (False, None, None)
    assert (other.nvlinks, other.fabric_state, other.persistence) == ((), "not-supported", False)
    assert [(pair.ancestor, pair.p2p) for pair in gpus.pairs] == [("hostbridge", "chipset not supported")]
    assert (gpus.fabric_manager, gpus.persistenced) == (False, False)


def test_a_lost_gpu_is_said_to_be_lost_and_the_others_are_read():
    gpus = read("nvlink8", "lost")
    assert [gpu.error for gpu in gpus.devices] == [None, None, None, "GPU is lost", None, None, None, None]
    on_the_way = read("nvlink8", "lost-on-the-way").devices[3]
    assert (on_the_way.bus_id, on_the_way.error) == ("0000:61:00.0", "GPU is lost")


def test_a_device_that_hangs_is_named_by_what_was_said_before(tmp_path):
    steps = list(read_gpu_facts(load_nvml("nvlink8"), load_machine("nvlink8", tmp_path)))
    before_third = steps[2]
    assert [gpu.error for gpu in before_third.devices] == [None, None, HUNG]
    said = "\n".join(json.dumps(asdict(step)) for step in steps[:3]) + '\n{"driver": "58'
    assert gpus_of(ChildEnd(out=said, err="", status=None), 40.0) == before_third


def test_facts_come_through_the_pipe_unchanged():
    gpus = read("nvlink8", "leftover", "nvlink-down")
    assert gpus_of(ChildEnd(out=json.dumps(asdict(gpus)) + "\n", err="", status=0), 40.0) == gpus


@pytest.mark.parametrize(
    ("state", "index", "fields"),
    [
        ("ecc-uncorrected", 2, {"ecc_uncorrected_volatile": 3, "ecc_uncorrected_aggregate": 5}),
        ("ecc-off", 2, {"ecc_enabled": False}),
        ("ecc-corrected", 2, {"ecc_corrected_volatile": 60_000_000}),
        ("remap-pending", 2, {"remap_pending": True, "remapped_uncorrectable": 1}),
        ("remap-failed", 2, {"remap_failed": True}),
        ("retired-pending", 2, {"retired_pages": 1, "retired_pending": True, "remap_pending": None}),
        ("retired-many", 2, {"retired_pages": 62, "retired_pending": False}),
        ("sram", 2, {"sram_threshold_exceeded": True}),
        ("hw-slowdown", 5, {"clock_event_reasons": 0x48}),
        ("hot", 5, {"temperature_c": 84}),
        ("power-limit", 5, {"power_limit_mw": 500_000}),
        ("app-clocks", 5, {"app_clock_sm_mhz": 1410}),
        ("persistence-off", 0, {"persistence": False}),
        ("mig", 0, {"mig_enabled": True}),
        ("prohibited", 1, {"compute_mode": "prohibited"}),
        ("exclusive", 1, {"compute_mode": "exclusive-process"}),
        ("fabric-in-progress", 1, {"fabric_state": "in-progress", "fabric_status": "success"}),
        ("fabric-failed", 0, {"fabric_state": "completed", "fabric_status": "unknown"}),
        ("old-driver", 0, {"clock_event_reasons": 1, "fabric_state": "completed", "memory_used_bytes": 555_000_000}),
    ],
)
def test_states(state, index, fields):
    gpu = read("nvlink8", state).devices[index]
    assert gpu == replace(gpu, **fields)


def test_a_link_that_is_down_and_one_with_errors():
    links = read("nvlink8", "nvlink-down").devices[6].nvlinks
    assert [link.index for link in links if not link.active] == [7]
    assert links[8].errors == 12


def test_pairs_say_why_there_is_no_way():
    assert {pair.p2p for pair in read("nvlink8", "p2p-off").pairs} == {P2P[4]}


def test_whose_a_process_is():
    (leftover,) = read("nvlink8", "leftover").devices[4].processes
    assert leftover == GpuProcess(pid=31337, name="python", used_bytes=21 * 2**30, ours=False)
    (ours,) = read("nvlink8", "our-process").devices[4].processes
    assert ours.ours


def test_a_rank_beside_this_one_is_ours_under_a_launcher(tmp_path):
    system = load_machine("nvlink8", tmp_path, env={"RANK": "0"})
    (tmp_path / "proc/31337/stat").write_text((tmp_path / "proc/4200/stat").read_text().replace("4200 (", "31337 ("))
    *_, gpus = read_gpu_facts(load_nvml("nvlink8", "leftover"), system)
    assert gpus.devices[4].processes[0].ours


def test_a_process_of_the_same_batch_job_is_ours(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    for pid, step in (("self", "step_0"), ("31337", "step_1")):
        path = tmp_path / "proc" / pid / "cgroup"
        path.write_text(f"0::/system.slice/slurmstepd.scope/job_77/{step}/user/task_0\n")
    *_, gpus = read_gpu_facts(load_nvml("nvlink8", "leftover"), system)
    assert gpus.devices[4].processes[0].ours


def test_a_gpu_that_nvml_does_not_list():
    missing = read("nvlink8", "one-fewer").on_bus[-1]
    assert (missing.bus_id, missing.open_error) == ("0000:df:00.0", "ok")
    kept = read("nvlink8", "one-fewer", files=("kept-gpu",)).on_bus[-1]
    assert kept.open_error == "ENOENT"


def test_a_container_sees_no_fabric_manager_and_does_not_say_that_there_is_none():
    gpus = read("nvlink8", files=("pod",))
    assert (gpus.host_pids, gpus.fabric_manager, gpus.persistenced) == (False, None, False)


@pytest.mark.parametrize("state", ["not-loaded"])
def test_no_driver_is_absence(state):
    with pytest.raises(NotRead) as missing:
        read("nvlink8", state)
    assert missing.value.unread.why is Why.ABSENT


def test_nvml_that_does_not_start_says_why():
    gpus = read("nvlink8", "mismatch")
    assert (gpus.init_error, gpus.devices, len(gpus.on_bus)) == ("LIB_RM_VERSION_MISMATCH", (), 8)


def test_a_machine_without_nvidia_starts_no_child(tmp_path):
    system = load_machine("container-nogpu", tmp_path)
    assert not is_nvidia_here(system)
    with pytest.raises(NotRead) as missing:
        read_gpus(system, PLAN)
    assert missing.value.unread.reason == "there is no NVIDIA driver here"


@pytest.mark.parametrize(
    "trace",
    ["proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/libnvidia-ml.so.1", "opt/x/libnvidia-ml.so.1"],
)
def test_nvidia_shows_itself(tmp_path, trace):
    path = tmp_path / trace
    path.parent.mkdir(parents=True)
    path.touch()
    assert is_nvidia_here(System(root=tmp_path, env={"LD_LIBRARY_PATH": ":/opt/x"}))


def test_the_child_runs_here():
    """Whatever this machine has: the child ends, and what it says is understood."""
    ended = run_child("ddpdoctor.collect.gpus", (), {}, 60.0)
    absent = None
    try:
        assert gpus_of(ended, 60.0).driver
    except NotRead as missing:
        absent = missing.unread
    assert absent is None or absent.why is Why.ABSENT, absent


def test_a_child_that_does_not_end_is_left():
    ended = run_child("http.server", ("0", "--bind", "127.0.0.1"), {}, 1.0)
    assert ended.status is None
    with pytest.raises(NotRead) as missing:
        gpus_of(replace(ended, out=""), 1.0)
    assert missing.value.unread.why is Why.TIMEOUT


def test_a_child_that_fails_says_how():
    with pytest.raises(NotRead) as missing:
        gpus_of(run_child("ddpdoctor.no_such_module", (), {}, 60.0), 60.0)
    assert "No module named ddpdoctor.no_such_module" in missing.value.unread.reason


def test_the_names_that_are_used_are_pynvmls():
    """A name that is misspelt would read as "not supported" for ever."""
    source = Path(facts.__file__).read_text(encoding="utf-8")
    used = set(re.findall(r'"(nvml[A-Z]\w+|c_nvml\w+|NVML_\w*[A-Z])"', source))
    asked = {key.split()[0] for key in load_nvml("nvlink8")._module._devices[0]}
    assert len(used) > 30
    assert {name for name in used | asked if not hasattr(pynvml, name)} == {
        # asked for with _v3 or _v2 behind, as the next line holds
        name
        for name in used
        if name.endswith("RunningProcesses") and not hasattr(pynvml, name)
    }
    assert all(hasattr(pynvml, f"{name}_v3") for name in used if name.endswith("RunningProcesses"))


@pytest.mark.parametrize(
    ("text", "bus_id"),
    [("00000000:1B:00.0", "0000:1b:00.0"), ("00010000:C3:00.0", "10000:c3:00.0"), ("", ""), ("N/A", "")],
)
def test_bus_ids_are_as_sysfs_writes_them(text, bus_id):
    assert facts._bus_id(SimpleNamespace(busId=text)) == bus_id
    assert facts._bus_id(SimpleNamespace(busId=text.encode())) == bus_id


def test_the_codes_are_those_of_nvml():
    assert pynvml.nvmlMemory_v2 == facts.MEMORY_V2
    assert facts.P2P[pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY] == "disabled by a registry key"
    assert facts.FABRIC_STATES[pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS] == "in-progress"
    assert facts.COMPUTE_MODES[pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS] == "exclusive-process"
    assert facts.ANCESTORS[pynvml.NVML_TOPOLOGY_HOSTBRIDGE] == "hostbridge"
    assert pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED == facts.UNCORRECTED
    assert pynvml.NVML_AGGREGATE_ECC == facts.AGGREGATE
    assert pynvml.NVML_CLOCK_SM == facts.SM_CLOCK
    assert pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN == facts.SLOWDOWN_THRESHOLD
    assert facts.NVLINK_ERRORS[-1] == pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA
    for name in facts.ABSENT.keys() | facts.GONE:
        assert hasattr(pynvml, f"NVML_ERROR_{name}")
