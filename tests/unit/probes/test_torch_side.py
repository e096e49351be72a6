"""What a probe does beside torch: the trial of a GPU, loaders, files nearby and the user's code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes import gpu_trial
from ddpdoctor.probes.checkpoint.session import find_gaps, find_leftovers, read_expected
from ddpdoctor.probes.data import digest_leaves, draw_from
from ddpdoctor.probes.load_torch import FORMER_HANDLING, HANDLING, OTHERS, hold_watchdog
from ddpdoctor.probes.user_code import load_callable, users_turn

# The work that GPUs are given, done by the processor: exact when it is right, and reported when it is wrong.


CPU = torch.device("cpu")


def test_work_that_is_right_what_a_device_says_and_wrong_use():
    assert gpu_trial.try_work(CPU, size=96, memory_bytes=1) is None
    assert "\n" not in gpu_trial.try_work(torch.device("meta"), size=9, memory_bytes=1)
    with pytest.raises(SystemExit):
        gpu_trial.main(["work"])


def test_a_copy_is_compared():
    def half_a_copy(sent, landed):
        landed[:1000] = sent[:1000]

    assert gpu_trial.try_copy(CPU, CPU, seed=3, copy_bytes=4096) == (None, None)
    error, _ = gpu_trial.try_copy(CPU, CPU, seed=3, copy_bytes=4096, copy=half_a_copy)
    assert error == "24 of 1024 words arrived wrong"
    one, other = (gpu_trial._pattern(1000, seed, CPU) for seed in (0, 1))
    assert len(one.unique()) == 1000
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_formula_is_the_product(dtype):
    left, right, expected = gpu_trial.make_product(60, dtype, CPU)
    by_integers = left.to(torch.int64) @ right.to(torch.int64)
    assert torch.equal(by_integers, expected.to(torch.int64))
    assert set(by_integers.unique().tolist()) == {-128, 256}
    assert gpu_trial.compare_product(left @ right, expected) is None


def test_a_product_that_is_wrong_in_one_place():
    left, right, expected = gpu_trial.make_product(60, torch.float32, CPU)
    product = left @ right
    product[3, 4] += 1
    assert gpu_trial.compare_product(product, expected) == "is wrong in 1 of 3600 places"
    product[3, 4] = float("nan")
    assert gpu_trial.compare_product(product, expected) == "holds NaN in 1 of 3600 places"


def test_every_ordered_pair_is_tried():
    found = list(gpu_trial.try_copies([CPU, CPU, CPU], copy_bytes=4096))
    assert [(one["source"], one["target"]) for one in found] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(one["ok"] for one in found)


# What keeps torch's watchdog from ending a rank before its report: set unless the user has set it.


OFF = dict.fromkeys((HANDLING, *OTHERS), "0")
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        ({}, OFF),
        # torchrun sets 1 where the user has set nothing.
        ({**UNDER_TORCHRUN, HANDLING: "1"}, OFF),
        ({HANDLING: "1"}, {**OFF, HANDLING: "1"}),
        ({**UNDER_TORCHRUN, HANDLING: "3"}, {**OFF, HANDLING: "3"}),
        ({FORMER_HANDLING: "2"}, dict.fromkeys(OTHERS, "0")),
        (dict.fromkeys((HANDLING, *OTHERS), "1"), dict.fromkeys((HANDLING, *OTHERS), "1")),
    ],
)
def test_what_the_user_has_set_stays(env, changed):
    after = dict(env)
    hold_watchdog(after)
    assert after == env | changed


def test_it_is_set_before_torch_is_there():
    code = (
        "import os, sys, json; from ddpdoctor.probes.load_torch import load_torch\n"
        "class See:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'torch': print(json.dumps({{n: os.environ.get(n) for n in {sorted(OFF)}}})); sys.exit()\n"
        "sys.meta_path.insert(0, See()); load_torch()"
    )
    kept = {name: value for name, value in os.environ.items() if name not in OFF}
    seen = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(seen.stdout) == OFF


# What loaders draw, in one process: indices under subsets, epochs, data without indices, what is no loader.


class Numbers(Dataset):
    def __init__(self, length=20, shift=0):
        self.length, self.shift = length, shift

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.rand(2) + torch.tensor([index + self.shift, -index]), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0).reshape(10, 2))


class Broken(Numbers):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


def look(made, epochs=2, *, set_epoch=True):
    return draw_from(made, "data:make", 0, epochs, set_epoch=set_epoch)[0]


def maps(made, epochs=2):
    return draw_from(made, "data:make", 0, epochs, set_epoch=True)[1]


def numbers(looked):
    return [(one.drawn, one.repeated, one.batches, one.last_batch) for one in looked.passes]


def test_indices_are_counted_without_loading_the_samples():
    looked = look(DataLoader(Numbers(), 8))
    assert numbers(looked) == [(20, 0, 3, 4)] * 2
    assert looked.samples == 20
    assert maps(DataLoader(Numbers(), 8))[0] == bytes([255, 255, 15])
    assert (looked.loader.epochs[0].total, looked.loader.epochs[0].xor) == (190, 0)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(Numbers(), 8, drop_last=True), (16, 0, 2, 8)),
        (DataLoader(Numbers(), batch_size=None), (20, 0, 20, 1)),
        (DataLoader(Numbers(), batch_sampler=BatchSampler(range(20), 6, drop_last=False)), (20, 0, 4, 2)),
        (DataLoader(Numbers(), 5, sampler=WeightedRandomSampler([1.0] + [0.0] * 19, 10)), (10, 9, 2, 5)),
        (DataLoader(Numbers(), 5, sampler=[torch.tensor(3), 4, -1]), (3, 0, 1, 3)),
    ],
)
def test_samplers_of_any_kind_are_followed(loader, expected):
    assert numbers(look(loader, 1)) == [expected]


def test_a_subset_is_traced_back_to_the_samples_under_it():
    inner = Subset(Numbers(), range(1, 20, 2))
    loader = DataLoader(Subset(inner, [0, 9]), 2)
    assert look(loader, 1).samples == 20
    assert int.from_bytes(maps(loader)[0], "little") == 1 << 1 | 1 << 19


def test_set_epoch_is_called_or_not_as_asked():
    data = Numbers()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))
    called, left = look(loader), look(loader, set_epoch=False)
    assert called.set_epoch
    assert len({epoch.order for epoch in called.loader.epochs}) == 2
    assert len({epoch.order for epoch in left.loader.epochs}) == 1
    assert called.loader.sampler.standard
    assert (called.loader.sampler.replicas, called.loader.sampler.rank) == (2, 0)


def test_data_without_indices_is_gone_over():
    looked = look(DataLoader(Stream(), 4), 1)
    assert numbers(looked) == [(10, None, 3, 2)]
    assert looked.loader.iterable
    assert len(looked.loader.epochs[0].batch_digests) == 3
    assert numbers(look([torch.zeros(3), torch.zeros(2)], 1)) == [(5, None, 2, 2)]


def test_indices_that_are_none_leave_the_counting_to_the_data():
    batches = [[("a", 1)], [("b", 2)]]
    loader = DataLoader({("a", 1): 1.0, ("b", 2): 2.0}, batch_sampler=batches)
    looked = look(loader, 1)
    assert maps(loader) == ()
    assert "could not be followed" in looked.notes[0]


def test_equal_datasets_have_equal_samples_and_others_not_and_random_states_stay():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (look(DataLoader(data, 4), 1) for data in (Numbers(), Numbers(), Numbers(shift=1)))
    digests = [looked.loader.epochs[0].sample_digests for looked in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16
    assert torch.equal(before, torch.get_rng_state())


def test_samples_that_cannot_be_loaded_cost_the_comparison_only():
    looked = look(DataLoader(Broken(), 4), 1)
    assert numbers(looked) == [(20, 0, 5, 4)]
    assert "the disk is gone" in looked.notes[0]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Numbers(), "returns a dataset"),
        ((DataLoader(Numbers()), DataLoader(Numbers())), "returns a tuple with several loaders"),
        ({"train": DataLoader(Numbers())}, "returns a dict with several loaders"),
        (None, "not a loader"),
        (DataLoader(Numbers(), sampler=(1 // 0 for _ in range(2))), "ZeroDivisionError"),
    ],
)
def test_what_is_no_loader_is_refused(made, message):
    with pytest.raises(UserError) as raised:
        look(made)
    assert message in raised.value.message


def test_leaves_of_one_value_say_nothing():
    assert digest_leaves({"a": torch.ones(3), "b": [torch.arange(3.0), "text"]})[0].startswith("1:")


def test_a_random_sampler_draws_each_sample_once():
    data = Numbers(100)
    assert numbers(look(DataLoader(data, 10, sampler=RandomSampler(data)), 1)) == [(100, 0, 10, 10)]


# What lies beside checkpoint files, by names and sizes.


LIKE = {"epoch1.pt": 1000, "epoch2.pt": 1010, "epoch10.pt": 990}


UNFINISHED = [
    ("epoch1.pt", {}, []), ("epoch1.pt", {"epoch11.pt.tmp": 5, "other.pt.tmp": 5}, ["epoch11.pt.tmp"]),
    ("epoch1.pt", {".epoch1.pt.tmp-1234": 5}, [".epoch1.pt.tmp-1234"]),
    ("epoch1.pt", {"tmp_epoch1.pt": 5, "epoch1.pt.part": 1, "epoch1.pt~": 1},
     ["epoch1.pt.part", "epoch1.pt~", "tmp_epoch1.pt"]),
    ("epoch1.pt", {"template.pt": 5, "epoch1.pt.sha256": 5, "parts.pt": 5, "epoch1.json": 3}, []),
    ("epoch3.pt", {"epoch3.pt": 400}, ["epoch3.pt"]), ("epoch3.pt", {"epoch3.pt": 700}, []),
    ("last.pt", {"last.pt": 4}, []), ("x.ckpt.tmp", {"x.ckpt.tmp": 4}, ["x.ckpt.tmp"]),
]  # fmt: skip


def test_unfinished_writes_are_reported_of_a_folder_every_temporary_file():
    for name, others, reported in UNFINISHED:
        found = find_leftovers(Path("runs") / name, {**LIKE, **others}, of_folder=False)
        assert [Path(one.path).name for one in found] == reported
    found = find_leftovers(Path("a.pt"), {"a.pt": 1, "b.safetensors.incomplete": 2}, of_folder=True)
    assert [one.detail for one in found] == ["2 bytes; there is no b.safetensors"]


@pytest.mark.parametrize(
    ("name", "others", "missing"),
    [
        ("step2_rank0.pt", ["step1_rank0.pt", "step1_rank1.pt"], ("step2_rank1.pt",)),
        ("step2_rank0.pt", ["step1_rank0.pt"], None),
        ("step2_rank0.pt", [], None),
        ("rank2.pt", ["rank0.pt"], ("rank1.pt",)),
        ("rank_00.pt", ["rank_01.pt", "rank_03.pt"], ("rank_02.pt",)),
        ("zero_pp_rank_1_mp_rank_00_optim.pt", ["zero_pp_rank_0_mp_rank_00_optim.pt"], None),
        ("zero_pp_rank_2_mp_rank_00_optim.pt", ["zero_pp_rank_0_mp_rank_00_optim.pt"],
         ("zero_pp_rank_1_mp_rank_00_optim.pt",)),
        ("model-00001-of-00003.safetensors", ["model-00003-of-00003.safetensors"],
         ("model-00002-of-00003.safetensors",)),
        ("model-00001-of-00001.bin", [], None),
        ("lowrank4.pt", ["lowrank8.pt"], None),
        # Dates and step numbers, of which nobody expects those in between.
        ("part20240131.pt", ["part20240201.pt"], None),
        ("part20240131_rank0.pt", ["part20240131_rank2.pt"], ("part20240131_rank1.pt",)),
    ],
)  # fmt: skip
def test_files_that_belong_together(name, others, missing):
    found = list(find_gaps(Path(name), [name, *others]))
    assert (found[0].missing if found else None) == missing


# The user's own functions: found, called, and reported of where they fail.


CODE = """
import sys
number = 3
class Maker:
    @staticmethod
    def make(): return "made"
