"""What a rank writes of its replicas, and when: scripts of many kinds, run under the recorder and read back."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ddpdoctor.recorder
from ddpdoctor.recorder import mesh
from ddpdoctor.recorder.mesh import sharing_in, sharing_of
from ddpdoctor.recorder.storage import fingerprint_file
from ddpdoctor.recorder.storage.fingerprint_file import ABSENT, FingerprintFile
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from tests.preloaded import preloaded

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
JOB = Path(__file__).parent / "replica_job.py"
CHECK_EVERY = 4
STEP, FORWARD, SYNC, END = (
    fingerprint_file.STEP, fingerprint_file.FORWARD, fingerprint_file.SYNC, fingerprint_file.END,
)  # fmt: skip

FIRST_HALF = (
    "ordinary", "own_buffers", "accumulated", "forward_only_in_no_sync", "backward_twice", "two_forwards_one_backward",
    "evaluated_between", "unused_parameters", "static_graph_in_bucket_views", "bypassed", "adversaries",
    "one_optimizer_for_two_models", "two_optimizers_for_one_model", "one_optimizer_for_each_parameter", "by_hand",
    "stale", "replaced_head", "left_out", "in_backward", "in_hooks_of_gradients", "ignored", "tied", "unfrozen",
    "as_before",
)  # fmt: skip
SECOND_HALF = (
    "compiled_around", "compiled_within", "compiled_step", "sharded_optimizer", "fused", "closures", "line_search",
    "in_two_threads", "nested", "step_that_raised", "scaled", "edited_after_training", "exchanged_after_training",
    "halved_after_training", "clipped_after_each_step", "made_again", "ended_by_an_error", "never_trained",
    "changing_rows", "wide_settings", "alone", "sub_group", "in_join", "in_a_fork",
)  # fmt: skip


@dataclass
class Ran:
    """A job that has run: its files of fingerprints, and which models its cases have made."""

    pid: int
    files: list[FingerprintFile]
    models: dict[str, list[list[Any]]]
    stderr: str
    notes: list[dict[str, Any]]


def start(folder, cases, every, script=JOB):
    for name in ("rings", "evidence"):
        (folder / name).mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPDOCTOR_")}
    environment |= {"PYTHONPATH": str(BOOTSTRAP), "OMP_NUM_THREADS": "1", "RANK": "0"}
    environment |= {"DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_CHECK_EVERY": str(every)}
    command = [sys.executable, str(script), *cases]
    with preloaded():
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder, job):
    stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr
    found = sorted((folder / "prints").glob("*.prints"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    ring = next(path for path in (folder / "rings").iterdir() if path.name.startswith(f"{job.pid}-"))
    notes = list(read_ring_file(ring).notes)
    return Ran(job.pid, [FingerprintFile(str(path)) for path in found], json.loads(stdout), stderr, notes)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Both halves of the cases, at once, and one case with consistency turned off."""
    asked = [(FIRST_HALF, CHECK_EVERY), (SECOND_HALF, CHECK_EVERY), (("as_before",), 0)]
    folders = [tmp_path_factory.mktemp("run") for _ in asked]
    running = [start(folder, *one) for folder, one in zip(folders, asked, strict=True)]
    return [finish(folder, job) for folder, job in zip(folders, running, strict=True)]


def files_of(jobs, case, clock, model=0, optimizer=None):
    """Return the files of a case's ``model``-th model, in the order in which they were made."""
    job = next(job for job in jobs if case in job.models)
    if model >= len(job.models[case]):
        return []
    group, number = job.models[case][model]
    wanted = {"clock": clock, "group": group, "model": number}
    wanted |= {} if optimizer is None else {"optimizer": optimizer}
    return [file for file in job.files if wanted.items() <= file.table.items()]


def records_of(jobs, case, clock, model=0, optimizer=None):
    return [r for file in files_of(jobs, case, clock, model, optimizer) for r in file.read_since(0)]


def numbers_of(jobs, case, clock, model=0, optimizer=None):
    return [record.number for record in records_of(jobs, case, clock, model, optimizer)]


def values_of(jobs, case, clock, key, model=0):
    return [record.text.get(key) for record in records_of(jobs, case, clock, model)]


def names_in(file, what):
    return [" ".join(filter(None, row[1:3])) for row in file.rows if row[0] == what]


