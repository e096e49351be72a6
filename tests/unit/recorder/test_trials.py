"""A trial switches settings in a running job and changes nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from ddpdoctor.recorder.calls.debug_level import backends_of
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.tuning import constructed
from ddpdoctor.recorder.tuning.plan import LEFT_OUT, MEASURED, MEASURED_IN_LAUNCH, MIB, choose_caps, order_blocks
from ddpdoctor.recorder.tuning.trial import WARM_UP
from tests.preloaded import preloaded
from tests.scenarios.running import clean_environment, free_port
from tests.unit.recorder.test_rings import BOOTSTRAP

# A launch of a trial has one setting from its start: what the script constructs gets it as an argument.


ROWS = TensorDataset(torch.zeros(8, 1))


class Stream(IterableDataset):
    """Rows without an index."""

    def __iter__(self):
        return iter(ROWS)


@pytest.fixture
def loader_class(monkeypatch):
    """Return a DataLoader of its own, whose constructor may be changed."""
    monkeypatch.setattr(here, "is_rank", True)
    monkeypatch.setattr(constructed, "_loaders", [])
    return type("Loader", (DataLoader,), {"__init__": DataLoader.__init__})


def ddp_class(names):
    """Return a class with these arguments, of which an object knows what it was given."""
    kind = {}
    exec(f"def __init__(self, module, {', '.join(f'{name}=None' for name in names)}): self.given = locals()", kind)
    return type("Model", (), {"__init__": kind["__init__"]})


def given_to(kind, setting, **arguments):
    constructed.patch_ddp(kind, setting)
    given = kind("module", **arguments).given
    return {name: value for name, value in given.items() if name not in {"self", "module"}}


OLD = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
NEW = (*OLD, "bucket_cap_mb_list", "forward_sync_buffers")


@pytest.mark.parametrize(
    ("names", "setting", "changed"),
    [
        (OLD, "bucket_cap=524288", {"bucket_cap_mb": 0.5}),
        (NEW, "bucket_cap=524288", {"bucket_cap_mb": 0.5, "bucket_cap_mb_list": None}),
        (OLD, "buffers_off", {"broadcast_buffers": False}),
        (NEW, "buffers_off", {"broadcast_buffers": None, "forward_sync_buffers": False}),
        (NEW, "static_graph", {"static_graph": True, "find_unused_parameters": False}),
        (NEW, "find_unused_off", {"find_unused_parameters": False}),
        (NEW, "gradient_as_bucket_view", {"gradient_as_bucket_view": True}),
        (NEW, "base", {}),
        (NEW, "workers=2", {}),
    ],
)
def test_ddp_gets_the_setting_and_keeps_the_other_arguments(names, setting, changed):
    script = {"broadcast_buffers": True, "bucket_cap_mb": 10, "find_unused_parameters": True}
    assert given_to(ddp_class(names), setting, **script) == {**dict.fromkeys(names), **script, **changed}


def test_an_argument_that_is_given_by_its_place_is_changed_too():
    kind = ddp_class(OLD)
    constructed.patch_ddp(kind, "buffers_off")
    given = kind("module", "broadcast", 10).given
    assert (given["broadcast_buffers"], given["bucket_cap_mb"]) == (False, 10)


def test_this_torch_has_the_arguments():
    names = DDP.__init__.__code__.co_varnames
    for setting in ("bucket_cap=524288", "buffers_off", "static_graph", "find_unused_off", "gradient_as_bucket_view"):
        assert set(constructed._ddp_arguments(setting, names)) <= set(names)


def test_a_call_that_the_constructor_refuses_is_refused_as_ever():
    kind = ddp_class(OLD)
    constructed.patch_ddp(kind, "static_graph")
    with pytest.raises(TypeError, match="no_such"):
        kind("module", no_such=1)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2},
        {"batch_size": 2, "sampler": SequentialSampler(ROWS)},
        {"batch_sampler": BatchSampler(SequentialSampler(ROWS), 2, drop_last=False)},
        {"batch_size": 2, "num_workers": 1, "prefetch_factor": 4},
        {},
    ],
)
def test_loaders_of_several_batches_get_workers_that_stay(options, loader_class):
    constructed.patch_loader(loader_class, "workers=2")
    loader = loader_class(ROWS, **options)
    assert (loader.num_workers, loader.persistent_workers) == (2, True)
    assert loader.prefetch_factor == options.get("prefetch_factor", 2)
    assert constructed.why_without_effect("workers=2") == ""


def test_streams_and_single_batches_stay_as_they_are(loader_class):
    constructed.patch_loader(loader_class, "workers=2")
    assert [loader_class(data, batch_size=8).num_workers for data in (ROWS, Stream())] == [0, 0]
    assert "no DataLoader" in constructed.why_without_effect("workers=2")


def test_threads_that_the_script_sets_itself_are_noticed():
    present = torch.get_num_threads()
    assert constructed.why_without_effect(f"threads={present}") == ""
    assert f"the script sets {present} threads itself" in constructed.why_without_effect(f"threads={present + 1}")


# Which jobs get DETAIL by default: those of which torch makes all groups over Gloo.


CPU, CUDA = SimpleNamespace(type="cpu"), SimpleNamespace(type="cuda")


class Config:
    """torch's choice where nobody names a backend: that of the accelerator of this machine."""

    accelerator = "cuda"

    def __init__(self, backend):
        assert backend == "undefined"

    def get_device_backend_map(self):
        return {self.accelerator: C10D.Backend.default_device_backend_map[self.accelerator]}


