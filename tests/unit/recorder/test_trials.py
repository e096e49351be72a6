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

from ddpdoctor.collect.recorded import fetch_cells, find_children, read_fetches, read_lines, read_steps
from ddpdoctor.launch.seen import WorkersSeen
from ddpdoctor.model.steps import FetchTimes, Phase, StepEnd
from ddpdoctor.recorder import loaders, step_clock, steps, tune_trial
from ddpdoctor.recorder.detail import backends_of
from ddpdoctor.recorder.sampler import LineTable
from ddpdoctor.recorder.state import here
from ddpdoctor.recorder.step_clock import StepClock
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.tune_trial import LEFT_OUT, MEASURED, MEASURED_IN_LAUNCH, MIB, WARM_UP, choose_caps
from tests.golden import words
from tests.preloaded import preloaded
from tests.scenarios.harmless.alone import RECORDER, make_folder, run_recorded
from tests.scenarios.running import clean_environment, free_port

# A launch of a trial has one setting from its start: what the script constructs gets it as an argument.


ROWS = TensorDataset(torch.zeros(8, 1))


class Stream(IterableDataset):
    """Rows without an index, whose number is known."""

    def __len__(self):
        return 80

    def __iter__(self):
        return iter(ROWS)


@pytest.fixture
def loader_class(monkeypatch):
    """Return a DataLoader of its own, whose constructor may be changed."""
    monkeypatch.setattr(here, "is_rank", True)
    monkeypatch.setattr(tune_trial, "_loaders", [])
    return type("Loader", (DataLoader,), {"__init__": DataLoader.__init__})


def ddp_class(names):
    """Return a class with these arguments, of which an object knows what it was given."""
    kind = {}
    exec(f"def __init__(self, module, {', '.join(f'{name}=None' for name in names)}): self.given = locals()", kind)
    return type("Model", (), {"__init__": kind["__init__"]})


OLD = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
NEW = (*OLD, "bucket_cap_mb_list", "forward_sync_buffers")


def given_with(row):
    """Return what DDP's constructor is given under a setting, of torch's old arguments or its new ones."""
    names, setting = row.split()
    script = {"broadcast_buffers": True, "bucket_cap_mb": 10, "find_unused_parameters": True}
    kind = ddp_class({"OLD": OLD, "NEW": NEW}[names])
    tune_trial.give_to_ddp(kind, setting)
    return {name: value for name, value in kind("module", **script).given.items() if name not in {"self", "module"}}


def test_ddp_gets_the_setting_also_by_its_place():
    kind = ddp_class(OLD)
    tune_trial.give_to_ddp(kind, "buffers_off")
    given = kind("module", "broadcast", 10).given
    assert (given["broadcast_buffers"], given["bucket_cap_mb"]) == (False, 10)


def test_this_torch_has_the_arguments_and_a_call_that_it_refuses_is_refused_as_ever():
    names = DDP.__init__.__code__.co_varnames
    for setting in ("bucket_cap=524288", "buffers_off", "static_graph", "find_unused_off", "gradient_as_bucket_view"):
        assert set(tune_trial._ddp_arguments(setting, {}, names)) <= set(names)
    kind = ddp_class(OLD)
    tune_trial.give_to_ddp(kind, "static_graph")
    with pytest.raises(TypeError, match="no_such"):
        kind("module", no_such=1)


LOADERS = [
    {"batch_size": 2}, {"batch_size": 2, "sampler": SequentialSampler(ROWS)}, {},
    {"batch_sampler": BatchSampler(SequentialSampler(ROWS), 2, drop_last=False)},
    {"batch_size": 2, "num_workers": 1, "prefetch_factor": 4},
]  # fmt: skip


def test_loaders_of_several_batches_get_workers_that_stay_and_streams_and_single_batches_stay_as_they_are(
    loader_class, monkeypatch
):
    monkeypatch.setenv("DDPDOCTOR_TUNE_SETTING", "workers=2")
    tune_trial.patch_loader(SimpleNamespace(DataLoader=loader_class))
    assert [loader_class(data, batch_size=8).num_workers for data in (ROWS, Stream())] == [0, 0]
    assert "no DataLoader" in tune_trial.why_without_effect("workers=2")
    for options in LOADERS:
        tune_trial._loaders.clear()
        loader = loader_class(ROWS, **options)
        assert (loader.num_workers, loader.persistent_workers) == (2, True)
        assert loader.prefetch_factor == options.get("prefetch_factor", 2)
        assert tune_trial.why_without_effect("workers=2") == ""


def test_threads_that_the_script_sets_itself_are_noticed():
    present = torch.get_num_threads()
    assert tune_trial.why_without_effect(f"threads={present}") == ""
    assert f"the script sets {present} threads itself" in tune_trial.why_without_effect(f"threads={present + 1}")


