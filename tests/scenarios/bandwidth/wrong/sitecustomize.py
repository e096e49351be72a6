"""Adds 1 to one element of each all-reduce of 2 KiB, in one rank: this folder stands on PYTHONPATH.

WRONG_RANK says which rank.
"""

from tests.scenarios.bandwidth.after_import import put_in_rank

SIZE_BYTES = 2048
INDEX = 137


def put_in(dist):
    all_reduce = dist.all_reduce

    def wrong(tensor, *args, **kwargs):
        work = all_reduce(tensor, *args, **kwargs)
        if tensor.nbytes == SIZE_BYTES:
            if work is not None:
                work.wait()
            tensor.view(-1)[INDEX] += 1
        return work

    dist.all_reduce = wrong


put_in_rank("WRONG_RANK", put_in)