def test_nothing_of_ours_failed(jobs):
    assert [note for job in jobs for note in job.notes if note.get("k") == "defect"] == []


def test_an_ordinary_model(jobs):
    assert numbers_of(jobs, "ordinary", STEP) == [1, 2, 4, 8]
    assert numbers_of(jobs, "ordinary", SYNC) == [0, 1, 2, 4, 8]
    assert numbers_of(jobs, "ordinary", END) == [9]
    assert numbers_of(jobs, "ordinary", FORWARD) == []
    (file,) = files_of(jobs, "ordinary", STEP)
    assert file.table["ranks"] == [0, 1, 2, 3]
    assert file.table["rank"] == 0
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert names_in(file, fingerprint_file.PARAMETER) == names_in(file, fingerprint_file.GRADIENT) == names
    assert names_in(file, fingerprint_file.STATE)[:3] == ["0.weight step", "0.weight exp_avg", "0.weight exp_avg_sq"]
    assert names_in(file, fingerprint_file.BUFFER) == [], "BatchNorm's are its own after a step, until DDP sends them"
    assert file.rows[0] == [fingerprint_file.GRADIENT, "0.weight", "", [8, 4], "float32"]
    (synced,) = files_of(jobs, "ordinary", SYNC)
    assert names_in(synced, fingerprint_file.BUFFER) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    (end,) = files_of(jobs, "ordinary", END)
    assert {row[0] for row in end.rows} == {fingerprint_file.PARAMETER}
    assert Path(end.path).stat().st_size < 4096, "there is one record, and room for one"


def test_what_changes_has_other_fingerprints(jobs):
    records = records_of(jobs, "ordinary", STEP)
    rows = len(records[0].fingerprints) // fingerprint_file.FINGERPRINT_SIZE
    for row in range(rows):
        at = slice(row * fingerprint_file.FINGERPRINT_SIZE, (row + 1) * fingerprint_file.FINGERPRINT_SIZE)
        assert len({record.fingerprints[at] for record in records}) == len(records)
        assert fingerprint_file.ABSENT not in {record.fingerprints[at] for record in records}


def test_values_beside_the_tensors(jobs):
    first, second, *_ = (record.text for record in records_of(jobs, "ordinary", STEP))
    assert (first["steps"], first["reductions"], first["forwards"]) == (1, 1, 1)
    assert (second["steps"], second["reductions"], second["forwards"]) == (2, 2, 1)
    assert first["settings"][:2] == [["lr", "0.1"], ["betas", "0.9 0.999"]]
    assert first["optimizer"] == "Adam"
    assert first["dropout"] is True
    assert first["hook"] == "as_it_is"
    assert first["random"] != second["random"], "dropout has drawn"
    assert (first["site"]["n"], Path(first["site"]["f"]).name) == ("step", JOB.name)
    assert "stray" not in first
    assert "unheld" not in first
    assert "join" not in first
    assert "unreduced" not in first


def test_buffers_that_ddp_does_not_send_are_looked_at_with_the_rest(jobs):
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    (step,), (end,) = files_of(jobs, "own_buffers", STEP), files_of(jobs, "own_buffers", END)
    assert names_in(step, fingerprint_file.BUFFER) == names_in(end, fingerprint_file.BUFFER) == names
    assert files_of(jobs, "own_buffers", SYNC) == []


@pytest.mark.parametrize(
    ("case", "reductions", "forwards", "unreduced"),
    [
        ("accumulated", [1, 2], [2, 2], [1, 1]),
        ("forward_only_in_no_sync", [0, 0], [1, 1], [1, 1]),
        ("backward_twice", [1, 2], [1, 1], [None, None]),
        ("two_forwards_one_backward", [1, 2], [2, 2], [None, None]),
        ("evaluated_between", [1, 2], [1, 1], [None, None]),
        ("unused_parameters", [1, 2], [1, 1], [None, None]),
        ("static_graph_in_bucket_views", [1, 2], [1, 1], [None, None]),
        ("bypassed", [0, 0], [0, 0], [None, None]),
        ("closures", [1, 2], [1, 1], [None, None]),
        ("line_search", [3, 6], [3, 3], [None, None]),
        ("scaled", [1, 3], [1, 2], [None, None]),
    ],
)
def test_forwards_and_reductions_are_counted(jobs, case, reductions, forwards, unreduced):
    assert numbers_of(jobs, case, STEP) == [1, 2]
    assert values_of(jobs, case, STEP, "reductions") == reductions
    assert values_of(jobs, case, STEP, "forwards") == forwards
    assert values_of(jobs, case, STEP, "unreduced_forwards") == unreduced


