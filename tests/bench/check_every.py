"""Which share of the time ``wrap --check-every auto`` takes: python -m tests.bench.check_every [STEPS [N [LAYERS]]]

One job of two ranks on Gloo with LAYERS layers of N x N, which gives how long each step of rank 0 took, and what
comparisons had counted by then. Printed are their own count, and by how much steps with a comparison and the next ones
took longer than the median of the eight on either side. Without arguments about five minutes.
"""

import statistics
import sys

from tests.bench.costs import WRAP, train

SIZES = (900, 353, 80)
NEAR = 8


def main() -> None:
    """Run the job and print the shares."""
    given = [int(text) for text in sys.argv[1:]]
    steps, width, layers = (*given, *SIZES[len(given) :])
    job = {"steps": steps, "width": width, "layers": layers, "rows": 64, "optimizer": "Adam", "auto": True}
    found = train(job, *WRAP)
    assert found.times_s
    assert found.by_then
    took, (taken, spent) = found.times_s, zip(*found.by_then, strict=True)
    compared = [i for i in range(1, len(took)) if taken[i] > taken[i - 1]]
    slow = {*compared, *(i + 1 for i in compared)}
    added = spent[0]  # the first step warms up
    for i in slow & set(range(len(took))):
        around = [took[j] for j in range(max(1, i - NEAR), min(len(took), i + NEAR + 1)) if j not in slow]
        added += took[i] - statistics.median(around or [took[i]])
    print(
        f"{len(took)} steps of {statistics.median(took) * 1e3:.0f} ms, {taken[-1]} comparisons:"
        f" {100 * spent[-1] / sum(took):.2f} % by their own count, {100 * added / sum(took):.2f} % by their neighbors"
    )


if __name__ == "__main__":
    main()
