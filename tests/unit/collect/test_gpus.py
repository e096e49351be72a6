"""Counting GPUs as CUDA_VISIBLE_DEVICES leaves them."""

import pytest

from ddpdoctor.collect.gpu.nvml import GpuCount, count_gpus
from ddpdoctor.model.visible_devices import read_visible

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1,2", 3),
        ("2, 0", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("1,1", 0),
        ("GPU-bb33,0", 2),
        ("GPU-bb", 1),
        ("GPU-aa", 0),
        ("MIG-x,MIG-y", 2),
        ("NoDevFiles", 0),
        ("²", 0),
        (None, 3),
    ],
)
def test_visible_devices(visible, count):
    assert len(read_visible(visible, UUIDS).devices) == count


def test_nothing_is_visible_where_there_is_nothing():
    assert read_visible("0,MIG-x", ()).devices == ()


def test_what_is_wrong_with_a_value_is_kept():
    read = read_visible("2,9,0", UUIDS)
    assert (read.devices, read.bad_entry, read.hidden, read.on_purpose) == (("GPU-bb33",), "9", ("0",), False)
    assert read_visible("0,GPU-aa11", UUIDS).repeated == ("GPU-aa11",)
    assert all(read_visible(value, UUIDS).on_purpose for value in ("", "-1", "NoDevFiles"))


def test_counting_never_fails():
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == GpuCount()
