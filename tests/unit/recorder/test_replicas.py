"""What a rank writes of its replicas, and when: scripts of many kinds, run under the recorder and read back."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpdoctor.recorder import mesh
from ddpdoctor.recorder.mesh import sharing_in, sharing_of
from ddpdoctor.recorder.storage import fingerprint_file
from ddpdoctor.recorder.storage.fingerprint_file import ABSENT, FingerprintFile
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from tests.golden import Cases, words
from tests.preloaded import preloaded
from tests.scenarios.harmless.alone import RECORDER, make_folder
from tests.scenarios.running import clean_environment

GOLDEN = Cases(__name__)
JOB = Path(__file__).parent / "replica_job.py"
CHECK_EVERY = 4
FIRST_HALF = (
    "ordinary", "own_buffers", "accumulated", "forward_only_in_no_sync", "backward_twice", "two_forwards_one_backward",
    "evaluated_between", "unused_parameters", "static_graph_in_bucket_views", "bypassed", "adversaries",
    "one_optimizer_for_two_models", "two_optimizers_for_one_model", "one_optimizer_for_each_parameter", "by_hand",
    "stale", "replaced_head", "left_out", "in_backward", "in_hooks_of_gradients", "ignored", "tied", "unfrozen",
    "as_before",
)  # fmt: skip
SECOND_HALF = (
    "sharded_optimizer", "fused", "closures", "line_search",
    "in_two_threads", "nested", "step_that_raised", "scaled", "edited_after_training", "exchanged_after_training",
    "halved_after_training", "clipped_after_each_step", "made_again", "ended_by_an_error", "never_trained",
    "changing_rows", "wide_settings", "alone", "sub_group", "in_join", "in_a_fork",
)  # fmt: skip
COMPILED = ("compiled_around", "compiled_within", "compiled_step")


def start(folder, cases, every, script=JOB):
    environment = clean_environment(
        PYTHONPATH=str(RECORDER / "bootstrap"), RANK="0", DDPDOCTOR_RUN=str(make_folder(folder)),
        DDPDOCTOR_CHECK_EVERY=str(every),
    )  # fmt: skip
    command = [sys.executable, str(script), *cases]
    with preloaded():
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder, job):
    """Return a job that has run: its files of fingerprints, and which models its cases have made."""
    stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr
    found = sorted((folder / "prints").glob("*.prints"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    ring = next(path for path in (folder / "rings").iterdir() if path.name.startswith(f"{job.pid}-"))
    files, notes = [FingerprintFile(str(path)) for path in found], list(read_ring_file(ring).notes)
    return SimpleNamespace(pid=job.pid, files=files, models=json.loads(stdout), stderr=stderr, notes=notes)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Both halves of the cases, at once, and one case with consistency turned off."""
    asked = [(FIRST_HALF, CHECK_EVERY), (SECOND_HALF, CHECK_EVERY), (("as_before",), 0)]
    folders = [tmp_path_factory.mktemp("run") for _ in asked]
    running = [start(folder, *one) for folder, one in zip(folders, asked, strict=True)]
    return [finish(folder, job) for folder, job in zip(folders, running, strict=True)]


TEXTS = (
    "steps", "reductions", "forwards", "unreduced_forwards", "unheld", "unreduced", "scale", "join", "optimizer",
)  # fmt: skip
KINDS = {"g": "gradients", "p": "parameters", "b": "buffers"}


def told(job, case):
    """Return what each model of a case wrote: its files, the numbers of their records, and what stands in these."""
    shown = {}
    for at, (group, model) in enumerate(job.models[case]):
        for file in job.files:
            clock = file.table["clock"]
            in_a_circle = case == "compiled_within" and clock == fingerprint_file.END  # it ends when Python collects it
            if (file.table["group"], file.table["model"]) == (group, model) and not in_a_circle:
                assert file.table["rank"] == 0
                head = f"{case}, {clock} of model {at + 1} and optimizer {file.table['optimizer']}"
                shown.setdefault(head, []).append({"ranks": file.table["ranks"], **records_of(file)})
    return shown or {case: "nothing"}