class Backend(str):
    __slots__ = ()
    default_device_backend_map = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}  # noqa: RUF012 - as torch has it


C10D = SimpleNamespace(Backend=Backend, BackendConfig=Config)


@pytest.mark.parametrize(
    ("backend", "device", "used"),
    [
        ("gloo", None, {"gloo"}),
        ("GLOO", CUDA, {"gloo"}),
        ("nccl", None, {"nccl"}),
        ("nccl2", None, {"nccl2"}),
        ("cpu:gloo,cuda:nccl", None, {"gloo", "nccl"}),
        ("cpu:gloo, cuda:gloo", None, {"gloo"}),
        (None, CUDA, {"nccl"}),
        (None, CPU, {"gloo"}),
        (None, SimpleNamespace(type="unknown"), {"nccl"}),
        (None, None, {"nccl"}),
        ("undefined", CPU, {"nccl"}),
    ],
)
def test_the_backends_are_those_that_torch_will_use(backend, device, used):
    assert backends_of(C10D, backend, device) == used


SCRIPT = """
import sys
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed import distributed_c10d as c10d

def level_in(backend, new=None):
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if new:
        dist.new_group(backend=new)
    wrapped = any(isinstance(g._get_backend(d), c10d._ProcessGroupWrapper)
                  for g in c10d._world.pg_map for d in g._device_types)
    dist.destroy_process_group()
    return dist.get_debug_level().name + ("+" if wrapped else "")

print(level_in("gloo"), level_in("cpu:gloo"), level_in("cpu:gloo,cuda:fake", "gloo"), level_in(None))
dist.set_debug_level(dist.DebugLevel.INFO)
print(level_in("gloo"), level_in("fake"))
assert not sys._ddpdoctor_recorder.failures
"""


def test_the_level_is_set_before_torch_makes_the_group_and_a_subgroup_follows_the_world(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name in ("rings", "evidence"):
        (tmp_path / name).mkdir()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": str(tmp_path), "RANK": "0"}
    env |= {"DDPDOCTOR_DETAIL": "gloo"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["DETAIL+", "DETAIL+", "OFF", "DETAIL+", "INFO", "INFO"], done.stderr


# A trial switches settings of DDP in a running job, changes no parameter by that, and leaves nothing behind.


ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("trial_job.py")
KEEPING = "bucket_cap,gradient_as_bucket_view,static_graph,buffers_off,unreduced"
"""Settings that change no parameter, until the reduction is left out."""
KEPT = "the checkpoint of an earlier run"


def run_job(folder, rounds, steps, only="", setting=""):
    checkpoint = folder / "model.pt"
    checkpoint.write_text(KEPT)
    for name in ("rings", "evidence"):
        (folder / name).mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", str(JOB),
        str(steps), str(checkpoint),
    ]  # fmt: skip
    path = f"{ROOT / 'ddpdoctor' / 'recorder' / 'bootstrap'}{os.pathsep}{ROOT}"
    trial = {
        "DDPDOCTOR_TUNE_ROUNDS": str(rounds), "DDPDOCTOR_TUNE_ONLY": only, "DDPDOCTOR_TUNE_SETTING": setting
    }  # fmt: skip
    env = clean_environment(PYTHONPATH=path, DDPDOCTOR_RUN=str(folder), **trial)
    with preloaded():
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], checkpoint


def lines_of(folder, rank):
    return [json.loads(line) for line in (folder / "tuning" / f"{rank}.jsonl").read_text().splitlines()]