def test_adversaries_are_counted_apart(jobs):
    assert values_of(jobs, "adversaries", STEP, "reductions", model=0) == [1, 2]
    assert values_of(jobs, "adversaries", STEP, "reductions", model=1) == [1, 3]
    assert values_of(jobs, "adversaries", END, "reductions", model=0) == [3]
    assert values_of(jobs, "adversaries", END, "reductions", model=1) == [6]


def test_a_model_and_an_optimizer_make_a_stream(jobs):
    for model in (0, 1):
        assert numbers_of(jobs, "one_optimizer_for_two_models", STEP, model, optimizer=1) == [1, 2]
    for optimizer, own in ((1, ["0.weight", "0.bias"]), (2, ["2.weight", "2.bias"])):
        (file,) = files_of(jobs, "two_optimizers_for_one_model", STEP, optimizer=optimizer)
        assert names_in(file, fingerprint_file.GRADIENT) == own
        assert names_in(file, fingerprint_file.PARAMETER) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert values_of(jobs, "two_optimizers_for_one_model", STEP, "unheld")[0] == 2, "the second has not stepped yet"


def test_few_of_many_optimizers_of_a_model_are_followed(jobs):
    files = files_of(jobs, "one_optimizer_for_each_parameter", STEP)
    assert [file.table["optimizer"] for file in files] == [1, 2, 3, 4]


@pytest.mark.parametrize("case", ["by_hand", "stale", "in_backward", "in_hooks_of_gradients"])
def test_without_an_optimizer_that_holds_parameters_forwards_count(jobs, case):
    assert numbers_of(jobs, case, FORWARD)[:2] == [1, 2]
    assert files_of(jobs, case, STEP) == []
    (file,) = files_of(jobs, case, FORWARD)
    assert {row[0] for row in file.rows} == {fingerprint_file.PARAMETER}
    assert values_of(jobs, case, FORWARD, "steps")[:2] == [0, 0]
    assert len(numbers_of(jobs, case, END)) == 1


def test_stale_optimizers_show(jobs):
    assert values_of(jobs, "stale", FORWARD, "stray")[-1] >= 4
    assert values_of(jobs, "stale", FORWARD, "unheld") == [4, 4, 4]
    moved = {record.fingerprints for record in records_of(jobs, "stale", FORWARD)}
    assert len(moved) == 1, "no parameter changes"
    assert values_of(jobs, "in_backward", FORWARD, "unheld") == [None, None]
    assert len({record.fingerprints for record in records_of(jobs, "by_hand", FORWARD)}) == 3


def test_a_layer_that_was_replaced_after_the_optimizer_was_made_shows(jobs):
    assert values_of(jobs, "replaced_head", STEP, "replaced")[-1] == ["2.weight", "2.bias"]
    assert values_of(jobs, "replaced_head", STEP, "stray")[-1] == 2
    assert set(values_of(jobs, "left_out", STEP, "unheld")) == {2}
    assert values_of(jobs, "left_out", STEP, "replaced")[-1] is None


def test_names(jobs):
    (file,) = files_of(jobs, "ignored", STEP)
    assert (
        names_in(file, fingerprint_file.PARAMETER)
        == names_in(file, fingerprint_file.GRADIENT)
        == ["0.bias", "2.weight", "2.bias"]
    )
    (file,) = files_of(jobs, "tied", STEP)
    assert names_in(file, fingerprint_file.PARAMETER) == ["0.weight", "0.bias", "1.bias"]
    for case in ("compiled_around", "compiled_within"):
        (file,) = files_of(jobs, case, STEP)
        assert names_in(file, fingerprint_file.PARAMETER) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_what_was_unfrozen_after_wrapping_is_named_and_has_rows_from_then_on(jobs):
    before, after = files_of(jobs, "unfrozen", STEP)
    assert names_in(before, fingerprint_file.GRADIENT) == ["2.weight", "2.bias"]
    assert names_in(after, fingerprint_file.GRADIENT) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert names_in(before, fingerprint_file.PARAMETER) == names_in(after, fingerprint_file.PARAMETER)
    assert before.read_since(0)[-1].text.get("unreduced") is None
    (record,) = after.read_since(0)
    assert record.text["unreduced"] == ["0.weight", "0.bias"]
    assert ["1.lr", "0.01"] in record.text["settings"]


