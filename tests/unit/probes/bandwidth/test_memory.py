import pytest
import torch

from ddpdoctor.collect.machine.cgroups import read_memory_limit
from ddpdoctor.collect.machine.memory import read_machine
from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth.group import RankGroup
from ddpdoctor.probes.bandwidth.memory import FreeMemory, count_takers, left_of, needed_bytes, read_free_bytes
from ddpdoctor.probes.bandwidth.pattern import working_bytes
from ddpdoctor.probes.bandwidth.tracker import Tracker
from tests.rules.bandwidth.sweeps import members

CPU = torch.device("cpu")
KIB, MIB, GIB = 2**10, 2**20, 2**30


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MEMINFO = {"meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"}


@pytest.mark.parametrize(
    ("groups", "cgroups", "free"),
    [
        ("", {}, 8 * GIB),
        # Version 2, the group's own limit; what is cached and not in use makes way.
        (
            "0::/job\n",
            {
                "job/memory.max": str(4 * GIB),
                "job/memory.current": str(3 * GIB),
                "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        # A limit of a group above holds too.
        ("0::/slice/job\n", {"slice/memory.max": str(GIB), "slice/job/memory.max": "max\n"}, GIB),
        # In a container with its own view the path is "/".
        ("0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        # A limit above what the machine has left.
        ("0::/\n", {"memory.max": str(64 * GIB)}, 8 * GIB),
        # Version 1, beside other controllers; "no limit" is a large number.
        (
            "4:memory:/job\n3:cpuset:/other\n",
            {"memory/job/memory.limit_in_bytes": str(2 * GIB), "memory/job/memory.usage_in_bytes": str(GIB)},
            GIB,
        ),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, 8 * GIB),
        # A path out of the view of a container is not followed.
        ("0::/../../job\n", {"job/memory.max": "1"}, 8 * GIB),
    ],
)
def test_free_memory_is_what_the_machine_and_the_control_groups_leave(tmp_path, groups, cgroups, free):
    proc = write(tmp_path / "proc", {**MEMINFO, "self/cgroup": groups})

    group = read_memory_limit(proc, write(tmp_path / "cgroup", cgroups))

    assert left_of(read_machine(proc), group) == free
    assert 0 < read_free_bytes(CPU) < 2**50


@pytest.mark.parametrize(
    ("needed", "reason"),
    [
        (6 * GIB, ""),
        # A fifth is left to others.
        (7 * GIB, "needs 7 GiB of 8 GiB free on rank 3"),
        (24 * GIB, "needs 24 GiB of 8 GiB free on rank 3"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(needed, reason):
    assert FreeMemory(free_bytes=8 * GIB, rank=3).refuse(needed) == reason


@pytest.mark.parametrize(
    ("collective", "in_place", "backend", "times"),
    [
        (Collective.ALL_REDUCE, True, "gloo", 1.0),
        (Collective.ALL_TO_ALL, False, "gloo", 2.0),
        (Collective.SEND_RECV, False, "nccl", 2.0),
        # Input and output, and Gloo's copy.
        (Collective.ALL_GATHER, False, "gloo", 2.25),
        (Collective.ALL_GATHER, True, "gloo", 2.0),
        (Collective.ALL_GATHER, False, "nccl", 1.25),
        (Collective.REDUCE_SCATTER, False, "gloo", 2.25),
        (Collective.REDUCE_SCATTER, True, "nccl", 1.0),
    ],
)
def test_a_case_needs_its_buffers_and_what_the_backend_copies(collective, in_place, backend, times):
    group = RankGroup(None, (0, 1, 2, 3), CPU, backend, Tracker())
    case = Case(
        collective=collective,
        dtype="float32",
        redop=None,
        mode=Mode.LATENCY,
        in_place=in_place,
        size_bytes=64 * MIB,
        count=16 * MIB,
    )

    assert needed_bytes(case, group) == times * 64 * MIB + working_bytes(case, group)


@pytest.mark.parametrize(
    ("device", "gpu_ranks", "takers"), [("cuda", 1, 1), ("cuda", 2, 2), ("cpu", 1, 3)]
)  # fmt: skip
def test_ranks_share_the_memory_of_their_gpu_or_of_their_host(device, gpu_ranks, takers):
    everybody = members(6, hosts=2, device=device, gpu_ranks=gpu_ranks)

    assert count_takers(everybody[0], everybody) == takers