def records_of(file):
    records, names = file.read_since(0), [" ".join(filter(None, row[1:3])) for row in file.rows]
    prints = [prints_of(records, row) for row in range(len(names))]
    found = {
        "numbers": [one.number for one in records], "unlike": len({one.fingerprints for one in records}),
        **{word: ", ".join(name for name, row in zip(names, file.rows, strict=True) if row[0] == kind)
           for kind, word in KINDS.items()},
        "absent": ", ".join(name for name, row in zip(names, prints, strict=True) if ABSENT in row),
    }  # fmt: skip
    values = {key: [one.text.get(key) for one in records] for key in TEXTS}
    return {key: one for key, one in (found | values).items() if one and one != [None] * len(records)}


def prints_of(records, row):
    size = fingerprint_file.FINGERPRINT_SIZE
    return [one.fingerprints[size * row : size * (row + 1)] for one in records]


FOLLOWED_LESS = ("one_optimizer_for_each_parameter", "changing_rows", "wide_settings")
"""Cases with very many rows or files."""


def test_what_each_case_writes(jobs):
    """An edited model has no end, and a step counts once. Names are the script's, and what is sharded is left out."""
    shown = {}
    for job, cases in zip(jobs, (FIRST_HALF, SECOND_HALF), strict=False):
        for case in cases:
            shown |= {} if case in FOLLOWED_LESS else told(job, case)
    GOLDEN.check("what_each_case_writes", shown)


@pytest.mark.full
def test_what_compiled_cases_write(tmp_path):
    job = finish(tmp_path, start(tmp_path, COMPILED, CHECK_EVERY))
    GOLDEN.check("what_compiled_cases_write", {head: one for case in COMPILED for head, one in told(job, case).items()})


def files_of(job, case, clock):
    return [file for file in job.files if [file.table["group"], file.table["model"]] == job.models[case][0]
            and file.table["clock"] == clock]  # fmt: skip


def last_of(jobs, case, key, clock=fingerprint_file.STEP):
    (job,) = [job for job in jobs[:2] if case in job.models]
    return files_of(job, case, clock)[-1].read_since(0)[-1].text.get(key)


def test_what_stands_beside_the_tensors_and_few_files_of_many_rows_or_optimizers(jobs):
    assert [note for job in jobs for note in job.notes if note.get("k") == "defect"] == []
    assert all(len(file.table["ranks"]) > 1 for job in jobs for file in job.files), "one rank has none to compare with"
    assert jobs[2].files == [], "off means off"
    (file,), (end,) = (files_of(jobs[0], "ordinary", clock) for clock in (fingerprint_file.STEP, fingerprint_file.END))
    assert file.rows[0] == [fingerprint_file.GRADIENT, "0.weight", "", [8, 4], "float32"]
    assert [row[2] for row in file.rows if row[0] == fingerprint_file.STATE][:3] == ["step", "exp_avg", "exp_avg_sq"]
    assert Path(end.path).stat().st_size < 4096, "there is one record, and room for one"
    records = file.read_since(0)
    changes = [prints_of(records, row) for row in range(len(file.rows))]
    assert all(len({*row} - {ABSENT}) == len(records) for row in changes)
    first, second, *_ = (record.text for record in records)
    assert first["settings"][:2] == [["lr", "0.1"], ["betas", "0.9 0.999"]]
    assert (first["dropout"], first["hook"], "stray" in first) == (True, "as_it_is", False)
    assert first["random"] != second["random"], "dropout has drawn"
    assert (first["site"]["n"], Path(first["site"]["f"]).name) == ("step", JOB.name)
    assert ["1.lr", "0.01"] in last_of(jobs, "unfrozen", "settings")
    assert last_of(jobs, "wide_settings", "settings")[0] == ["lr", "0.1"], "what is too long is cut, not lost"
    assert {"lr", "fused"} <= {key for key, _ in last_of(jobs, "fused", "settings")}
    assert last_of(jobs, "stale", "stray", fingerprint_file.FORWARD) >= 4
    assert [last_of(jobs, "replaced_head", key) for key in ("replaced", "stray")] == [["2.weight", "2.bias"], 2]
    assert last_of(jobs, "left_out", "replaced") is None
    (sharded,) = files_of(jobs[1], "sharded_optimizer", fingerprint_file.STEP)
    assert fingerprint_file.STATE not in {row[0] for row in sharded.rows}
    followed = files_of(jobs[0], "one_optimizer_for_each_parameter", fingerprint_file.STEP)
    assert [one.table["optimizer"] for one in followed] == [1, 2, 3, 4]
    for clock, numbers in ((fingerprint_file.STEP, [1, 2, 4, 8, 12, 16]), (fingerprint_file.END, [40])):
        changing = files_of(jobs[1], "changing_rows", clock)
        assert [record.number for one in changing for record in one.read_since(0)] == numbers
    assert len([note for note in jobs[1].notes if note.get("k") == "prints_end"]) == 1