def test_absent_gradients_are_zeros(jobs):
    (file,) = files_of(jobs, "unused_parameters", STEP)
    size = fingerprint_file.FINGERPRINT_SIZE
    for record in file.read_since(0):
        absent = {
            row[1]
            for i, row in enumerate(file.rows)
            if row[0] == fingerprint_file.GRADIENT
            and record.fingerprints[i * size : (i + 1) * size] == fingerprint_file.ABSENT
        }
        assert absent == {"2.weight", "2.bias", "spare.weight", "spare.bias"}


@pytest.mark.parametrize("case", ["compiled_around", "compiled_within", "compiled_step", "nested", "in_join", "fused"])
def test_a_step_counts_once(jobs, case):
    assert numbers_of(jobs, case, STEP) == [1, 2]


def test_state_that_is_sharded_is_left_out(jobs):
    (file,) = files_of(jobs, "sharded_optimizer", STEP)
    assert [record.number for record in file.read_since(0)] == [1, 2]
    assert names_in(file, fingerprint_file.STATE) == []
    assert len(names_in(file, fingerprint_file.PARAMETER)) == len(names_in(file, fingerprint_file.GRADIENT)) == 4


def test_gradients_of_a_closure_are_those_of_its_own_step(jobs):
    (file,) = files_of(jobs, "closures", STEP)
    gradients = 4 * fingerprint_file.FINGERPRINT_SIZE
    assert all(fingerprint_file.ABSENT not in record.fingerprints[:gradients] for record in file.read_since(0))


def test_a_step_that_raised_does_not_hide_those_of_others(jobs):
    assert numbers_of(jobs, "step_that_raised", STEP, optimizer=1) == [1, 2]


def test_each_thread_makes_steps_of_its_own(jobs):
    for model in (0, 1):
        assert numbers_of(jobs, "in_two_threads", STEP, model) == [1, 2]
        assert values_of(jobs, "in_two_threads", STEP, "reductions", model) == [1, 2]


def test_settings_and_scale(jobs):
    assert values_of(jobs, "scaled", STEP, "scale") == [8.0, 4.0]
    assert numbers_of(jobs, "scaled", END) == [3], "the step that the scaler skipped is none"
    assert {"lr", "fused"} <= {key for key, _ in values_of(jobs, "fused", STEP, "settings")[0]}
    (settings,) = values_of(jobs, "wide_settings", STEP, "settings")
    assert settings[0] == ["lr", "0.1"], "what is too long is cut, not lost"
    assert values_of(jobs, "in_join", STEP, "join") == [True, True]


@pytest.mark.parametrize(
    "case",
    [
        "edited_after_training", "exchanged_after_training", "halved_after_training", "ended_by_an_error",
        "never_trained",
    ],
)  # fmt: skip
def test_no_end_is_written_of_a_model_that_training_did_not_leave_so(jobs, case):
    assert files_of(jobs, case, END) == []


@pytest.mark.parametrize(("case", "number"), [("clipped_after_each_step", 3), ("bypassed", 0), ("compiled_around", 3)])
def test_the_end_is_written(jobs, case, number):
    assert numbers_of(jobs, case, END) == [number]
    assert values_of(jobs, case, END, "steps") == [3]


def test_a_model_that_is_made_again_is_another(jobs):
    for model in (0, 1):
        assert numbers_of(jobs, "made_again", STEP, model) == [1, 2]
        assert numbers_of(jobs, "made_again", END, model) == [2], "it ends when it is deleted"


def test_rows_that_change_again_and_again_do_not_fill_the_folder(jobs):
    assert numbers_of(jobs, "changing_rows", STEP) == [1, 2, 4, 8, 12, 16]
    assert numbers_of(jobs, "changing_rows", END) == [40]
    assert len([note for note in jobs[1].notes if note.get("k") == "prints_end"]) == 1


def test_a_model_of_one_rank_has_nothing_to_be_compared_with(jobs):
    assert all(len(file.table["ranks"]) > 1 for job in jobs for file in job.files)


