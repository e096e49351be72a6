"""What the check of the data allocates beside the buffers: the same for any number of ranks."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpdoctor.model.bandwidth import Case, Collective, Mode
from ddpdoctor.probes.bandwidth import correctness
from ddpdoctor.probes.bandwidth.cases import DTYPES
from ddpdoctor.probes.bandwidth.group import RankGroup
from ddpdoctor.probes.bandwidth.pattern import PERIODS, put_in, tolerance, working_bytes
from ddpdoctor.probes.bandwidth.tracker import Tracker

CPU = torch.device("cpu")


class FirstRank(RankGroup):
    """A group of which no other rank is there."""

    @property
    def index(self) -> int:
        return 0


class Allocated(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, while they live."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self._known = {buffer.untyped_storage()._cdata}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        return made

    def _see(self, storage):
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key, size):
        self._known.discard(key)
        self._now -= size


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("collective", "dtype", "redop"),
    [
        ("all_gather", "float32", None),
        ("all_to_all", "float64", None),
        ("reduce_scatter", "bfloat16", "sum"),
        ("all_reduce", "float64", "avg"),
        ("all_reduce", "int64", "max"),
    ],
)
@pytest.mark.parametrize(("ranks", "periods"), [(3, 4), (64, 64), (64, 2), (512, 2)])
def test_it_does_not_grow_with_the_ranks(ranks, periods, collective, dtype, redop, wrong):
    count = periods * PERIODS["cpu"] // ranks * ranks
    case = Case(
        collective=Collective(collective), dtype=dtype, redop=redop, mode=Mode.LATENCY, in_place=False,
        size_bytes=count * DTYPES[dtype], count=count,
    )  # fmt: skip
    group = FirstRank(None, tuple(range(ranks)), CPU, "gloo", Tracker())
    buffer = torch.full((count,), float("nan") if wrong and "float" in dtype else 120, dtype=getattr(torch, dtype))

    with Allocated(buffer) as allocated:
        if not wrong:
            correctness._write(buffer, put_in(case, group, 0), 0)
        correctness._compare(buffer, correctness._expected(group, case), tolerance(case, group))

    assert 0 < allocated.peak <= working_bytes(case, group) == 64 * PERIODS["cpu"]