# Which jobs get DETAIL by default: those of which torch makes all groups over Gloo.


CPU, CUDA = SimpleNamespace(type="cpu"), SimpleNamespace(type="cuda")


class Backend(str):
    __slots__ = ()
    default_device_backend_map = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}  # noqa: RUF012 - as torch has it


def config(backend):
    """Make torch's choice where nobody names a backend: that of the accelerator of this machine."""
    assert backend == "undefined"
    return SimpleNamespace(get_device_backend_map=lambda: {"cuda": "nccl"})


C10D = SimpleNamespace(Backend=Backend, BackendConfig=config)


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
    (tmp_path / "levels.py").write_text(SCRIPT)
    with preloaded():
        done = run_recorded(make_folder(tmp_path / "run"), str(tmp_path / "levels.py"), DDPDOCTOR_DETAIL="gloo")
    assert done.stdout.split() == [b"DETAIL+", b"DETAIL+", b"OFF", b"DETAIL+", b"INFO", b"INFO"], done.stderr


# A trial switches settings of DDP in a running job, changes no parameter by that, and leaves nothing behind.


JOB = Path(__file__).with_name("trial_job.py")
KEEPING = "bucket_cap,gradient_as_bucket_view,static_graph,buffers_off,unreduced"
"""Settings that change no parameter, until the reduction is left out."""
KEPT = "the checkpoint of an earlier run"


def run_job(folder, rounds, steps, only="", setting=""):
    make_folder(folder)
    checkpoint = folder / "model.pt"
    checkpoint.write_text(KEPT)
    words = ["--nproc-per-node=2", f"--master-port={free_port()}", str(JOB), str(steps), str(checkpoint)]
    env = clean_environment(
        PYTHONPATH=f"{RECORDER / 'bootstrap'}{os.pathsep}{RECORDER.parents[1]}", DDPDOCTOR_RUN=str(folder),
        DDPDOCTOR_TUNE_ROUNDS=str(rounds), DDPDOCTOR_TUNE_ONLY=only, DDPDOCTOR_TUNE_SETTING=setting,
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    with preloaded():
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1], checkpoint


