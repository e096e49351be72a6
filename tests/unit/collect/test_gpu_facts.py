"""GPUs, links between them and torch's build, of recorded machines and real children."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

import ddpdoctor
from ddpdoctor.collect import gpus as facts
from ddpdoctor.collect.bounded import TORCH_PROBE, ChildEnd, start_module
from ddpdoctor.collect.bounded import run_child as run_nvml_child
from ddpdoctor.collect.gpus import (
    HUNG,
    PROBE,
    GpuCount,
    count_gpus,
    gpus_of,
    read_gpu_facts,
    read_gpu_trial,
    read_gpus,
    try_gpus,
)
from ddpdoctor.collect.software import is_nvidia_here, read_torch, wait_for_torch
from ddpdoctor.collect.system import ReadingPlan, System, read_node
from ddpdoctor.model.launch import read_visible
from ddpdoctor.model.node import TorchBuild
from ddpdoctor.model.reading import NotRead, Why
from tests import forking
from tests.golden import Cases, table, words
from tests.machines import load_machine, shared_machine
from tests.nvml import load_nvml
from tests.scenarios.running import clean_environment, wait_for

# The trial: what is asked, in which order, and what becomes of children that fail.


CASES = Cases(__name__)
test_kept = CASES.test()
GOOD = {"ok": True, "error": None, "seconds": 3.5}


def answers(**said):
    """Return what runs a child, with an answer for each of its arguments."""

    def run(arguments, _limit_s):
        return said["_".join(arguments).replace(":", "_")]

    return run


def ended(*results, status=0, err=""):
    return ChildEnd(out="".join(json.dumps(result) + "\n" for result in results), err=err, status=status)


def test_without_deep_or_a_gpu_nothing_is_tried(tmp_path):
    for deep, why in ((False, Why.NOT_ASKED), (True, Why.ABSENT)):
        with pytest.raises(NotRead) as missing:
            read_gpu_trial(System(root=tmp_path), ReadingPlan(sections=frozenset(), deep=deep))
        assert missing.value.unread.why is why
        assert deep or "--deep" in missing.value.unread.reason


COPY = {"source": 0, "target": 1, "ok": True, "error": None, "gb_s": 150.0}
HANGS, CRASHES = {"status": None}, {"status": -11, "err": "warning\nSegmentation fault\n"}


def tried(work, copies):
    """Return what a trial found. How long a child without an answer took is left out."""
    said = {f"work_cuda_{number}": one for number, one in enumerate(work)}
    trial = try_gpus(answers(count=ended({"count": len(work)}), copies=copies, **said))
    return replace(trial, work=tuple(one if one.ok else replace(one, seconds=0.0) for one in trial.work))


def test_gpus_that_cannot_be_counted():
    ends = {Why.ABSENT: ended({"count": 0}), Why.TIMEOUT: ended(status=None), Why.ERROR: ended(status=1, err="boom")}
    for why, count in ends.items():
        with pytest.raises(NotRead) as missing:
            try_gpus(answers(count=count))
        assert missing.value.unread.why is why


def test_the_real_child_counts_works_and_says_in_words_what_is_not_there():
    none = clean_environment(CUDA_VISIBLE_DEVICES="")
    counted, worked, failed = (
        forking.run("-m", PROBE, *words, env=none) for words in (("count",), ("work", "cpu"), ("work", "cuda:0"))
    )
    assert json.loads(counted.stdout) == {"count": 0}, counted.stderr
    result = json.loads(worked.stdout)
    assert (result["ok"], result["error"]) == (True, None)
    result = json.loads(failed.stdout) if failed.stdout else {"ok": False, "error": failed.stderr}
    assert (result["ok"], bool(result["error"])) == (False, True)


# Counting GPUs as CUDA_VISIBLE_DEVICES leaves them.


UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


def visible(value):
    read = read_visible(None if value == "not set" else value, UUIDS)
    return [read, *["on purpose"] * read.on_purpose]


def test_visible_devices_without_a_driver():
    assert read_visible("0,MIG-x", ()).devices == ()
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == GpuCount()


# What NVML answers becomes facts: recorded machines, each failing state, and the child process.


PLAN_NVML = ReadingPlan(sections=frozenset({"gpus"}))


def read(machine, *states, files=(), env=None):
    """Return the last facts of a recorded machine, which are all that can be known."""
    *_, gpus = read_gpu_facts(load_nvml(machine, *states), shared_machine(machine, *files, env=env))
    return gpus


def test_facts_come_through_the_pipe_and_a_device_that_hangs_is_named_by_what_was_said_before():
    steps = list(read_gpu_facts(load_nvml("nvlink8"), shared_machine("nvlink8")))
    before_third = steps[2]
    assert [gpu.error for gpu in before_third.devices] == [None, None, HUNG]
    said = "\n".join(json.dumps(asdict(step)) for step in steps[:3]) + '\n{"driver": "58'
    assert gpus_of(ChildEnd(out=said, err="", status=None), 40.0) == before_third
    gpus = read("nvlink8", "leftover", "nvlink-down")
    assert gpus_of(ChildEnd(out=json.dumps(asdict(gpus)) + "\n", err="", status=0), 40.0) == gpus


def test_a_process_beside_a_rank_or_of_the_same_batch_job_is_ours(tmp_path):
    system = load_machine("nvlink8", tmp_path)
    groups = {system.path(f"/proc/{pid}/cgroup"): step for pid, step in (("self", "step_0"), ("31337", "step_1"))}
    for path, step in groups.items():
        path.write_text(f"0::/system.slice/slurmstepd.scope/job_77/{step}/user/task_0\n")
    *_, of_one_job = read_gpu_facts(load_nvml("nvlink8", "leftover"), system)
    for path in groups:
        path.write_text("0::/\n")
    stat = system.path("/proc/4200/stat").read_text()
    system.path("/proc/31337/stat").write_text(stat.replace("4200 (", "31337 ("))
    found = [of_one_job]
    for env in ({"RANK": "0"}, {}):
        *_, gpus = read_gpu_facts(load_nvml("nvlink8", "leftover"), replace(system, env=env))
        found.append(gpus)
    assert [gpus.devices[4].processes[0].ours for gpus in found] == [True, True, False]


def test_no_driver_is_absence_and_starts_no_child():
    system = shared_machine("container-nogpu")
    assert not is_nvidia_here(system)
    with pytest.raises(NotRead) as missing:
        read_gpus(system, PLAN_NVML)
    assert missing.value.unread.reason == "no NVIDIA driver found"
    with pytest.raises(NotRead) as missing:
        read("nvlink8", "not-loaded")
    assert missing.value.unread.why is Why.ABSENT


def test_nvidia_shows_itself(tmp_path):
    traces = (
        "proc/driver/nvidia/version",
        "dev/nvidiactl",
        "usr/lib/wsl/lib/libnvidia-ml.so.1",
        "opt/x/libnvidia-ml.so.1",
    )
    for number, trace in enumerate(traces):
        path = tmp_path / str(number) / trace
        path.parent.mkdir(parents=True)
        path.touch()
        assert is_nvidia_here(System(root=tmp_path / str(number), env={"LD_LIBRARY_PATH": ":/opt/x"}))


def test_a_child_that_does_not_end_is_left_and_one_that_fails_says_how():
    """What this machine has is read too, whatever it is."""
    hangs = run_nvml_child("http.server", ("0", "--bind", "127.0.0.1"), {}, 1.0)
    assert hangs.status is None
    fails, here = (run_nvml_child(f"ddpdoctor.{name}", (), {}, 60.0) for name in ("no_such_module", "collect.gpus"))
    why = []
    for end in (replace(hangs, out=""), fails, here):
        try:
            assert gpus_of(end, 1.0).driver
        except NotRead as missing:
            why.append(missing.unread)
    assert (why[0].why, {one.why for one in why[2:]} <= {Why.ABSENT}) == (Why.TIMEOUT, True)
    assert "No module named ddpdoctor.no_such_module" in why[1].reason


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


def bus_id(text):
    of_text, of_bytes = (facts._bus_id(SimpleNamespace(busId=known(text))) for known in (str, str.encode))
    assert of_text == of_bytes
    return of_text


test_words = words(__name__, visible=visible, bus_id=bus_id)
test_rows = table("gpu_trials", globals())


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


# What `import torch` gives, by real children: this torch, none, and fakes that raise, crash, chatter and hang.


PLAN_TORCH_BUILD = ReadingPlan(sections=frozenset())
WORKS = """
    import sys
    from types import SimpleNamespace as N
    __version__ = "9.8.7+cu130"
    version = N(cuda="13.0", hip=None)
    sys.modules["torch._C"] = N(
        _cuda_getArchFlags=lambda: "sm_90 compute_90", _nccl_version=lambda: 2 << 32 | 27 << 16 | 3,
        _distributed_c10d=N(ProcessGroupGloo=1),
    )
