"""Groups of the units: made by their own ranks, without a call that holds the GIL on the others."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpdoctor.probes.bandwidth.group import RankGroup
from ddpdoctor.probes.bandwidth.tracker import Tracker
from ddpdoctor.probes.bandwidth.visits import Unit, _Groups


@pytest.fixture
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    yield RankGroup(None, (0, 1, 2), torch.device("cpu"), "fake", Tracker())
    dist.destroy_process_group()


def test_a_rank_outside_a_group_takes_no_part_in_making_it(world, monkeypatch):
    """torch would have it split the communicator of all ranks, which is bound to a device."""
    bound = torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = bound
    splits = []
    backend = type(dist.group.WORLD._get_backend(bound))
    monkeypatch.setattr(backend, "supports_splitting", property(lambda _: True))
    monkeypatch.setattr(backend, "perform_nocolor_split", lambda *_: splits.append(1), raising=False)

    dist.new_group([0, 1], backend="fake")
    assert splits == [1], "torch does not split any more, so that there is nothing to avoid"
    _Groups(world).of([Unit(name="ranks 0 and 1", ranks=(0, 1))])

    assert splits == [1]
    assert dist.group.WORLD.bound_device_id == bound
