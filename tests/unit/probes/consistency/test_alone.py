"""What the one process keeps of each computation does not stay on the GPU."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from ddpdoctor.probes.consistency.alone import take_gradients


def test_gradients_are_kept_on_the_host():
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(1000, 1000, device="cuda", dtype=torch.bfloat16))
        weight.grad = torch.empty(1000, 1000, device="cuda", dtype=torch.bfloat16)
        module = torch.nn.ParameterDict({"weight": weight})
        kept = take_gradients(module)

    assert {(one.device.type, one.dtype) for one in kept.values()} == {("cpu", torch.float64)}


def test_what_is_kept_is_a_copy():
    module = torch.nn.Linear(2, 2, dtype=torch.float64)
    module.weight.grad = torch.ones_like(module.weight)
    kept = take_gradients(module)
    module.weight.grad.zero_()

    assert list(kept) == ["weight"]
    assert bool((kept["weight"] == 1).all())
