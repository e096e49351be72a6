"""What lies beside checkpoint files, by names and sizes."""

from pathlib import Path

import pytest

from ddpdoctor.probes.checkpoint.nearby_files import find_gaps, find_leftovers

LIKE = {"epoch1.pt": 1000, "epoch2.pt": 1010, "epoch10.pt": 990}


@pytest.mark.parametrize(
    ("name", "others", "reported"),
    [
        ("epoch1.pt", {}, []),
        ("epoch1.pt", {"epoch11.pt.tmp": 5, "other.pt.tmp": 5}, ["epoch11.pt.tmp"]),
        ("epoch1.pt", {".epoch1.pt.tmp-1234": 5}, [".epoch1.pt.tmp-1234"]),
        ("epoch1.pt", {"tmp_epoch1.pt": 5, "epoch1.pt.part": 1, "epoch1.pt~": 1},
         ["epoch1.pt.part", "epoch1.pt~", "tmp_epoch1.pt"]),
        ("epoch1.pt", {"template.pt": 5, "epoch1.pt.sha256": 5, "parts.pt": 5, "epoch1.json": 3}, []),
        ("epoch3.pt", {"epoch3.pt": 400}, ["epoch3.pt"]),
        ("epoch3.pt", {"epoch3.pt": 700}, []),
        ("last.pt", {"last.pt": 4}, []),
        ("x.ckpt.tmp", {"x.ckpt.tmp": 4}, ["x.ckpt.tmp"]),
    ],
)  # fmt: skip
def test_unfinished_writes(name, others, reported):
    found = find_leftovers(Path("runs") / name, {**LIKE, **others}, of_folder=False)
    assert [Path(one.path).name for one in found] == reported


def test_of_a_folder_every_temporary_file_is_reported():
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
