import pytest
import torch

from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth.buffers import COLD_FACTOR, cache_bytes, count_sets, counts, read_cache_bytes, set_bytes

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20


def case_of(collective: Collective, size_bytes: int, *, in_place: bool = False) -> Case:
    return Case(
        collective=collective,
        dtype="float32",
        redop=None,
        mode=Mode.LATENCY,
        in_place=in_place,
        size_bytes=size_bytes,
        count=size_bytes // 4,
    )


@pytest.mark.parametrize(
    ("collective", "source", "target"),
    [
        (Collective.ALL_REDUCE, 4096, 4096),
        (Collective.BROADCAST, 4096, 4096),
        (Collective.REDUCE, 4096, 4096),
        # S is all_gather's output, reduce_scatter's input, all of a rank's data of all_to_all.
        (Collective.ALL_GATHER, 1024, 4096),
        (Collective.REDUCE_SCATTER, 4096, 1024),
        (Collective.ALL_TO_ALL, 4096, 4096),
        (Collective.SEND_RECV, 4096, 4096),
    ],
)
def test_the_size_is_that_of_nccl_tests(collective, source, target):
    assert counts(case_of(collective, 4 * 4096), 4) == (source, target)


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"index0": "32K", "index2": "1024K", "index3": "32768K"}, 32 * MIB),
        ({"index0": "48K", "index3": "1M"}, MIB),
        ({}, 64 * MIB),
        ({"index0": "unknown"}, 64 * MIB),
    ],
)
def test_the_last_cache_is_the_largest(tmp_path, files, size):
    for name, text in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(f"{text}\n")

    assert read_cache_bytes(tmp_path) == size


@pytest.mark.parametrize("size_bytes", [64 * KIB, MIB, 16 * MIB])
def test_cold_buffers_exceed_the_cache(size_bytes):
    case = case_of(Collective.ALL_REDUCE, size_bytes, in_place=True)

    sets = count_sets(CPU, case, 2, most=10**6)

    assert sets * set_bytes(case, 2) > COLD_FACTOR * cache_bytes(CPU)


def test_small_cold_buffers_are_as_many_as_calls_so_that_none_is_used_twice():
    assert count_sets(CPU, case_of(Collective.ALL_REDUCE, 16, in_place=True), 2, most=400) == 400


def test_warm_buffers_are_one_set():
    assert count_sets(CPU, case_of(Collective.ALL_REDUCE, 16, in_place=True), 2, most=1) == 1