"""


def fake(tmp_path, text):
    """Put a torch where Python looks first, and return the environment that has it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def read_fake(tmp_path, text, limit_s=60.0):
    return wait_for_torch(start_module((TORCH_PROBE,), fake(tmp_path, text)), limit_s)


@pytest.mark.full
def test_this_torch():
    from importlib.metadata import version

    build = read_torch(System(), PLAN_TORCH_BUILD)
    assert (build.version, build.import_error, build.hip, build.gloo) == (version("torch"), None, None, True)
    assert build.path.endswith("torch/__init__.py")
    if build.cuda is None:
        assert (build.arch_list, build.nccl, build.nccl_libraries, build.cuda_available) == ((), None, (), False)
    with pytest.raises(NotRead) as missing:
        read_torch(System(), ReadingPlan(sections=frozenset(), use_torch=False))
    assert missing.value.unread.why is Why.NOT_ASKED


def test_a_child_that_was_started_before_and_no_torch_at_all(tmp_path):
    """A Python without site-packages: -S leaves the standard library and what PYTHONPATH names."""
    text = WORKS + "    cuda = N(init=lambda: None, device_count=lambda: 0)\n"
    plan = ReadingPlan(sections=frozenset({"torch"}), torch_child=start_module((TORCH_PROBE,), fake(tmp_path, text)))
    node = read_node(System(), plan, ())
    assert isinstance(node.torch, TorchBuild)
    assert node.torch.import_error is None
    env = {**os.environ, "PYTHONPATH": str(Path(ddpdoctor.__file__).parents[1])}
    build = wait_for_torch(start_module((TORCH_PROBE,), env, flags=("-S",)), 60.0)
    assert (build.import_error, build.path) == ("ModuleNotFoundError: No module named 'torch'", None)


