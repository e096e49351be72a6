"""Lists of ranks in words."""

import pytest

from ddpdoctor.report.names import format_ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), ""),
        ((4,), "rank 4"),
        ((1, 0), "ranks 0, 1"),
        ((0, 1, 2), "ranks 0-2"),
        ((9, *range(7)), "ranks 0-6, 9"),
        ((0, 1, 2, 5), "ranks 0-2, 5"),
        ((3, 3), "rank 3"),
        ((0, 2, 4, 5), "ranks 0, 2, 4, 5"),
    ],
)
def test_ranks(ranks, words):
    assert format_ranks(ranks) == words
