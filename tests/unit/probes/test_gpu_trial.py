"""The work that GPUs are given, done by the processor: exact when it is right, and reported when it is wrong."""

import pytest
import torch

from ddpdoctor.probes import gpu_trial

CPU = torch.device("cpu")


def test_work_that_is_right():
    assert gpu_trial.try_work(CPU, size=96, memory_bytes=1) is None


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


def test_patterns_differ_by_place_and_seed():
    one, other = (gpu_trial._pattern(1000, seed, CPU) for seed in (0, 1))
    assert len(one.unique()) == 1000
    assert not torch.equal(one, other)


def test_a_copy_is_compared():
    error, speed = gpu_trial.try_copy(CPU, CPU, seed=3, copy_bytes=4096)
    assert (error, speed) == (None, None)


def test_a_copy_that_loses_bytes():
    def half_a_copy(sent, landed):
        landed[:1000] = sent[:1000]

    error, _ = gpu_trial.try_copy(CPU, CPU, seed=3, copy_bytes=4096, copy=half_a_copy)
    assert error == "24 of 1024 words arrived wrong"


def test_every_ordered_pair_is_tried():
    found = list(gpu_trial.try_copies([CPU, CPU, CPU], copy_bytes=4096))
    assert [(one["source"], one["target"]) for one in found] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(one["ok"] for one in found)


def test_what_a_device_says_is_one_line():
    assert "\n" not in gpu_trial.try_work(torch.device("meta"), size=9, memory_bytes=1)


def test_wrong_use():
    with pytest.raises(SystemExit):
        gpu_trial.main(["work"])
