"""The one process that computes the reference: what it keeps does not stay on the GPU, and it has a time limit."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.trial import TrialSettings
from ddpdoctor.probes.consistency.alone import take_gradients
from ddpdoctor.probes.consistency.reference_process import ReferenceProcess


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


def test_a_reference_that_takes_too_long_is_reported_as_such():
    process = ReferenceProcess(TrialSettings(model="m:f", limit_s=0.001), 1, torch.device("cpu"), 0)
    try:
        with pytest.raises(UserError) as error:
            process.ask(1, ())
    finally:
        process.close()

    assert error.value.message == "the process that computes the reference did not answer within 0.006 s"