def lines_of(folder, rank):
    return [json.loads(line) for line in (folder / "tuning" / f"{rank}.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_parameters_are_those_of_a_job_without_switches_until_the_reduction_is_left_out(tmp_path):
    folders = [tmp_path / name for name in ("tried", "plain")]
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


@pytest.mark.full
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


def test_each_round_has_every_setting_once_in_one_order_for_all_ranks():
    settings = ["base", "again", "views"]
    blocks = tune_trial.order_blocks(settings, 4)
    assert blocks == tune_trial.order_blocks(settings, 4)
    rounds = [[setting for one, setting in blocks if one == number] for number in range(4)]
    assert [sorted(one) for one in rounds] == [sorted(settings)] * 4
    assert len(set(map(tuple, rounds))) > 1


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


@pytest.mark.full
def test_files_that_were_there_before_stay_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("old.pt", "old.pt.tmp", "other.txt"):
        Path(name).write_text(name)
    Path("script.py").write_text(SCRIPT_TRIAL_SAVES)
    done = run_recorded(make_folder(tmp_path / "run"), "script.py", DDPDOCTOR_TUNE_ROUNDS="4")
    assert (done.status, done.stdout) == (0, b"as ever\n"), done.stderr
    assert {path.name: path.read_text() for path in Path().iterdir() if path.name != "script.py"} == {
        "old.pt": "old.pt", "old.pt.tmp": "old.pt.tmp", "renamed.txt": "other.txt",
    }  # fmt: skip


# Where steps end, what they take, and at which lines the main thread is met.


ENDS = [ring_layout.STEP_COLLECTIVE, ring_layout.STEP_BACKWARD, ring_layout.STEP_REDUCED, ring_layout.STEP_OPTIMIZER]


def make(tmp_path, pid=42):
    """Make the ring of a rank, or of a child with another pid."""
    kind = "RANK" if pid == 42 else "CHILD"
    role, shape = getattr(ring_layout, f"ROLE_{kind}"), getattr(ring_layout, f"{kind}_SHAPE")
    return Ring(str(tmp_path), role, shape, pid=pid, start_ticks=7)


def read(ring):
    return ring_reading.read_ring_file(ring.path)


def ends_of(row):
    """Return which of the events, a level and a key each, end a step."""
    clock = StepClock()
    return [at for at, event in enumerate(row.split()) if clock.ends_step(ENDS["CBRO".index(event[0])], event[1:])]


def test_steps_are_counted_anew_under_a_better_mark(ring):
    clock = StepClock()
    for _ in range(7):
        assert clock.ends_step(ring_layout.STEP_COLLECTIVE, "site")
        clock.take().write()
    for _ in range(3):
        assert clock.ends_step(ring_layout.STEP_OPTIMIZER, 1)
        clock.take().write()
    times = read_steps(read(ring))
    assert times is not None
    assert (times.ends_with, list(times.numbers)) == (StepEnd.OPTIMIZER, [1, 2, 3])


def test_time_goes_to_the_phase_in_which_it_passed(monkeypatch):
    clock = StepClock()
    monkeypatch.setattr(step_clock, "clock", clock)
    for phase in ("BEFORE", "FORWARD", "BETWEEN", "BACKWARD", "BEFORE"):
        clock.enter(getattr(ring_layout, phase))
    began = step_clock.begin_wait()
    assert step_clock.begin_wait() == 0, "a wait inside a wait counts once"
    assert clock.waiting
    step_clock.end_wait(began, counts=True)
    assert not clock.waiting
    step_clock.end_wait(step_clock.begin_wait(), counts=False)
    waited = clock.waits[ring_layout.BEFORE]
    ended = clock.take()
    assert all(spent > 0 for spent in ended.spent)
    assert ended.waits == [waited, 0, 0, 0]
    assert 0 < waited <= ended.spent[ring_layout.BEFORE]
    assert clock.spent == clock.waits == [0, 0, 0, 0]
    assert step_clock._us([1999, 0, 10**18, 5000]) == [1, 0, 2**32 - 1, 5], "what 32 bits do not hold is cut"


def test_a_wait_for_the_buffers_of_rank_0_is_seen_from_outside(ring):
    module = SimpleNamespace(forward=None, _sync_buffers=lambda: ring.get("wait_since_ns"), __name__="Model")
    steps.patch_ddp(module)
    assert module._sync_buffers() > 0
    assert ring.get("wait_since_ns") == 0


def test_a_ring_keeps_the_last_steps(ring):
    group = ring.intern("7")
    for number in range(1, 301):
        ring.step(number, number * 10, group, ring_layout.STEP_REDUCED, [number, 2, 3, 2**32 - 1], [0, 0, 0, number])
    times = read_steps(read(ring))
    assert times is not None
    assert (times.ends_with, times.group, list(times.numbers)) == (StepEnd.REDUCTION, "7", list(range(45, 301)))
    assert [column[-1] for column in times.phases_us] == [300, 2, 3, 2**32 - 1]
    assert [column[0] for column in times.waits_us] == [0, 0, 0, 45]


def test_a_step_whose_wait_is_not_known_as_on_a_gpu_is_left_out_and_counted(tmp_path, monkeypatch):
    ring = make(tmp_path)
    assert read_steps(read(ring)) is None
    child = make(tmp_path, 43)
    child.step(1, 1, 0, 0, [0] * 4, [0] * 4)
    assert read_steps(read(child)) is None
    for number, flags in ((1, ring_layout.STEP_REDUCED), (2, ring_layout.STEP_REDUCED | ring_layout.STEP_WAIT_UNKNOWN)):
        ring.step(number, number, 0, flags, [1] * 4, [0] * 4)
    times = read_steps(read(ring))
    assert (list(times.numbers), times.unknown) == ([1], 1)
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: True))
    assert StepClock().take().flags & ring_layout.STEP_WAIT_UNKNOWN


@pytest.mark.usefixtures("ring")
def test_the_waits_of_about_one_step_in_four_are_read_once_there_are_many(monkeypatch):
    class Model:
        device_type, logger, process_group = "cpu", object(), type("Group", (), {"group_name": "7"})()

    model, read_in = Model(), []
    for number in range(1, 81):
        clock, pending = StepClock(), dict[int, steps.Reduction]()
        clock.number = number - 1
        monkeypatch.setattr(steps, "clock", clock)
        monkeypatch.setattr(steps, "_pending", pending)
        steps.model_reduced(model, 1, 2)
        assert clock.unknown != bool(pending)
        read_in += [number] if pending else []
        pending.clear()
    assert read_in == [*range(1, 65), 65, 68, 73, 78]


def at(line, function="load"):
    return __file__, line, function


def test_lines_are_counted_by_phase_outside_waits(tmp_path, monkeypatch):
    clock = StepClock()
    monkeypatch.setattr(here, "is_rank", True)
    ring, table = make(tmp_path), LineTable()
    table.count(ring, clock, at(1))  # before the first step: imports, setup
    clock.number = 1
    for _ in range(3):
        table.count(ring, clock, at(2))
    clock.phase = ring_layout.BACKWARD
    table.count(ring, clock, at(2))
    clock.waiting = True
    table.count(ring, clock, at(3))
    seen = read_lines(read(ring), ())
    assert [(s.frame.line, s.phase, s.times) for s in seen] == [(2, Phase.BEFORE, 3), (2, Phase.BACKWARD, 1)]


