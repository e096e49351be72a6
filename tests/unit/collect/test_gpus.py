"""Counting GPUs as CUDA_VISIBLE_DEVICES leaves them."""

from __future__ import annotations

import pytest

from ddpdoctor.collect.gpus import count_visible

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
    ],
)
def test_visible_devices(visible, count):
    assert count_visible(visible, UUIDS) == count


def test_nothing_is_visible_where_there_is_nothing():
    assert count_visible("0,MIG-x", ()) == 0
