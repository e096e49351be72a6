"""Lets one rank come 20 ms late to every barrier: this folder stands on PYTHONPATH.

LATE_RANK says which rank.
"""

import time

from tests.scenarios.bandwidth.after_import import put_in_rank

DELAY_S = 0.02


def put_in(dist):
    barrier = dist.barrier

    def late(*args, **kwargs):
        time.sleep(DELAY_S)
        return barrier(*args, **kwargs)

    dist.barrier = late


put_in_rank("LATE_RANK", put_in)