def test_a_sub_group_has_its_own_ranks_and_numbers(jobs):
    (file,) = files_of(jobs, "sub_group", STEP)
    assert (file.table["ranks"], file.table["model"]) == ([0, 2], 1)


def test_a_forked_child_writes_nothing(jobs):
    assert {file.pid for job in jobs for file in job.files} == {jobs[0].pid, jobs[1].pid}
    assert numbers_of(jobs, "in_a_fork", STEP) == [1, 2], "the child's step is not among them"


def test_training_is_as_it_is_without_us(jobs):
    seen, off = (
        [line for line in job.stderr.splitlines() if line.startswith("numerics")] for job in (jobs[0], jobs[2])
    )
    assert seen == off
    assert len(seen) == 1


def test_off_means_off(jobs):
    assert jobs[2].files == []


def test_a_model_that_ends_with_the_interpreter_is_not_looked_at(tmp_path):
    """An uncaught error leaves the script's names to the very end, when torch itself is half gone and aborts."""
    script = tmp_path / "dies.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel as DDP
            from torch.testing._internal.distributed.fake_pg import FakeStore
            dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
            model = DDP(torch.nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.no_sync():
                model(torch.randn(8, 4)).mean().backward()
            optimizer.step()
            raise RuntimeError("once")
            """
        )
    )
    job = start(tmp_path / "run", (), CHECK_EVERY, script)
    _, stderr = job.communicate(timeout=200)
    assert stderr.rstrip().endswith("RuntimeError: once")
    assert job.returncode == 1


# Who holds the same part of a tensor on a device mesh, and which tensors of its modules are constants.


@dataclass
class Placement:
    kind: str

    def is_partial(self):
        return self.kind == "partial"

    def is_replicate(self):
        return self.kind == "replicate"


@dataclass
class Mesh:
    """As much of torch's DeviceMesh as placements are read by, seen from one rank."""

    shape: tuple[int, ...]
    own: int
    mesh_dim_names: tuple[str, ...] | None = None

    @property
    def mesh(self):
        return torch.arange(torch.Size(self.shape).numel()).reshape(self.shape)

    @property
    def ndim(self):
        return len(self.shape)

    def size(self, dim):
        return self.shape[dim]

    def get_coordinate(self):
        found = (self.mesh == self.own).nonzero()
        return found[0].tolist() if len(found) else None


@dataclass
class Placed:
    device_mesh: Mesh
    placements: tuple[Placement, ...]


S, R, P = Placement("shard"), Placement("replicate"), Placement("partial")
NAMES = ("dp", "tp")


@pytest.mark.parametrize(
    ("shape", "names", "placements", "own", "expected"),
    [
        pytest.param((4,), None, (S,), 1, None, id="a shard is nobody else's"),
        pytest.param((4,), None, (R,), 1, ("dim_0", (0, 1, 2, 3)), id="replicated on all"),
        pytest.param((2, 2), NAMES, (R, S), 3, ("dp", (1, 3)), id="hybrid FSDP: by the replicating dimension"),
        pytest.param((2, 2), NAMES, (S, R), 2, ("tp", (2, 3)), id="sharded over dp, replicated in tp"),
        pytest.param((2, 2), NAMES, (R, R), 2, ("dp+tp", (0, 1, 2, 3)), id="replicated in both"),
        pytest.param((2, 2), NAMES, (S, S), 2, None, id="sharded in both"),
        pytest.param((4,), None, (P,), 1, None, id="still to be summed up"),
        pytest.param((2, 2), NAMES, (R, P), 1, None, id="still to be summed up in one dimension"),
        pytest.param((4, 1), NAMES, (S, R), 1, None, id="a dimension of one rank"),
        pytest.param((2,), None, (R,), 7, None, id="a rank that is not on the mesh"),
    ],
)
def test_by_placements(shape, names, placements, own, expected):
    assert sharing_of(Placed(Mesh(shape, own, names), placements)) == expected


def test_plain_parameters_are_held_by_the_whole_mesh():
    assert sharing_in(Mesh((2,), 0, ("tp",))) == ("tp", (0, 1))


class Net(nn.Module):
    """A model of a block with all kinds of tensors that nothing makes equal on all ranks."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.block.register_buffer("freq", torch.ones(3))
        self.block.register_buffer("none", None)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.register_buffer("empty", torch.ones(0))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)


def replace_freq(net):
    net.block.freq = torch.ones(3)


def change_mask(net):
    net.mask.logical_not_()


def never(net):
    """Change nothing."""


FREQ, MASK, FROZEN = "float32[3] of block.freq", "bool[2, 2] of mask", "float32[4] of frozen"
DP, TP = ("dp", (0, 1)), ("tp", (0, 1))


@pytest.fixture
def trained(monkeypatch):
    """Train two steps and return, by sharing, the constants that were written, and what ``to_empty`` left as it was."""
    written: dict[Any, tuple[list[str], list[str]]] = {}

    def write(files, number, values, rows, taken):
        if rows and values.get("unwritten") is not None:
            assert number == 2
            present = [row for at, (row, _) in enumerate(rows) if taken[16 * at : 16 * at + 16] != ABSENT]
            names = [f"{part} of {name}" for what, name, part, *_ in present if what == "b"]
            written[files["group"].removeprefix("mesh "), tuple(files["ranks"])] = (names, values["unwritten"])

    monkeypatch.setattr(mesh, "write", write)
    monkeypatch.setattr(mesh, "FingerprintFiles", lambda about, **_: about)
    monkeypatch.setattr(mesh, "check_every", lambda: 1)
    monkeypatch.setattr(mesh, "_modules", [])
    monkeypatch.setattr(mesh, "here", SimpleNamespace(is_rank=True))
    monkeypatch.setattr(nn.Module, "to_empty", nn.Module.to_empty)
    monkeypatch.setattr("ddpdoctor.recorder.groups.c10d", SimpleNamespace(get_rank=lambda: 0))
    places = {"fsdp._fully_shard._fully_shard": "fully_shard", "tensor.parallel.api": "parallelize_module"}
    ways = {}
    for place, name in places.items():
        module = SimpleNamespace(__name__=place, **{name: lambda module, *_, **__: module})
        mesh.patch(module)
        ways[name] = getattr(module, name)

    def train(net, passed, between=never):
        for way, part, dims in passed:
            own = Mesh((2,), 0, (dims,))
            ways[way](part, mesh=own) if way == "fully_shard" else ways[way](part, own)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            mesh.before_step(optimizer)
            mesh.after_step(optimizer)
            if step == 0:
                between(net)
        return written

    return train


@pytest.mark.parametrize(
    ("ways", "between", "expected"),
    [
        pytest.param(["fully_shard"], never, {DP: [FROZEN, MASK, FREQ]}, id="FSDP2"),
        pytest.param(["parallelize_module"], never, {TP: [MASK, FREQ]}, id="tensor parallel: no frozen ones"),
        pytest.param(["parallelize_module", "fully_shard"], never, {DP: [FROZEN, MASK, FREQ]}, id="FSDP goes first"),
        pytest.param(["fully_shard", "parallelize_module"], never, {DP: [FROZEN, MASK, FREQ]}, id="in any order"),
        pytest.param(["fully_shard"], replace_freq, {DP: [FROZEN, MASK]}, id="another tensor in its place"),
        pytest.param(["fully_shard"], change_mask, {DP: [FROZEN, FREQ]}, id="changed in place"),
    ],
)
def test_constants_are_what_two_steps_leave_alone(ways, between, expected, trained):
    net = Net()
    passed = [(way, net, "dp" if way == "fully_shard" else "tp") for way in ways]
    written = trained(net, passed, between)
    assert {sharing: sorted(names) for sharing, (names, _) in written.items()} == {
        sharing: sorted(names) for sharing, names in expected.items()
    }


def test_the_innermost_fsdp_says_who_should_hold_the_same(trained):
    net = Net()
    written = trained(net, [("fully_shard", net.block, "inner"), ("fully_shard", net, "dp")])
    assert written[("inner", (0, 1))][0] == [FREQ]
    assert sorted(written[DP][0]) == [MASK, FROZEN]


def test_what_to_empty_made_is_known_until_it_is_written_to(trained):
    net = Net()
    passed = [("fully_shard", net, "dp")]
    mesh.patch(SimpleNamespace(__name__="tensor._api"))
    net.to_empty(device="cpu")
    net.mask.fill_(value=True)
    with torch.no_grad():
        net.frozen.copy_(torch.ones(4))
    written = trained(net, passed)
    assert written[DP][1] == ["block.freq"]
