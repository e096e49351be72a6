"""Which jobs get DETAIL by default: those of which torch makes all groups over Gloo."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ddpdoctor.recorder.calls.debug_level import backends_of

from .test_start import BOOTSTRAP

CPU, CUDA = SimpleNamespace(type="cpu"), SimpleNamespace(type="cuda")


class Config:
    """torch's choice where nobody names a backend: that of the accelerator of this machine."""

    accelerator = "cuda"

    def __init__(self, backend):
        assert backend == "undefined"

    def get_device_backend_map(self):
        return {self.accelerator: C10D.Backend.default_device_backend_map[self.accelerator]}


class Backend(str):
    __slots__ = ()
    default_device_backend_map = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}  # noqa: RUF012 - as torch has it


C10D = SimpleNamespace(Backend=Backend, BackendConfig=Config)


@pytest.mark.parametrize(
    ("backend", "device", "used"),
    [
        ("gloo", None, {"gloo"}),
        ("GLOO", CUDA, {"gloo"}),
        ("nccl", None, {"nccl"}),
        ("nccl2", None, {"nccl2"}),
        ("cpu:gloo,cuda:nccl", None, {"gloo", "nccl"}),
        ("cpu:gloo, cuda:gloo", None, {"gloo"}),
        (None, CUDA, {"nccl"}),
        (None, CPU, {"gloo"}),
        (None, SimpleNamespace(type="unknown"), {"nccl"}),
        (None, None, {"nccl"}),
        ("undefined", CPU, {"nccl"}),
    ],
)
def test_the_backends_are_those_that_torch_will_use(backend, device, used):
    assert backends_of(C10D, backend, device) == used


SCRIPT = """
import sys
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed import distributed_c10d as c10d

def level_in(backend, new=None):
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if new:
        dist.new_group(backend=new)
    wrapped = any(isinstance(g._get_backend(d), c10d._ProcessGroupWrapper)
                  for g in c10d._world.pg_map for d in g._device_types)
    dist.destroy_process_group()
    return dist.get_debug_level().name + ("+" if wrapped else "")

print(level_in("gloo"), level_in("cpu:gloo"), level_in("cpu:gloo,cuda:fake", "gloo"), level_in(None))
dist.set_debug_level(dist.DebugLevel.INFO)
print(level_in("gloo"), level_in("fake"))
assert not sys._ddpdoctor_recorder.failures
"""


def test_the_level_is_set_before_torch_makes_the_group_and_a_subgroup_follows_the_world(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name in ("rings", "evidence"):
        (tmp_path / name).mkdir()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(BOOTSTRAP), "DDPDOCTOR_RUN": str(tmp_path), "RANK": "0"}
    env |= {"DDPDOCTOR_DETAIL": "gloo"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["DETAIL+", "DETAIL+", "OFF", "DETAIL+", "INFO", "INFO"], done.stderr
