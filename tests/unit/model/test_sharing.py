"""The arithmetic of an epoch, held to torch's own sampler and loader."""

import itertools
from collections import Counter

import pytest

from ddpdoctor.model.sharing import SamplingPlan, Sharing, count_both, share_out


@pytest.mark.parametrize(
    ("sampler_drop_last", "drop_last", "batches", "samples"),
    [
        (False, True, (28, 8), (448, 0, 7)),
        (False, False, (29, 4), (455, 1, 0)),
        (True, True, (28, 8), (448, 0, 7)),
        (True, False, (29, 3), (454, 0, 1)),
    ],
)
def test_455_samples_on_two_ranks(sampler_drop_last, drop_last, batches, samples):
    plan = SamplingPlan(
        samples=455, world_size=2, batch_size=8, drop_last=drop_last, sampler_drop_last=sampler_drop_last
    )
    shares = share_out(plan)

    assert [(one.batches, one.last_batch) for one in shares.ranks] == [batches] * 2
    assert (shares.unique, shares.duplicates, shares.missed) == samples


def drawn_by_torch(plan: SamplingPlan) -> list[tuple[int, list[list[int]]]]:
    """Return for each rank how many indices its sampler gives, and the batches of its loader."""
    from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

    found = []
    for rank in range(plan.world_size):
        samples: object = range(plan.samples)
        if plan.sharing is Sharing.SAMPLER:
            sampler = DistributedSampler(
                samples, plan.world_size, rank, shuffle=plan.shuffle, drop_last=plan.sampler_drop_last
            )
        else:
            samples = range(plan.samples)[rank :: plan.world_size] if plan.sharing is Sharing.SPLIT else samples
            sampler = SequentialSampler(samples)
        loader = DataLoader(
            samples, plan.batch_size, sampler=sampler, drop_last=plan.drop_last, collate_fn=list
        )  # fmt: skip
        found.append((len(list(sampler)), list(loader)))
    return found


def plans():
    flags = (False, True)
    sizes = ((1, 2, 5, 8, 16, 17, 30, 97), (1, 2, 3, 4, 7), (1, 3, 8))
    for samples, world_size, batch_size in itertools.product(*sizes):
        for drop_last, sampler_drop_last, shuffle in itertools.product(flags, flags, flags):
            yield SamplingPlan(
                samples=samples, world_size=world_size, batch_size=batch_size, drop_last=drop_last,
                sampler_drop_last=sampler_drop_last, shuffle=shuffle,
            )  # fmt: skip
        for drop_last, sharing in itertools.product(flags, (Sharing.SPLIT, Sharing.NONE)):
            if sharing is Sharing.NONE or samples >= world_size:
                yield SamplingPlan(
                    samples=samples, world_size=world_size, batch_size=batch_size, drop_last=drop_last,
                    sharing=sharing, shuffle=False,
                )  # fmt: skip


def test_every_number_is_that_of_torch():
    count = 0
    for plan in plans():
        shares, seen = share_out(plan), drawn_by_torch(plan)
        delivered = Counter(sample for _, batches in seen for batch in batches for sample in batch)
        assert [one.drawn for one in shares.ranks] == [drawn for drawn, _ in seen], plan
        assert [one.batches for one in shares.ranks] == [len(batches) for _, batches in seen], plan
        assert [one.last_batch for one in shares.ranks] == [len(b[-1]) if b else 0 for _, b in seen], plan
        assert [one.delivered for one in shares.ranks] == [sum(map(len, batches)) for _, batches in seen], plan
        assert (shares.unique, shares.delivered) == (len(delivered), delivered.total()), plan
        assert shares.missed == plan.samples - len(delivered), plan
        sets = [{sample for batch in batches for sample in batch} for _, batches in seen]
        both = [[count_both(plan, one, other) for other in shares.ranks] for one in shares.ranks]
        assert both == [[len(one & other) for other in sets] for one in sets], plan
        count += 1
    assert count > 1000


def test_what_a_sampler_repeats_is_counted_where_it_is_drawn():
    from torch.utils.data import DistributedSampler

    for samples, world_size in itertools.product((1, 2, 3, 5, 10), (1, 2, 4, 7)):
        shares = share_out(SamplingPlan(samples=samples, world_size=world_size, batch_size=1, shuffle=False))
        positions = [
            list(DistributedSampler(range(samples), world_size, rank, shuffle=False)) for rank in range(world_size)
        ]
        seen: set[int] = set()
        repeated = [0] * world_size
        for place in range(len(positions[0])):
            for rank in range(world_size):
                repeated[rank] += positions[rank][place] in seen
                seen.add(positions[rank][place])
        assert [one.repeated for one in shares.ranks] == repeated


def test_which_samples_a_shuffle_leaves_out_on_each_rank_is_not_foretold():
    shares = share_out(SamplingPlan(samples=10, world_size=2, batch_size=4, drop_last=True, sharing=Sharing.NONE))
    assert (shares.unique, shares.duplicates, shares.missed) == (None, None, None)