def test_a_full_table_gives_up_its_rarest_line(tmp_path):
    ring, table = make(tmp_path, 43), LineTable()
    for line in range(1, ring_layout.CHILD_SHAPE.lines + 2):
        for _ in range(1 if line == 5 else 2):
            table.count(ring, StepClock(), at(line))
    seen = {s.frame.line for s in read_lines(read(ring), ())}
    assert seen == set(range(1, ring_layout.CHILD_SHAPE.lines + 2)) - {5}


def test_a_forked_child_counts_for_itself_and_belongs_to_its_parent(tmp_path):
    table, rank = LineTable(), make(tmp_path)
    for _ in range(5):
        table.count(rank, StepClock(), at(1))
    child = make(tmp_path, 43)
    child.note({"k": "process", "ppid": 42})
    LineTable().count(child, StepClock(), at(1))
    contents = {42: read(rank), 43: read(child)}
    seen = read_lines(contents[42], find_children(contents)[42])
    assert [(s.times, s.in_child) for s in seen] == [(5, False), (1, True)]


def test_children_of_a_fork_server_work_for_the_rank_that_started_it(tmp_path):
    server, worker = (make(tmp_path, pid) for pid in (43, 44))
    server.note({"k": "process", "ppid": 42})
    worker.note({"k": "process", "ppid": 43})
    worker.fetched(3, 3_000_000, 1_000_000, 2_000_000)
    contents = {42: read(make(tmp_path)), 43: read(server), 44: read(worker)}
    found = read_fetches(find_children(contents)[42])
    assert found == FetchTimes(batches=3, making_ms=3.0, pauses_ms=1.0, cpu_ms=2.0)
    assert (found.busy_share, found.batch_ms) == (0.75, 1.0)
    kept = WorkersSeen()
    kept.keep(Path(worker.path))
    assert read_fetches((), kept.row(42)["child_fetches"]) == found
    assert read_fetches((), ()) is None
    assert read_fetches((), (1, 2)) is None


def test_no_pause_of_a_worker_counts_for_more_than_the_batch_after_it(tmp_path):
    ring, times = make(tmp_path, 43), loaders.WorkerTimes()
    for began_ns, ended_ns in ((0, 10), (15, 25), (1000, 1020)):
        times.add(ring, began_ns, ended_ns)
    assert fetch_cells(read(ring)) == (3, 40, 25, 0)
    forked = make(tmp_path, 43)
    times.add(forked, 2000, 2010)
    assert fetch_cells(read(forked)) == (1, 10, 0, 0)


def test_batches_are_timed_once_and_errors_read_as_without_us():
    class Fetcher:
        def fetch(self, index):
            return 10 // index

    module = SimpleNamespace(_MapDatasetFetcher=Fetcher)
    loaders.patch_fetchers(module)
    once = Fetcher.fetch
    loaders.patch_fetchers(module)
    assert Fetcher.fetch is once
    assert Fetcher().fetch(5) == 2
    with pytest.raises(ZeroDivisionError) as caught:
        Fetcher().fetch(0)
    assert [Path(entry.path).name for entry in caught.traceback] == ["test_trials.py"] * 2


def test_the_lines_of_ended_children_are_kept_without_their_rings(tmp_path):
    kept = WorkersSeen()
    for pid in (43, 44):
        ring, table = make(tmp_path, pid), LineTable()
        ring.note({"k": "process", "ppid": 42})
        table.count(ring, StepClock(), at(17))
        ring.fetched(1, 10, 2)
        kept.keep(Path(ring.path))
        Path(ring.path).unlink()
    kept.keep(tmp_path / "gone.ring")
    row = kept.row(42)
    assert (row["child_fetches"], row["child_lines"]) == ([2, 20, 4, 0], [[__file__, 17, "load", 2]])
    assert not any(kept.row(7).values())
    seen = read_lines(read(make(tmp_path)), (), row["child_lines"])
    assert [(s.frame.line, s.times, s.in_child) for s in seen] == [(17, 2, True)]


test_words = words(
    __name__, ddp_gets=given_with, ends_a_step=ends_of, backends_of=lambda row: sorted(backends_of(*eval(row))),
    choose_caps=lambda mib: [cap / MIB for cap in choose_caps(*(int(float(one) * MIB) for one in mib.split()))],
)  # fmt: skip
