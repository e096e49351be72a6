"""Checkpoint files of ranks and runs, compared by name."""

import pickle
from pathlib import Path

import pytest
import torch

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.saved import Kind
from ddpdoctor.probes.diff import compare_files


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
    assert facts.unequal == ()
    assert facts.incomparable == ()
    assert facts.tensors == 7 + 4 * 3 + 1
    assert [one.rank for one in facts.files] == [0, 1, 2]
    assert facts.files[0].size_bytes == (tmp_path / "ckpt_rank0.pt").stat().st_size


def test_every_kind_is_reported_with_its_name(tmp_path):
    other = state()
    other["model"]["0.weight"][1, 2] += 0.5
    other["model"]["1.running_mean"][0] = 9
    other["optimizer"]["state"][2]["exp_avg"][1] = 1
    other["optimizer"]["param_groups"][0]["lr"] = 0.2
    other["epoch"] = 4
    other["rng_state"][5] += 1
    other["scheduler"]["last_epoch"] = 4
    found = {one.name: one.kind for one in unequal(tmp_path, state(), other)}
    assert found == {
        "model.0.weight": Kind.PARAMETER,
        "model.1.running_mean": Kind.BUFFER,
        "optimizer.state.2.exp_avg": Kind.STATE,
        "rng_state": Kind.RANDOM,
        "optimizer.param_groups.0.lr": Kind.SETTING,
        "epoch": Kind.VALUE,
        "scheduler.last_epoch": Kind.SETTING,
    }


def test_how_far_tensors_are_apart(tmp_path):
    ours = torch.arange(1.0, 13).view(3, 4)
    theirs = ours.clone()
    theirs[1, 2] += 0.5
    theirs[2, 3] = 10
    (one,) = unequal(tmp_path, {"w": ours}, {"w": theirs})
    (apart,) = one.apart
    assert one.seen == ("float32[3, 4]", "float32[3, 4]")
    assert (apart.file, apart.against, apart.differing, apart.of, apart.first) == (1, 0, 2, 12, (1, 2))
    assert apart.largest == 2
    assert apart.relative == pytest.approx(2 / 12)
    assert apart.not_finite == 0


def test_what_is_not_finite_is_counted_apart(tmp_path):
    theirs = torch.tensor([1.0, float("nan"), float("inf"), 5.0])
    (one,) = unequal(tmp_path, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {"w": theirs})
    assert (one.apart[0].differing, one.apart[0].not_finite, one.apart[0].largest) == (3, 2, 1)
    (one,) = unequal(tmp_path, {"w": torch.tensor([1.0])}, {"w": torch.tensor([float("nan")])})
    assert (one.apart[0].largest, one.apart[0].relative) == (None, None)
    assert unequal(tmp_path, {"w": theirs}, {"w": theirs.clone()}) == ()


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64", "complex128"]
)
def test_one_element_is_found_whatever_the_dtype(tmp_path, dtype):
    ours = torch.zeros(5, 7).to(getattr(torch, dtype))
    theirs = torch.zeros(5, 7)
    theirs[4, 1] = 1
    (one,) = unequal(tmp_path, {"w": ours}, {"w": theirs.to(ours.dtype)})
    assert (one.apart[0].first, one.apart[0].differing, one.apart[0].largest) == ((4, 1), 1, 1)


def test_a_difference_far_into_a_large_tensor_is_placed(tmp_path):
    ours = torch.zeros(1100, 1000)
    theirs = ours.clone()
    theirs[1050, 3] = -0.0
    theirs[1099, 999] = 2
    (one,) = unequal(tmp_path, {"w": ours.t()}, {"w": theirs.t()})
    assert (one.apart[0].first, one.apart[0].differing, one.apart[0].relative) == ((3, 1050), 2, 1)


def test_layouts_do_not_differ(tmp_path):
    image = torch.randn(2, 3, 4, 5)
    assert unequal(tmp_path, {"w": image}, {"w": image.to(memory_format=torch.channels_last)}) == ()