def test_parameters_are_those_of_a_job_without_switches_until_the_reduction_is_left_out(tmp_path):
    folders = [tmp_path / name for name in ("tried", "plain")]
    for folder in folders:
        folder.mkdir()
    tried, kept = run_job(folders[0], rounds=1, steps=1000, only=KEEPING)
    lines = lines_of(folders[0], 0)
    settings = lines[0]["plan"]
    order = [line["setting"] for line in lines if "setting" in line]
    assert sorted(order) == sorted(settings)
    assert {*KEEPING.split(","), "base", "again"} == {name.partition("=")[0] for name in settings}
    together = WARM_UP - 1 + (LEFT_OUT + MEASURED) * order.index("unreduced")
    assert together > WARM_UP + LEFT_OUT + MEASURED  # at least one switch comes before
    plain, _ = run_job(folders[1], rounds=0, steps=together)
    assert tried[:together] == plain[:together]
    assert all(len(line["steps_ns"]) == MEASURED for line in lines if "setting" in line)
    steps = WARM_UP + (LEFT_OUT + MEASURED) * len(order)
    assert [line for rank in (0, 1) for line in lines_of(folders[0], rank) if "end" in line] == [
        {"end": "done", "steps": steps}
    ] * 2
    assert len(tried) == steps  # the script would have gone on to 1,000
    assert kept.read_text() == KEPT


def test_a_launch_with_one_setting_measures_some_steps_and_ends_on_all_ranks(tmp_path):
    trained, kept = run_job(tmp_path, rounds=1, steps=1000, setting="gradient_as_bucket_view")
    steps = WARM_UP + MEASURED_IN_LAUNCH
    assert len(trained) == steps
    for rank in (0, 1):
        launch, block, end = lines_of(tmp_path, rank)
        assert launch == {"launch": "gradient_as_bucket_view", "fits": [], "forwards": 1, "needs": steps}
        assert len(block["steps_ns"]) == MEASURED_IN_LAUNCH
        assert end == {"end": "done"}
    assert kept.read_text() == KEPT


@pytest.mark.parametrize(
    ("gradient_mib", "present_mib", "caps_mib"),
    [
        (16, 25, [1, 2, 4, 16]),
        (16, 4, [1, 2, 16]),
        (100, 25, [8, 16, 32, 128]),
        (0.7, 0.0005, [0.25, 1]),
        (0.01, 25, [0.25]),
    ],
)
def test_caps_are_those_that_give_other_numbers_of_buckets(gradient_mib, present_mib, caps_mib):
    assert choose_caps(int(gradient_mib * MIB), int(present_mib * MIB)) == [int(cap * MIB) for cap in caps_mib]


def test_each_round_has_every_setting_once_and_all_ranks_have_the_same_order():
    blocks = order_blocks(["base", "again", "views"], 4)
    assert blocks == order_blocks(["base", "again", "views"], 4)
    for number in range(4):
        assert sorted(setting for one, setting in blocks if one == number) == ["again", "base", "views"]
    assert len({tuple(setting for one, setting in blocks if one == number) for number in range(4)}) > 1


# In a trial torch.save writes nothing, and a rename of what it would have written does nothing either.


SCRIPT_TRIAL_SAVES = """
import io, os, pathlib, shutil, torch
torch.save({"a": 1}, "new.pt.tmp")
os.replace("new.pt.tmp", "new.pt")
torch.save({"a": 1}, pathlib.Path("old.pt.tmp"))
pathlib.Path("old.pt.tmp").rename("old.pt")
torch.save({"a": 1}, "moved.pt.tmp")
shutil.move("moved.pt.tmp", "moved.pt")
os.replace("other.txt", "renamed.txt")
buffer = io.BytesIO()
torch.save({"a": 1}, buffer)
assert len(buffer.getvalue()) > 100
try:
    os.replace("gone", "x")
except FileNotFoundError:
    print("as ever")
"""


def test_files_that_were_there_before_stay_as_they_are(tmp_path: Path) -> None:
    run_folder, work = tmp_path / "run", tmp_path / "work"
    for folder in (run_folder / "rings", run_folder / "evidence", work):
        folder.mkdir(parents=True)
    for name in ("old.pt", "old.pt.tmp", "other.txt"):
        (work / name).write_text(name)
    (work / "script.py").write_text(SCRIPT_TRIAL_SAVES)
    path = f"{ROOT / 'ddpdoctor' / 'recorder' / 'bootstrap'}{os.pathsep}{ROOT}"
    env = clean_environment(
        PYTHONPATH=path, DDPDOCTOR_RUN=str(run_folder), DDPDOCTOR_TUNE_ROUNDS="4", RANK="0", WORLD_SIZE="1",
        LOCAL_RANK="0",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=work, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "as ever\n"), done.stderr
    assert {path.name: path.read_text() for path in work.iterdir() if path.name != "script.py"} == {
        "old.pt": "old.pt", "old.pt.tmp": "old.pt.tmp", "renamed.txt": "other.txt",
    }  # fmt: skip
