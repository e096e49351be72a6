"""What a probe does beside torch: the trial of a GPU, loaders, files nearby and the user's code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes import gpu_trial
from ddpdoctor.probes.checkpoints import find_gaps, find_leftovers, read_expected
from ddpdoctor.probes.data import digest_leaves, draw_from
from ddpdoctor.probes.loading import HANDLING, OTHERS, hold_watchdog, load_callable, users_turn
from tests.golden import table, words

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


def test_it_is_set_before_torch_is_there():
    code = (
        "import os, sys, json; from ddpdoctor.probes.loading import load_torch\n"
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


NUMBERS = Numbers()


def followed(loader):
    """Return what a pass drew, without loading the samples where their indices are known, and maps of these indices."""
    looked, maps = draw_from(loader, "data:make", 0, 1, set_epoch=True)
    (epoch,) = looked.loader.epochs
    return [
        looked.passes, looked.samples, [one.hex() for one in maps], epoch.total, looked.loader.iterable,
        len(epoch.batch_digests), [one.replace(f"{Path(__file__).parent}/", "") for one in looked.notes],
    ]  # fmt: skip


def test_set_epoch_is_called_or_not_as_asked():
    data = Numbers()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))
    called, left = look(loader), look(loader, set_epoch=False)
    assert called.set_epoch
    assert len({epoch.order for epoch in called.loader.epochs}) == 2
    assert len({epoch.order for epoch in left.loader.epochs}) == 1
    assert called.loader.sampler.standard
    assert (called.loader.sampler.replicas, called.loader.sampler.rank) == (2, 0)


def test_equal_datasets_have_equal_samples_and_others_not_and_random_states_stay():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (look(DataLoader(data, 4), 1) for data in (Numbers(), Numbers(), Numbers(shift=1)))
    digests = [looked.loader.epochs[0].sample_digests for looked in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16
    assert torch.equal(before, torch.get_rng_state())
    assert digest_leaves({"a": torch.ones(3), "b": [torch.arange(3.0), "text"]})[0].startswith("1:")


# What lies beside checkpoint files, by names and sizes.


LIKE = {"epoch1.pt": 1000, "epoch2.pt": 1010, "epoch10.pt": 990}


def leftovers(row):
    """A row has a file and what lies beside it, with sizes; the file is one of three, or its folder was given."""
    name, others, *of_folder = row
    found = find_leftovers(Path("runs", name), others if of_folder else LIKE | others, of_folder=bool(of_folder))
    return [f"{one.path}: {one.kind}, {one.detail}" for one in found]


def watchdog(row):
    env = dict(row)
    hold_watchdog(env)
    return env


test_words = words(
    __name__,
    find_leftovers=leftovers, find_gaps=lambda text: list(find_gaps(Path(text.split()[0]), text.split())),
    hold_watchdog=watchdog,
)  # fmt: skip


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


NOT_FOUND = {
    "users_module": ("which is not package.module:function", "imported from here"),
    "users_module.py:make": ("which is not package.module:function", "users_module:make"),
    "./src/train.py": ("which is no", "src.train:function"),
    "no_such_module:make": ("no module named no_such_module", "Modules are searched"),
    "users_module:mak": ("users_module has no mak", "Did you mean make?"),
    "users_module:Maker.mak": ("users_module.Maker has no mak", "Did you mean make?"),
    "users_module:number": ("is an int, not a function", "package.module:function"),
    "users_broken:make": ("No module named 'no_such_package_of_anybody'", "users_broken.py:2"),
    "users_wrong:make": ("SyntaxError", "users_wrong.py:2"),
    "users_leaving:make": ("it ended the process (SystemExit: 2)", "users_leaving.py:1"),
}


@pytest.mark.usefixtures("project")
def test_functions_are_found_in_the_working_directory_and_what_cannot_be_is_reported_with_what_to_do():
    assert load_callable("users_module:Maker.make", "--dataset")() == "made"
    for name, (message, hint) in NOT_FOUND.items():
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


def refused(function, *given):
    with pytest.raises(UserError) as error:
        function(*given)
    return error.value.message


test_rows = table("loaders", globals())