BROKEN = (
    "raise ImportError('libcudart.so.13: cannot open')", "import none_such", "import sys; sys.exit(3)",
    "raise KeyboardInterrupt", "raise ValueError('first line\\nlast line')", "",
    "import os; os.write(2, b'bad day'); os._exit(7)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
)  # fmt: skip


@CASES
def a_torch_that_is_broken(tmp_path):
    told = {}
    for number, text in enumerate(BROKEN):
        (tmp_path / str(number)).mkdir()
        build = read_fake(tmp_path / str(number), text)
        is_known = build.path == str(tmp_path / str(number) / "torch" / "__init__.py")
        told[text or "no text"] = f"{build.import_error} ({'with its' if is_known else 'no'} path)"
    return told


PARENT = """
import os, sys, time
from ddpdoctor.collect import bounded
if sys.argv[1].startswith("program"):
    command = ["/bin/sh", "-c", f"echo $$ > {os.environ['PID_FILE']}; exec sleep 600"]
    bounded.start_program(command, is_bound=sys.argv[1] != "program")
else:
    bounded.start_module((bounded.TORCH_PROBE,), os.environ)
while not os.path.exists(os.environ["PID_FILE"]) or not os.path.getsize(os.environ["PID_FILE"]):
    time.sleep(0.01)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""
"""Starts a child that hangs, and ends without waiting for it."""


@pytest.mark.parametrize(
    ("what", "end"), [("torch", "ended"), ("torch", "killed"), ("program", "ended"), ("program of a System", "killed")]
)
def test_no_child_outlives_its_parent(what, end, tmp_path):
    pid_file = tmp_path / "pid"
    text = f"""
        import os, time
        with open({str(pid_file)!r} + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(pid_file)!r} + ".part", {str(pid_file)!r})
        time.sleep(600)
    """
    env = {**fake(tmp_path, text), "PID_FILE": str(pid_file)}
    subprocess.run([sys.executable, "-c", PARENT, what, end], env=env, check=False)
    assert pid_file.exists()
    assert wait_for(lambda: not _runs(int(pid_file.read_text())), limit_s=60)


def _runs(pid):
    """Return whether a process runs; one that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_import_that_hangs_is_given_up(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_fake(tmp_path, "import time; time.sleep(600)", limit_s=1.0)
    assert (missing.value.unread.why, missing.value.unread.reason) == (
        Why.TIMEOUT,
        "`import torch` took longer than 1 s",
    )


SAYS = {
    "what is printed beside": """
    print('hello'); print('{"version": 1}'); sys.stdout.write('no end of line')
    cuda = N(init=lambda: None, device_count=lambda: 0)
""",
    "CUDA that cannot be initialized": r"""
    def init():
        raise RuntimeError('The NVIDIA driver is too old\nPlease update')
    cuda = N(init=init)
""",
    "two devices, one of which reaches the other": """
    cuda = N(
        init=lambda: None, device_count=lambda: 2,
        get_device_properties=lambda n: N(name=f"GPU {n}", uuid="ab-1", major=9, minor=0, total_memory=80),
        can_device_access_peer=lambda a, b: a < b,
    )
""",
}


@CASES
def what_a_torch_says_of_itself(tmp_path):
    found = {}
    for number, (name, text) in enumerate(SAYS.items()):
        (tmp_path / str(number)).mkdir()
        found[name] = replace(read_fake(tmp_path / str(number), WORKS + text), path=None, nccl_libraries=())
    return found


@pytest.mark.parametrize(
    ("how", "limit_s", "error"),
    [
        ("time.sleep(600)", 1.0, "CUDA was not initialized within 1 s"),
        ("os.kill(os.getpid(), 11)", 60.0, "the process was killed by SIGSEGV while it initialized CUDA"),
        ("os._exit(1)", 60.0, "the process ended with status 1 while it initialized CUDA"),
    ],
)
def test_cuda_that_hangs_or_crashes_leaves_what_was_known(how, limit_s, error, tmp_path):
    begun = tmp_path / "begun"
    text = f"{WORKS}    import os, time\n    cuda = N(init=lambda: (open({str(begun)!r}, 'w'), {how}))\n"
    child = start_module((TORCH_PROBE,), fake(tmp_path, text))
    assert wait_for(begun.exists)
    build = wait_for_torch(child, limit_s)
    assert (build.version, build.nccl, build.cuda_error, build.cuda_stuck) == ("9.8.7+cu130", "2.27.3", error, True)


def test_the_recorder_is_not_loaded_into_the_child(tmp_path):
    text = "import os; raise ImportError(os.environ.get('DDPDOCTOR_RUN', 'not set'))"
    env = {**fake(tmp_path, text), "DDPDOCTOR_RUN": str(tmp_path)}
    assert wait_for_torch(start_module((TORCH_PROBE,), env), 60.0).import_error == "ImportError: not set"
