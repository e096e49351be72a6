"""Checkpoint files of ranks and runs, compared by name."""

import json
import os
import pickle
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.diff import compare_files
from tests.golden import Cases, table

CASES = Cases(__name__)
test_kept = CASES.test()


def state(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
        "rng_state": torch.get_rng_state(), "scheduler": {"last_epoch": 3},
    }  # fmt: skip


def saved(folder, *contents, names="ckpt_rank{}.pt"):
    paths = [folder / names.format(i) for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        torch.save(content, path)
    return paths


def unequal(folder, *contents):
    return compare_files(saved(folder, *contents)).unequal


def test_files_of_one_state_are_equal_and_everything_was_compared(tmp_path):
    facts = compare_files(saved(tmp_path, state(), state(), state()))
    assert (facts.unequal, facts.incomparable, facts.tensors) == ((), (), 7 + 4 * 3 + 1)
    assert [one.rank for one in facts.files] == [0, 1, 2]
    assert facts.files[0].size_bytes == (tmp_path / "ckpt_rank0.pt").stat().st_size


def of_every_kind():
    other = state()
    other["model"]["0.weight"][1, 2] += 0.5
    other["model"]["1.running_mean"][0] = 9
    other["optimizer"]["state"][2]["exp_avg"][1] = 1
    other["optimizer"]["param_groups"][0]["lr"] = 0.2
    other["epoch"] = 4
    other["rng_state"][5] += 1
    other["scheduler"]["last_epoch"] = 4
    return state(), other


def changed(tensor, changes):
    tensor = tensor.clone()
    for place, value in changes.items():
        tensor[place] = value
    return tensor


def without(content, *places):
    for part, name in places:
        del (content[part] if part else content)[name]
    return content


COUNTED, LARGE, IMAGE = torch.arange(1.0, 13).view(3, 4), torch.zeros(1100, 1000), torch.ones(2, 3, 4, 5)
ODD = torch.tensor([1.0, float("nan"), float("inf"), 5.0])
BOTH = {"module.a": torch.zeros(1), "b": torch.zeros(1)}


def with_bias(more):
    made = state()
    made["model"]["0.bias"] += more
    return made


def compared(*contents):
    """Return what differs between saved contents, and what cannot be compared."""
    with TemporaryDirectory() as folder:
        facts = compare_files(saved(Path(folder), *contents))
    return [facts.unequal, facts.incomparable]


def weights(*tensors):
    return compared(*({"w": one} for one in tensors))


test_rows = table("diff", globals())


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64", "complex128"]
)
def test_one_element_is_found_whatever_the_dtype(tmp_path, dtype):
    ours = torch.zeros(5, 7).to(getattr(torch, dtype))
    theirs = torch.zeros(5, 7)
    theirs[4, 1] = 1
    (one,) = unequal(tmp_path, {"w": ours}, {"w": theirs.to(ours.dtype)})
    assert (one.apart[0].first, one.apart[0].differing, one.apart[0].largest) == ((4, 1), 1, 1)


def safetensors(tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@CASES
def files_of_other_forms_and_names(tmp_path):
    """Prefixes of wrappers and a key around the model are taken off; ranks may stand in the name of the folder."""
    plain = state()
    model = plain["model"]
    wrapped = {**plain, "model": {f"module._orig_mod.{name}": one for name, one in model.items()}}
    part = {**plain, "model": {name.replace("0.", "0._orig_mod."): one for name, one in model.items()}}
    changed = {**model, "0.bias": model["0.bias"] + 1}
    floats = {name: one for name, one in model.items() if one.dtype is torch.float32}
    sets = {
        "prefixes": {"a.pt": plain, "b.pt": wrapped, "c.pt": part}, "a key around it": {"a.pt": plain, "b.pt": model},
        "a key around it, and a difference": {"a.pt": plain, "b.pt": changed},
        "the format before zip archives": {"old.pt": plain, "rank_00/model.pt": plain, "rank_11/model.pt": plain},
        "safetensors, without their package": {
            "a.safetensors": floats, "b.safetensors": {**floats, "0.bias": changed["0.bias"]}, "c.pt": floats
        },
    }  # fmt: skip
    found = {}
    for at, (title, contents) in enumerate(sets.items()):
        paths = [tmp_path / str(at) / name for name in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                path.write_bytes(safetensors(content))
            else:
                torch.save(content, path, _use_new_zipfile_serialization=path.stem != "old")
        facts = compare_files(paths)
        files = [
            f"{Path(one.path).name}: rank {one.rank}, without {one.stripped}, below {one.below!r}"
            for one in facts.files
        ]
        found[title] = [*files, facts.unequal]
    return found


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_of_a_file_is_run_and_the_refusal_is_explained(tmp_path):
    trace = tmp_path / "trace"
    good, bad = saved(tmp_path, state(), {"model": state()["model"], "trap": Trap(trace)})
    with pytest.raises(UserError) as caught:
        compare_files([good, bad])
    assert not trace.exists()
    assert "weights_only" in caught.value.message
    assert str(bad) in caught.value.message
    assert "None of it was run" in caught.value.message
    assert "state_dict()" in caught.value.help


def cut(path):
    torch.save(state(), path)
    os.truncate(path, path.stat().st_size - 2000)


UNREADABLE = {
    "missing": lambda _: None, "a folder": Path.mkdir, "cut": cut, "empty": Path.touch,
    "text": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "another pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "nothing in it": lambda path: torch.save({}, path),
}  # fmt: skip


@pytest.mark.parametrize("how", UNREADABLE)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_cannot_be_read_is_the_users_to_put_right(tmp_path, how, suffix):
    (good,) = saved(tmp_path, state())
    bad = tmp_path / f"bad{suffix}"
    UNREADABLE[how](bad)
    with pytest.raises(UserError) as caught:
        compare_files([good, bad])
    assert caught.value.status == 2
    assert str(bad) in caught.value.message
    assert how != "cut" or f"check-checkpoint {bad}" in caught.value.help


def test_one_file_is_not_enough_and_two_without_a_common_name_are_no_pair(tmp_path):
    for contents, said in (
        (({"encoder": ODD}, {"decoder": ODD}), "no tensor of the same name"),
        ((state(),), "two files"),
    ):
        with pytest.raises(UserError, match=said):
            compare_files(saved(tmp_path, *contents))
