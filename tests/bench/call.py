"""What recording adds to one collective call: python -m tests.bench.call; a minute.

First the record itself, in a Gloo group of one rank, around a call that does nothing: its code stays in the processor's
caches. Then real all_reduces of one element, of one rank and of two. Each of them waits for other threads and ranks,
and Python goes on with cold caches: the same record takes several times as long there. "In training" means that an
optimizer marks the steps; without one each collective ends a step, which is recorded too. A call whose work the script
waits for is recorded twice, once for the call and once for the wait.
"""

import sys
from collections.abc import Callable
from typing import Any

from tests.bench.pairs import compare_added
from tests.bench.ranks import per_call_s, start_recorded

CALLS = 500
"""Calls in one block: some milliseconds, short beside the moments at which other processes come and go."""


def main() -> None:
    """Measure in one recorded rank, then in two."""
    for ranks in (1, 2):
        start_recorded("tests.bench.call", ranks)


def measure_as_rank() -> None:
    """Print what the record of a call costs."""
    import torch
    import torch.distributed as dist
    from _ddpdoctor_recorder import calls
    from _ddpdoctor_recorder.step_clock import clock
    from _ddpdoctor_recorder.storage import ring_layout

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, tensor = dist.get_world_size(), torch.zeros(1)
    plain = dist.all_reduce.__wrapped__
    wait, plain_wait = dist.Work.wait, dist.Work.wait.__wrapped__
    nothing = calls.wrap("all_reduce", _call_nothing, "tensor", p2p=False)

    def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
        def timed(method: Any, call: Callable[[], Any]) -> float:
            dist.Work.wait = method
            return per_call_s(call, CALLS)

        compare_added(
            f"ranks: {ranks}, {name}",
            lambda: timed(wait, ours),
            lambda: timed(plain_wait, theirs),
            unit="us",
            scale=1e6,
        )

    if ranks == 1:
        compare("the record alone", lambda: nothing(tensor), lambda: _call_nothing(tensor))
    compare("all_reduce", lambda: dist.all_reduce(tensor), lambda: plain(tensor))
    clock.level = ring_layout.STEP_OPTIMIZER
    compare("all_reduce in training", lambda: dist.all_reduce(tensor), lambda: plain(tensor))
    compare(
        "asynchronous all_reduce in training, and its wait",
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: plain(tensor, async_op=True).wait(),
    )
    dist.Work.wait = wait
    dist.destroy_process_group()


def _call_nothing(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:  # noqa: FBT001, FBT002
    """Stand for all_reduce, with its arguments."""


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        measure_as_rank()
    else:
        main()