def make():
    print("to stdout")
    return sys.argv
def fail():
    raise ValueError("no such folder\\nand more")
def configured(config): return config
def leave(): sys.exit(4)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "users_module.py").write_text(CODE)
    (tmp_path / "users_broken.py").write_text("x = 1\nimport no_such_package_of_anybody\n")
    (tmp_path / "users_wrong.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "users_leaving.py").write_text("raise SystemExit(2)\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("project")
def test_functions_and_methods_of_the_working_directory_are_found():
    assert load_callable("users_module:Maker.make", "--dataset")() == "made"


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("users_module", "which is not package.module:function", "imported from here"),
        ("users_module.py:make", "which is not package.module:function", "users_module:make"),
        ("./src/train.py", "which is no", "src.train:function"),
        ("no_such_module:make", "there is no module no_such_module", "Modules are searched"),
        ("users_module:mak", "users_module has no mak", "Did you mean make?"),
        ("users_module:Maker.mak", "users_module.Maker has no mak", "Did you mean make?"),
        ("users_module:number", "is an int, not a function", "package.module:function"),
        ("users_broken:make", "No module named 'no_such_package_of_anybody'", "users_broken.py:2"),
        ("users_wrong:make", "SyntaxError", "users_wrong.py:2"),
        ("users_leaving:make", "it ended the process (SystemExit: 2)", "users_leaving.py:1"),
    ],
)
def test_what_cannot_be_found_is_reported_with_what_to_do(name, message, hint):
    with pytest.raises(UserError) as raised:
        load_callable(name, "--dataset")
    assert message in raised.value.message
    assert raised.value.message.startswith("--dataset")
    assert hint in raised.value.help
    assert raised.value.status == 2


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("name", "message"), [("fail", "it failed: ValueError: no such folder"), ("leave", "SystemExit: 4")]
)
def test_an_error_is_reported_by_its_first_line_and_the_users_own(name, message):
    function = load_callable(f"users_module:{name}", "--dataset")
    with pytest.raises(UserError, match="it failed") as raised, users_turn("it failed"):
        function()
    assert raised.value.message.endswith(message) or message in raised.value.message
    assert f"in {name}" in raised.value.help


@pytest.mark.usefixtures("project")
def test_a_call_that_does_not_fit_the_function_has_no_line_of_ours():
    with pytest.raises(UserError, match="positional argument") as raised:
        read_expected("users_module:configured")
    assert not raised.value.help


@pytest.mark.usefixtures("project")
def test_stdout_and_the_command_line_are_not_the_functions(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddpdoctor", "check-data", "--epochs", "2"])
    with users_turn("it failed"):
        seen = load_callable("users_module:make", "--dataset")()
    assert seen == ["ddpdoctor"]
    assert sys.argv[1] == "check-data"
    assert capsys.readouterr() == ("", "to stdout\n")
