"""Real files of torch.save, damaged byte by byte: what is reported of them, and that nothing in them is run."""

import argparse
import io
import json
import os
import random
import re
import shutil
import struct
import zipfile
from dataclasses import replace

import pytest
import torch

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.saved import ReadState
from ddpdoctor.probes.checkpoint_file import Extent, read_file
from ddpdoctor.probes.checkpoint_formats import read_archive, walk_tensors
from ddpdoctor.probes.checkpoints import CheckpointOptions, read_checkpoints, read_distributed
from tests.golden import Cases

CASES = Cases(__name__)
test_kept = CASES.test()
EVERYTHING = Extent(digests=True)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def training():
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "model": made.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "scaler": {"scale": 1.0, "growth_factor": 2.0, "_growth_tracker": 0}, "epoch": 3, "rng": torch.get_rng_state(),
    }  # fmt: skip


def save(folder, content, name="x.pt", **options):
    path = folder / name
    torch.save(content, path, **options)
    return path


def change(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    return path


def start_of(path, name):
    """Return where the bytes of a tensor begin."""
    with path.open("rb") as file:
        archive = read_archive(file)
    return next(archive.starts[ref.storage.key] for found, ref in walk_tensors(archive.root) if found == name)


def told(path):
    """Return what was seen of a file. Sizes of archives and contents of generators are those of one torch."""
    seen = read_file(path, EVERYTHING)
    return replace(
        seen, path=path.name, size_bytes=0, digests={"all": str(len(seen.digests))} if seen.digests else None
    )


def odd_values():
    weight = torch.ones(50, 10)
    weight[3, 4] = float("nan")
    weight[5, :2] = float("inf")
    return {"weight": weight.t(), "half": torch.tensor([1.0, float("-inf")]).half(), "fine": torch.ones(3)}


@CASES
def checkpoints_as_they_were_written(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        unchecked = save(tmp_path, model().state_dict(), "no checksums.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    paths = [
        save(tmp_path, training(), "whole.pt"), unchecked, save(tmp_path, odd_values(), "odd values.pt"),
        save(tmp_path, training(), "old.pt", _use_new_zipfile_serialization=False),
        save(tmp_path, {"model": model().state_dict(), "args": argparse.Namespace(lr=1)}, "refused.pt"),
    ]  # fmt: skip
    whole = read_file(save(tmp_path, model(), "module.pt"), EVERYTHING)
    assert "torch.nn.modules.linear.Linear" in whole.refused
    assert sorted(one.name for one in whole.contents.weights[0].tensors) == sorted(model().state_dict())
    return [told(path) for path in paths]


@CASES
def checkpoints_that_are_damaged_or_none(tmp_path):
    flipped = save(tmp_path, training(), "a flipped byte.pt")
    change(flipped, start_of(flipped, "model.2.weight") + 9)
    assert torch.load(flipped)["epoch"] == 3, "torch says nothing of it"
    content = save(tmp_path, {"a": torch.ones(5000), "b": torch.ones(5000)}).read_bytes()
    header = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text, values = json.dumps(header).encode(), torch.tensor([1.0, float("nan"), 3.0, 4.0]).numpy().tobytes()
    safe = struct.pack("<Q", len(text)) + text + values
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme/text", "hello")
    contents = {
        "zeros at the end.pt": content[:30000] + bytes(len(content) - 30000), "whole.safetensors": safe,
        "cut.safetensors": safe[:-1], "a pointer.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "a page.pt": b"\n<!DOCTYPE html><html>not found</html>", "zeros.pt": bytes(3000), "text.pt": b"some text",
        "another archive.pt": other.getvalue(),
        **{f"without {missing} bytes.pt": content[:-missing] for missing in (1, 10, 21, 22, 40)},
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return [told(path) for path in (flipped, *(tmp_path / name for name in contents))]


def test_files_of_the_old_format_are_cut(tmp_path):
    path = save(tmp_path, training(), _use_new_zipfile_serialization=False)
    tensors = read_file(path, EVERYTHING).contents.tensors
    path.write_bytes(path.read_bytes()[:-2000])
    cut = read_file(path, EVERYTHING)
    assert cut.state is ReadState.CUT
    assert 0 < len(cut.lost) < len(tensors)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_read_and_no_fault_of_the_file(tmp_path):
    scaled = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    seen = read_file(save(tmp_path, {"w": scaled, "x": torch.ones(2)}), EVERYTHING)
    assert (seen.state, seen.refusal, sorted(seen.digests)) == (ReadState.WHOLE, "", ["w", "x"])
    assert {one.name: one.dtype for one in seen.contents.tensors} == {"w": "qint8", "x": "float32"}


@pytest.mark.parametrize("old", [False, True])
def test_dtypes_views_and_odd_tensors_are_those_of_torch(tmp_path, old):
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "view": base[1:, 2:].t(), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "half": base.half(),
        "bf16": base.bfloat16(), "bool": base > 3, "complex": torch.complex(base, base), "int": base.long(),
        "parameter": torch.nn.Parameter(base), "shared": base,
    }  # fmt: skip
    seen = read_file(save(tmp_path, content, _use_new_zipfile_serialization=not old), EVERYTHING)
    again = read_file(
        save(tmp_path, {name: one.detach().clone() for name, one in content.items()}, "y.pt"), EVERYTHING
    )  # fmt: skip
    assert {one.name: (one.shape, f"torch.{one.dtype}") for one in seen.contents.tensors} == {
        name: (tuple(one.shape), str(one.dtype)) for name, one in content.items()
    }
    assert seen.digests == again.digests
    assert len(seen.digests) == len(content)
    assert seen.values == ()


def test_any_changed_byte_of_the_data_is_found_and_none_raises(tmp_path):
    sound = save(tmp_path, {"a": torch.randn(300), "b": torch.randn(200)})
    content = sound.read_bytes()
    with sound.open("rb") as file:
        starts = read_archive(file).starts
    inside = {
        place for start, size in ((starts["0"], 1200), (starts["1"], 800)) for place in range(start, start + size)
    }
    draw = random.Random(1)
    places = {*draw.sample(range(len(content)), 120), *draw.sample(sorted(inside), 40)}
    for place in sorted(places):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path = tmp_path / "changed.pt"
        path.write_bytes(changed)
        seen = read_file(path, EVERYTHING)
        if place in inside:
            assert seen.damaged, place


def test_any_length_of_what_is_left_is_reported(tmp_path):
    content = save(tmp_path, training()).read_bytes()
    path = tmp_path / "cut.pt"
    lost = []
    for length in range(0, len(content), 1101):
        path.write_bytes(content[:length])
        seen = read_file(path, EVERYTHING)
        assert seen.state in {ReadState.EMPTY, ReadState.CUT, ReadState.FOREIGN}, length
        if seen.contents is not None:
            lost.append(len(seen.lost))
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 20
    assert lost[-1] < 4


def test_a_pickled_module_is_read_as_its_state_dict(tmp_path):
    made = torch.nn.ModuleDict({"layers": model(), "past": torch.nn.LSTM(4, 4)})
    made.register_buffer("passing", torch.ones(2), persistent=False)
    made.scratch = torch.ones(3)
    for content, where in ((made, ""), ({"net": made, "epoch": 3}, "net")):
        (weights,) = read_file(save(tmp_path, content), EVERYTHING).contents.weights
        assert (weights.where, {one.name for one in weights.tensors}) == (where, set(made.state_dict()))


def test_a_path_that_cannot_be_looked_up_is_the_users_to_put_right(tmp_path):
    with pytest.raises(UserError):
        read_checkpoints(CheckpointOptions(paths=(tmp_path / ("x" * 300),)), print)


class Marking:
    """Runs a command as it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("old", [False, True])
def test_nothing_in_a_file_is_run(tmp_path, old):
    mark = tmp_path / "was-run"
    content = {"model": model().state_dict(), "x": Marking(mark)}
    seen = read_file(save(tmp_path, content, _use_new_zipfile_serialization=not old), EVERYTHING)
    assert not mark.exists()
    assert seen.contents.globals == ("posix.system",)
    assert len(seen.contents.weights[0].tensors) == 9


@CASES
def distributed_checkpoints(tmp_path):
    """They are held to their index, and files of one name count in all folders. Sizes are those of one torch."""
    from torch.distributed import checkpoint as distributed_checkpoint  # it takes a second

    folder, other, found = tmp_path / "step1", tmp_path / "step2", {}
    for place, key in ((folder, "model"), (other, "model_state_dict")):
        distributed_checkpoint.save({key: model().state_dict()}, checkpoint_id=place, no_dist=True)

    def look(name, *, checksums=True):
        seen = read_distributed(folder, checksums=checksums)
        contents = seen.contents and [(one.where, len(one.tensors)) for one in seen.contents.weights]
        missing = [
            re.sub(r"has \d+ bytes", "has so many bytes", re.sub(r"(of|needs) \d+", r"\1 so many", one))
            for one in seen.missing
        ]
        found[name] = [seen.state, contents, seen.damaged, missing, seen.detail]
        return seen

    (part,) = folder.glob("*.distcp")
    content = part.read_bytes()
    sound = look("sound")
    assert sound.contents.weights[0].tensors == read_distributed(other, checksums=False).contents.weights[0].tensors
    change(part, content.find(model().state_dict()["2.weight"].numpy().tobytes()) + 5)
    look("a flipped byte")
    part.write_bytes(content[:-10])
    look("cut")
    part.unlink()
    look("a file is missing")
    part.write_bytes(content)
    shutil.copytree(other, folder / "step0")
    both = look("two of one name", checksums=False)
    assert both.size_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (folder / ".metadata").unlink()
    look("no index", checksums=False)
    return found
