"""What `import torch` gives, by real children: this torch, none, and fakes that raise, crash, chatter and hang."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ddpdoctor
from ddpdoctor.collect.bounded import TORCH_PROBE as PROBE
from ddpdoctor.collect.bounded import ChildProcess, start_torch_child
from ddpdoctor.collect.recorded import read_record
from ddpdoctor.collect.software import read_torch, wait_for_torch
from ddpdoctor.collect.system import ReadingPlan, System, read_node
from ddpdoctor.model.node import TorchBuild, TorchDevice
from ddpdoctor.model.reading import NotRead, Why
from tests.scenarios.running import wait_for

PLAN = ReadingPlan(sections=frozenset())
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
    return wait_for_torch(start_torch_child(fake(tmp_path, text)), limit_s)


def test_this_torch():
    from importlib.metadata import version

    build = read_torch(System(), PLAN)

    assert (build.version, build.import_error, build.hip) == (version("torch"), None, None)
    assert build.gloo
    assert build.path.endswith("torch/__init__.py")
    if build.cuda is None:
        assert (build.arch_list, build.nccl, build.nccl_libraries, build.cuda_available) == ((), None, (), False)


def test_a_child_that_was_started_before(tmp_path):
    text = WORKS + "    cuda = N(init=lambda: None, device_count=lambda: 0)\n"
    plan = ReadingPlan(sections=frozenset({"torch"}), torch_child=start_torch_child(fake(tmp_path, text)))
    node = read_node(System(), plan, ())
    assert isinstance(node.torch, TorchBuild)
    assert node.torch.import_error is None


def test_torch_is_not_imported_where_that_is_not_wanted():
    with pytest.raises(NotRead) as missing:
        read_torch(System(), ReadingPlan(sections=frozenset(), use_torch=False))
    assert missing.value.unread.why is Why.NOT_ASKED


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("import none_such", "ModuleNotFoundError: No module named 'none_such'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ValueError('first line\\nlast line')", "ValueError: last line"),
        ("import os; os.write(2, b'bad day'); os._exit(7)",
         "the interpreter ended with status 7 while it imported torch: bad day"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
         "the interpreter was killed by SIGSEGV while it imported torch"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)",
         "the interpreter was killed by SIGILL while it imported torch: the wheel is built for another processor"),
        ("", "AttributeError: module 'torch' has no attribute '__version__'"),
    ],
)  # fmt: skip
def test_a_torch_that_is_broken(text, error, tmp_path):
    build = read_fake(tmp_path, text)
    assert build.import_error == error
    if "interpreter" not in error:
        assert build.path == str(tmp_path / "torch" / "__init__.py")


def test_no_torch_at_all():
    """A Python without site-packages: -S leaves the standard library and what PYTHONPATH names."""
    env = {**os.environ, "PYTHONPATH": str(Path(ddpdoctor.__file__).parents[1])}
    build = wait_for_torch(ChildProcess((PROBE,), env, flags=("-S",)), 60.0)
    assert (build.import_error, build.path) == ("ModuleNotFoundError: No module named 'torch'", None)


PARENT = """
import os, sys, time
from ddpdoctor.collect import bounded
if sys.argv[1].startswith("program"):
    start = bounded.start_program if sys.argv[1] == "program" else bounded.start_bound_program
    start(["/bin/sh", "-c", f"echo $$ > {os.environ['PID_FILE']}; exec sleep 600"])
else:
    bounded.start_torch_child(os.environ)
while not os.path.exists(os.environ["PID_FILE"]):
    time.sleep(0.01)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""
"""Starts a child that hangs, and ends without waiting for it."""


@pytest.mark.parametrize(
    ("what", "end"),
    [("torch", "ended"), ("torch", "killed"), ("program", "ended"), ("program of a System", "killed")],
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


def _runs(pid: int) -> bool:
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


def test_what_is_printed_beside_does_no_harm(tmp_path):
    text = WORKS + "    print('hello'); print('{\"version\": 1}'); sys.stdout.write('no end of line')\n"
    text += "    cuda = N(init=lambda: None, device_count=lambda: 0)\n"
    build = read_fake(tmp_path, text)
    assert (build.version, build.cuda, build.nccl, build.gloo) == ("9.8.7+cu130", "13.0", "2.27.3", True)
    assert build.arch_list == ("sm_90", "compute_90")
    assert (build.cuda_available, build.cuda_error) == (False, None)


def test_cuda_that_cannot_be_initialized(tmp_path):
    text = (
        WORKS
        + r"""
    def init():
        raise RuntimeError('The NVIDIA driver is too old\nPlease update')
    cuda = N(init=init)
"""
    )
    build = read_fake(tmp_path, text)
    assert (build.import_error, build.cuda_available) == (None, False)
    assert (build.cuda_error, build.cuda_stuck) == ("The NVIDIA driver is too old", False)


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
    child = start_torch_child(fake(tmp_path, text))
    assert wait_for(begun.exists)
    build = wait_for_torch(child, limit_s)
    assert (build.version, build.nccl, build.cuda_error, build.cuda_stuck) == ("9.8.7+cu130", "2.27.3", error, True)


def test_devices_and_their_peers(tmp_path):
    text = WORKS + textwrap.indent(
        """
cuda = N(
    init=lambda: None, device_count=lambda: 2,
    get_device_properties=lambda n: N(name=f"GPU {n}", uuid="ab-1", major=9, minor=0, total_memory=80),
    can_device_access_peer=lambda a, b: a < b,
)
""",
        "    ",
    )
    build = read_fake(tmp_path, text)
    assert build.cuda_available
    assert build.devices[1] == TorchDevice(
        index=1, name="GPU 1", uuid="GPU-ab-1", capability=(9, 0), memory_bytes=80
    )  # fmt: skip
    assert [(peer.source, peer.target, peer.possible) for peer in build.peers] == [(0, 1, True), (1, 0, False)]


def test_the_recorder_is_not_loaded_into_the_child(tmp_path):
    text = "import os; raise ImportError(os.environ.get('DDPDOCTOR_RUN', 'not set'))"
    env = {**fake(tmp_path, text), "DDPDOCTOR_RUN": str(tmp_path)}
    assert wait_for_torch(start_torch_child(env), 60.0).import_error == "ImportError: not set"


def test_nothing_said_is_nothing_known():
    build = read_record(TorchBuild, {})
    assert (build.version, build.devices, build.cuda_available) == ("", (), False)
