"""Checkpoint files of ranks and runs, compared by name."""

import pickle
from pathlib import Path

import pytest
import torch

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.diff import compare_files
from tests.golden import Cases

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
TENSORS = {
    "how far they are apart": (COUNTED, changed(COUNTED, {(1, 2): 7.5, (2, 3): 10})),
    "what is not finite is counted apart": (torch.tensor([1.0, 2.0, 3.0, 4.0]), ODD),
    "nothing finite differs": (torch.tensor([1.0]), torch.tensor([float("nan")])),
    "equal ones that are not finite": (ODD, ODD.clone()),
    "far into a large one": (LARGE.t(), changed(LARGE, {(1050, 3): -0.0, (1099, 999): 2}).t()),
    "layouts": (IMAGE, IMAGE.to(memory_format=torch.channels_last)),
    "shapes and dtypes": (torch.zeros(3), torch.zeros(4), torch.zeros(3).half()),
}


@CASES
def contents_that_differ(tmp_path):
    odd = state()
    odd["model"]["0.bias"] += 1
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    contents = {name: [{"w": one} for one in tensors] for name, tensors in TENSORS.items()} | {
        "of every kind": of_every_kind(), "of three files two agree": (state(), odd, state()),
        "names that only some have": (state(), without(state(), ("model", "0.bias"), ("", "epoch"))),
        "a prefix that not all have is part of the name": (BOTH, {**BOTH, "module.a": torch.ones(1)}),
        "a number in another file": ({"w": ODD, "step": torch.tensor(3)}, {"w": ODD, "step": 3}),
        "what cannot be compared": [{"q": quantized, "w": torch.ones(1)}] * 2,
    }  # fmt: skip
    found = {}
    for name, those in contents.items():
        (tmp_path / name).mkdir()
        facts = compare_files(saved(tmp_path / name, *those))
        found[name] = facts.unequal, facts.incomparable
    return found


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64", "complex128"]
)
def test_one_element_is_found_whatever_the_dtype(tmp_path, dtype):
    ours = torch.zeros(5, 7).to(getattr(torch, dtype))
    theirs = torch.zeros(5, 7)
    theirs[4, 1] = 1
    (one,) = unequal(tmp_path, {"w": ours}, {"w": theirs.to(ours.dtype)})
    assert (one.apart[0].first, one.apart[0].differing, one.apart[0].largest) == ((4, 1), 1, 1)


def test_prefixes_of_wrappers_are_taken_off_and_reported(tmp_path):
    plain = state()
    wrapped = {**state(), "model": {f"module._orig_mod.{name}": one for name, one in plain["model"].items()}}
    part = {**state(), "model": {name.replace("0.", "0._orig_mod."): one for name, one in plain["model"].items()}}
    facts = compare_files(saved(tmp_path, plain, wrapped, part))
    assert facts.unequal == ()
    assert [one.stripped for one in facts.files] == [(), ("module._orig_mod.",), ("_orig_mod.",)]


def test_the_format_before_zip_archives_is_read_and_ranks_may_stand_in_the_name_of_the_folder(tmp_path):
    paths = [tmp_path / "a.pt", tmp_path / "rank_00" / "model.pt", tmp_path / "rank_11" / "model.pt"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        torch.save(state(), path, _use_new_zipfile_serialization=path != paths[0])
    facts = compare_files(paths)
    assert (facts.unequal, [one.rank for one in facts.files]) == ((), [None, 0, 11])


def write_safetensors(path, tensors):
    import json
    import struct

    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_safetensors_are_read_without_their_package(tmp_path):
    ours = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "c.pt"]
    write_safetensors(paths[0], ours)
    write_safetensors(paths[1], {**ours, "b": ours["b"] + 1})
    torch.save(ours, paths[2])
    (one,) = compare_files(paths).unequal
    assert (one.name, one.sides) == ("b", ((0, 2), (1,)))


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
    assert "Nothing of it was run" in caught.value.message
    assert "state_dict()" in caught.value.help


def damaged(path, how):
    if how == "missing":
        return path
    if how == "a folder":
        path.mkdir()
    elif how == "cut":
        torch.save(state(), path)
        path.write_bytes(path.read_bytes()[:-2000])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif how == "another pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif how == "nothing in it":
        torch.save({}, path)
    return path


@pytest.mark.parametrize("how", ["missing", "a folder", "cut", "empty", "text", "another pickle", "nothing in it"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_cannot_be_read_is_the_users_to_put_right(tmp_path, how, suffix):
    (good,) = saved(tmp_path, state())
    bad = damaged(tmp_path / f"bad{suffix}", how)
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


def test_a_key_around_the_model_is_taken_off(tmp_path):
    whole = state()
    facts = compare_files(saved(tmp_path, whole, whole["model"]))
    assert facts.unequal == ()
    assert [(one.below, one.beside > 0) for one in facts.files] == [("model.", True), ("", False)]
    different = {name: tensor + 1 for name, tensor in whole["model"].items()}
    assert {one.name for one in compare_files(saved(tmp_path, whole, different)).unequal} == set(different)
