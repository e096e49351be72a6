"""In a group of Gloo and NCCL each backend counts its own calls."""

import json
import subprocess
import sys
from pathlib import Path

from ddpdoctor.recorder.storage.ring_reading import read_ring_file

PROGRAM = """
import json, sys, types
from types import SimpleNamespace as NS
torch = types.ModuleType("torch")
torch.device = lambda name: name
sys.modules["torch"] = torch
from ddpdoctor.recorder.calls import collectives, groups
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.state import here

class Counter:
    number = 0
    def _get_sequence_number_for_group(self):
        return self.number

class Group(Counter):
    group_name, group_desc, bound_device_id = "0", "default_pg", None
    gloo = Counter()
    def _get_backend(self, device):
        return self.gloo if device == "cpu" else self

group = Group()
config = sys.argv[2]
world = NS(default_pg=group, pg_backend_config={group: config}, pg_group_ranks={group: {0: 0, 1: 1}}, pg_map={})
groups.c10d = NS(_world=world)

here.ring = ring = Ring(sys.argv[1], ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, 1, 1)

def tensor(device):
    return NS(dtype="torch.float32", shape=(4,), device=NS(type=device))


def all_reduce(tensor, op=None, group=None, async_op=False):
    (world.default_pg if tensor.device.type == "cuda" or config == "nccl" else Group.gloo).number += 1

def barrier(group=None, async_op=False, device_ids=None):
    (world.default_pg if config == "nccl" else Group.gloo).number += 1

all_reduce = collectives.wrap("all_reduce", all_reduce, "tensor", p2p=False)
barrier = collectives.wrap("barrier", barrier, None, p2p=False)
all_reduce(tensor("cuda"))
all_reduce(tensor("cpu"))
all_reduce(tensor("cpu"))
barrier()
all_reduce(tensor("cuda"))
print(json.dumps([ring.path, [[one["name"], one["enqueued"], one["ranks"]] for one in groups.groups_now()]]))
"""


def recorded(folder: Path, config: str) -> tuple[list[tuple[str, int]], list[tuple[str, int, list[int]]]]:
    """Return group and number of each call, and the groups that the evidence tells of."""
    command = [sys.executable, "-c", PROGRAM, str(folder), config]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"DDPDOCTOR_RUN": str(folder)})
    path, reported = json.loads(done.stdout)
    slots = read_ring_file(path).slots
    return [(slot.group, slot.seq) for slot in map(slots.__getitem__, range(len(slots)))], reported


def test_gloos_calls_in_a_group_with_nccl_have_numbers_of_their_own(tmp_path: Path) -> None:
    calls, reported = recorded(tmp_path, "cpu:gloo,cuda:nccl")
    assert calls == [("0", 1), ("0:gloo", 1), ("0:gloo", 2), ("0:gloo", 3), ("0", 2)]
    assert reported == [["0", 2, [0, 1]], ["0:gloo", 3, [0, 1]]]


def test_a_group_of_one_backend_has_one_counter(tmp_path: Path) -> None:
    calls, reported = recorded(tmp_path, "nccl")
    assert calls == [("0", 1), ("0", 2), ("0", 3), ("0", 4), ("0", 5)]
    assert reported == [["0", 5, [0, 1]]]
