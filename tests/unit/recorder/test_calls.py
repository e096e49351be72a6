"""Which functions of torch.distributed are recorded: all that talk to other ranks, each call once."""

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch.distributed.distributed_c10d as c10d

import ddpdoctor.recorder
from ddpdoctor.recorder.calls import collectives
from ddpdoctor.recorder.storage.ring_reading import read_ring_file

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
MADE_OF_OTHERS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "new_subgroups", "new_subgroups_by_enumeration",
}  # fmt: skip
"""They make calls that are recorded."""
PHASES = {"init_process_group", "new_group", "destroy_process_group"}
"""Recorded by ``training``."""
UNRECORDED = {"split_group", "shrink_group"}
"""With NCCL only; where a rank waits in one, its stack tells."""
ALONE = {
    "get_backend", "get_backend_config", "get_backend_impl", "get_default_backend_for_device", "get_global_rank",
    "get_group_rank", "get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size",
    "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available",
    "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "record_comm", "set_timeout",
    "supports_complex",
}  # fmt: skip
"""They talk to nobody."""
JOB = """
import json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
one, two, made = torch.ones(2), torch.ones(4), []
for name, given in {
    "all_gather_into_tensor": (two, one), "all_gather_single": (two, one), "_all_gather_base": (two, one),
    "reduce_scatter_tensor": (one, two), "reduce_scatter_single": (one, two), "_reduce_scatter_base": (one, two),
    "gather_into_tensor": (one, two), "gather_single": (one, two), "all_to_all_single": (two, two),
    "all_gather": ([one, one], one), "all_reduce": (one,), "barrier": (),
}.items():
    if not hasattr(dist, name):
        continue
    made.append(name)
    try:
        getattr(dist, name)(*given)
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
print(json.dumps(made))
"""


def test_every_function_that_talks_to_other_ranks_is_known():
    known = {
        *collectives.COLLECTIVES,
        *collectives.RENAMED,
        *collectives.POINT_TO_POINT,
        *MADE_OF_OTHERS,
        *PHASES,
        *UNRECORDED,
        *ALONE,
    }
    public = {
        name
        for name, value in vars(c10d).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == c10d.__name__
    }
    assert not public - known, "new in this torch: record it (recorder/calls/collectives.py), or say here why not"


def test_what_a_call_is_given_is_found_where_it_is_expected():
    expected = {name: collectives.COLLECTIVES[op] for name, op in collectives.RENAMED.items()}
    for name, tensor in {**collectives.COLLECTIVES, **collectives.POINT_TO_POINT, **expected}.items():
        arguments = inspect.signature(getattr(c10d, name)).parameters if hasattr(c10d, name) else {}
        assert not arguments or tensor is None or tensor in arguments, name


def test_a_call_is_recorded_once_whatever_it_is_called(tmp_path):
    for name in ("rings", "evidence"):
        (tmp_path / name).mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPDOCTOR_")}
    environment |= {"PYTHONPATH": str(BOOTSTRAP), "RANK": "0", "DDPDOCTOR_RUN": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", JOB]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    made = json.loads(done.stdout)
    (path,) = (tmp_path / "rings").glob("*")
    ring = read_ring_file(path)
    old = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
    expected = Counter((old | collectives.RENAMED).get(name, name) for name in made)
    assert Counter(slot.op for slot in ring.slots if slot.op in expected) == expected
    assert not [note for note in ring.notes if note["k"] == "defect"]