def test_shapes_and_dtypes_differ_without_numbers(tmp_path):
    (one,) = unequal(tmp_path, {"w": torch.zeros(3)}, {"w": torch.zeros(4)}, {"w": torch.zeros(3).half()})
    assert one.seen == ("float32[3]", "float32[4]", "float16[3]")
    assert one.apart == ()


def test_of_three_files_two_may_agree(tmp_path):
    odd = state()
    odd["model"]["0.bias"] += 1
    (one,) = unequal(tmp_path, state(), odd, state())
    assert one.sides == ((0, 2), (1,))
    assert [(each.file, each.against) for each in one.apart] == [(1, 0)]


def test_names_that_only_some_files_have(tmp_path):
    less = state()
    del less["model"]["0.bias"]
    del less["epoch"]
    found = {one.name: (one.sides, one.absent_in) for one in unequal(tmp_path, state(), less)}
    assert found == {"model.0.bias": (((0,),), (1,)), "epoch": (((0,),), (1,))}


def test_prefixes_of_wrappers_are_taken_off_and_reported(tmp_path):
    plain = state()
    wrapped = {**state(), "model": {f"module._orig_mod.{name}": one for name, one in plain["model"].items()}}
    part = {**state(), "model": {name.replace("0.", "0._orig_mod."): one for name, one in plain["model"].items()}}
    facts = compare_files(saved(tmp_path, plain, wrapped, part))
    assert facts.unequal == ()
    assert [one.stripped for one in facts.files] == [(), ("module._orig_mod.",), ("_orig_mod.",)]


def test_a_prefix_that_not_all_have_is_part_of_the_name(tmp_path):
    content = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    facts = compare_files(saved(tmp_path, content, {**content, "module.a": torch.ones(1)}))
    assert [one.name for one in facts.unequal] == ["module.a"]


def test_a_tensor_where_another_file_has_a_number(tmp_path):
    (one,) = unequal(tmp_path, {"w": torch.zeros(1), "step": torch.tensor(3)}, {"w": torch.zeros(1), "step": 3})
    assert (one.name, one.sides, one.absent_in) == ("step", ((0,),), (1,))


def test_the_format_before_zip_archives_is_read(tmp_path):
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    torch.save(state(), paths[0], _use_new_zipfile_serialization=False)
    torch.save(state(), paths[1])
    facts = compare_files(paths)
    assert facts.unequal == ()
    assert [one.rank for one in facts.files] == [None, None]


def test_ranks_may_stand_in_the_name_of_the_folder(tmp_path):
    paths = []
    for rank in (0, 11):
        (tmp_path / f"rank_{rank:02}").mkdir()
        paths.append(tmp_path / f"rank_{rank:02}" / "model.pt")
        torch.save(state(), paths[-1])
    assert [one.rank for one in compare_files(paths).files] == [0, 11]


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


def test_files_without_a_common_name_are_no_pair(tmp_path):
    with pytest.raises(UserError, match="no tensor of the same name"):
        compare_files(saved(tmp_path, {"encoder": torch.ones(2)}, {"decoder": torch.ones(2)}))


def test_a_key_around_the_model_is_taken_off(tmp_path):
    whole = state()
    facts = compare_files(saved(tmp_path, whole, whole["model"]))
    assert facts.unequal == ()
    assert [(one.below, one.beside > 0) for one in facts.files] == [("model.", True), ("", False)]
    different = {name: tensor + 1 for name, tensor in whole["model"].items()}
    assert {one.name for one in compare_files(saved(tmp_path, whole, different)).unequal} == set(different)


def test_one_file_is_not_enough(tmp_path):
    with pytest.raises(UserError, match="two files"):
        compare_files(saved(tmp_path, state()))


def test_tensors_that_cannot_be_compared_are_named(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    facts = compare_files(saved(tmp_path, {"q": quantized, "w": torch.ones(1)}, {"q": quantized, "w": torch.ones(1)}))
    assert (facts.unequal, facts.incomparable) == ((), ("q",))
