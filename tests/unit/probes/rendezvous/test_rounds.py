import pytest

from ddpdoctor.probes.rendezvous.mesh import BLOCK, blocks_of, sources_of, targets_of


@pytest.mark.parametrize("count", [0, 1, 2, 3, 16, BLOCK, BLOCK + 1, BLOCK + 2, 200])
def test_all_ordered_pairs_once_and_each_node_serves_one_a_round(count):
    rounds = [one for block in blocks_of(count) for one in block]
    assert len(rounds) == max(0, count - 1)
    pairs = set()
    for distance in rounds:
        one = range(distance, distance + 1)
        of_round = [(place, target) for place in range(count) for target in targets_of(place, one, count)]
        assert len({target for _, target in of_round}) == len(of_round) == count
        pairs |= set(of_round)
    assert pairs == {(source, target) for source in range(count) for target in range(count) if source != target}


def test_sources_are_those_of_which_one_is_a_target():
    (block,) = blocks_of(7)
    for place in range(7):
        assert all(place in targets_of(source, block, 7) for source in sources_of(place, block, 7))


def test_a_block_is_no_longer_than_its_limit():
    assert [len(block) for block in blocks_of(2 * BLOCK + 2)] == [BLOCK, BLOCK, 1]
