"""Parameters that differ: who is to blame, since when, and the likely cause."""

from ddpdoctor.model.consistency import StreamClock, What
from tests.golden import table
from tests.rules.consistency import build as streams
from tests.rules.consistency.build import about, apart, difference, everywhere, stream


def uneven(ranks, steps):
    """Judge ranks of which some have made these numbers of steps at the end."""
    now = everywhere(ranks, 80, odd={rank: {"steps": count} for rank, count in steps.items()})
    end = difference(What.PARAMETER, 80, None, sides=apart(ranks))
    return about(stream(end, clock=StreamClock.END, ranks=ranks, now=now), ranks=ranks)


test_rows = table("drift", vars(streams), globals())