def test_a_forked_child_writes_nothing_and_training_is_as_it_is_without_us(jobs):
    assert {file.pid for job in jobs for file in job.files} == {jobs[0].pid, jobs[1].pid}
    seen, off = (
        [line for line in job.stderr.splitlines() if line.startswith("numerics")] for job in (jobs[0], jobs[2])
    )
    assert seen == off
    assert len(seen) == 1


DIES = """
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


def test_a_model_that_ends_with_the_interpreter_is_not_looked_at(tmp_path):
    """An uncaught error leaves the script's names to the very end, when torch itself is half gone and aborts."""
    (tmp_path / "dies.py").write_text(DIES)
    job = start(tmp_path / "run", (), CHECK_EVERY, tmp_path / "dies.py")
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


def make_empty(net):
    """Make all tensors anew, and write to some."""
    mesh.patch(SimpleNamespace(__name__="tensor._api"))
    net.to_empty(device="cpu")
    net.mask.fill_(value=True)
    with torch.no_grad():
        net.frozen.copy_(torch.ones(4))


PLACES = {"fully_shard": "fsdp._fully_shard._fully_shard", "parallelize_module": "tensor.parallel.api"}


def constants_of(row):
    """Shard a model so, and train two steps, with a change between or before them.

    Return, by sharing, the constants that were written, and what ``to_empty`` has left as it was.
    """
    net, written, (ways, between, before) = Net(), {}, (*row.split(" | "), "", "")[:3]

    def write(files, number, values, rows, _taken=None):
        if rows and values.get("unwritten") is not None:
            assert number == 2
            taken = mesh.fingerprints_of(rows).value()
            present = [row for at, (row, _) in enumerate(rows) if taken[16 * at : 16 * at + 16] != ABSENT]
            names = sorted(f"{part} of {name}" for what, name, part, *_ in present if what == "b")
            written[files["group"], tuple(files["ranks"])] = {"same": names, "unwritten": values["unwritten"]}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mesh, "write", write)
        patched.setattr(mesh, "FingerprintFiles", lambda about, **_: about)
        patched.setattr(mesh, "check_every", lambda: 1)
        patched.setattr(mesh, "_modules", [])
        patched.setattr(mesh, "here", SimpleNamespace(is_rank=True))
        patched.setattr(nn.Module, "to_empty", nn.Module.to_empty)
        patched.setattr("ddpdoctor.recorder.groups.c10d", SimpleNamespace(get_rank=lambda: 0))
        if before:
            globals()[before](net)
        for way, part, dims in map(str.split, ways.split(", ")):
            api = SimpleNamespace(__name__=PLACES[way], **{way: lambda module, *_, **__: module})
            mesh.patch(api)
            own = Mesh((2,), 0, (dims,))
            of_mesh = ((), {"mesh": own}) if way == "fully_shard" else ((own,), {})
            getattr(api, way)(net.block if part == "block" else net, *of_mesh[0], **of_mesh[1])
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        shares = mesh.shares_of(optimizer)
        for step in (1, 2, 4):
            shares.take_before(optimizer)
            shares.take_after(step, optimizer)
            if step == 1 and between:
                globals()[between](net)
    return written


test_words = words(__name__, sharing_of=lambda row: sharing_of(Placed(*eval(row))), constants=constants_of)
