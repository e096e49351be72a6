"""What loaders draw, in one process: indices under subsets, epochs, data without indices, what is no loader."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.data.contents import digest_leaves
from ddpdoctor.probes.data.loaders import draw_from


class Numbers(Dataset):
    def __init__(self, length=20, shift=0):
        self.length, self.shift = length, shift

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.rand(2) + torch.tensor([index + self.shift, -index]), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0).reshape(10, 2))


class Broken(Numbers):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


def look(made, epochs=2, *, set_epoch=True):
    return draw_from(made, "data:make", 0, epochs, set_epoch=set_epoch)[0]


def maps(made, epochs=2):
    return draw_from(made, "data:make", 0, epochs, set_epoch=True)[1]


def numbers(looked):
    return [(one.drawn, one.repeated, one.batches, one.last_batch) for one in looked.passes]


def test_indices_are_counted_without_loading_the_samples():
    looked = look(DataLoader(Numbers(), 8))
    assert numbers(looked) == [(20, 0, 3, 4)] * 2
    assert looked.samples == 20
    assert maps(DataLoader(Numbers(), 8))[0] == bytes([255, 255, 15])
    assert (looked.loader.epochs[0].total, looked.loader.epochs[0].xor) == (190, 0)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(Numbers(), 8, drop_last=True), (16, 0, 2, 8)),
        (DataLoader(Numbers(), batch_size=None), (20, 0, 20, 1)),
        (
            DataLoader(Numbers(), batch_sampler=BatchSampler(range(20), 6, drop_last=False)),
            (20, 0, 4, 2),
        ),
        (DataLoader(Numbers(), 5, sampler=WeightedRandomSampler([1.0] + [0.0] * 19, 10)), (10, 9, 2, 5)),
        (DataLoader(Numbers(), 5, sampler=[torch.tensor(3), 4, -1]), (3, 0, 1, 3)),
    ],
)
def test_samplers_of_any_kind_are_followed(loader, expected):
    assert numbers(look(loader, 1)) == [expected]


def test_a_subset_is_traced_back_to_the_samples_under_it():
    inner = Subset(Numbers(), range(1, 20, 2))
    loader = DataLoader(Subset(inner, [0, 9]), 2)
    assert look(loader, 1).samples == 20
    assert int.from_bytes(maps(loader)[0], "little") == 1 << 1 | 1 << 19


def test_set_epoch_is_called_or_not_as_asked():
    data = Numbers()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))
    called, left = look(loader), look(loader, set_epoch=False)
    assert called.set_epoch
    assert len({epoch.order for epoch in called.loader.epochs}) == 2
    assert len({epoch.order for epoch in left.loader.epochs}) == 1
    assert called.loader.sampler.standard
    assert (called.loader.sampler.replicas, called.loader.sampler.rank) == (2, 0)


def test_data_without_indices_is_gone_over():
    looked = look(DataLoader(Stream(), 4), 1)
    assert numbers(looked) == [(10, None, 3, 2)]
    assert looked.loader.iterable
    assert len(looked.loader.epochs[0].batch_digests) == 3
    assert numbers(look([torch.zeros(3), torch.zeros(2)], 1)) == [(5, None, 2, 2)]


def test_indices_that_are_none_leave_the_counting_to_the_data():
    batches = [[("a", 1)], [("b", 2)]]
    loader = DataLoader({("a", 1): 1.0, ("b", 2): 2.0}, batch_sampler=batches)
    looked = look(loader, 1)
    assert maps(loader) == ()
    assert "could not be followed" in looked.notes[0]


def test_equal_datasets_have_equal_samples_and_others_not_and_random_states_stay():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (look(DataLoader(data, 4), 1) for data in (Numbers(), Numbers(), Numbers(shift=1)))
    digests = [looked.loader.epochs[0].sample_digests for looked in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16
    assert torch.equal(before, torch.get_rng_state())


def test_samples_that_cannot_be_loaded_cost_the_comparison_only():
    looked = look(DataLoader(Broken(), 4), 1)
    assert numbers(looked) == [(20, 0, 5, 4)]
    assert "the disk is gone" in looked.notes[0]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Numbers(), "returns a dataset"),
        ((DataLoader(Numbers()), DataLoader(Numbers())), "returns a tuple with several loaders"),
        ({"train": DataLoader(Numbers())}, "returns a dict with several loaders"),
        (None, "not a loader"),
        (DataLoader(Numbers(), sampler=(1 // 0 for _ in range(2))), "ZeroDivisionError"),
    ],
)
def test_what_is_no_loader_is_refused(made, message):
    with pytest.raises(UserError) as raised:
        look(made)
    assert message in raised.value.message


def test_leaves_of_one_value_say_nothing():
    assert digest_leaves({"a": torch.ones(3), "b": [torch.arange(3.0), "text"]})[0].startswith("1:")


def test_a_random_sampler_draws_each_sample_once():
    data = Numbers(100)
    assert numbers(look(DataLoader(data, 10, sampler=RandomSampler(data)), 1)) == [(100, 0, 10, 10)]
