"""How often the slow one is named, and nobody else: each fault is made for real, run after run, the healthy between.

python -m tests.bench.localize [RUNS]      as root, with iproute2; ten runs of each by default, about twenty minutes

Three hosts are network namespaces of this machine, with one rank each and Gloo between them.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.scenarios.bandwidth.running import Ran, bench
from tests.scenarios.bandwidth.slowing import SMALL, bench_on, crowded, late, limit_host, limit_link, named
from tests.scenarios.hosts import lent_hosts

ENOUGH = ("--max-size", "1KiB", "--iters", "50", "--warmup", "1", "--mode", "latency", "--format", "json")
"""As many calls as it takes to say who comes late."""


@dataclass(frozen=True)
class Experiment:
    """Something made slow, and who must be named: kind and ranks. Nobody, where nothing was made slow."""

    name: str
    run: Callable[[], Ran]
    wanted: tuple[tuple[str, tuple[int, ...]], ...]


def main() -> int:
    """Run all experiments in turn; return 1 where any run named another than it had to."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    right: Counter[str] = Counter()
    for number in range(1, runs + 1):
        for experiment in EXPERIMENTS:
            began_s = time.monotonic()
            ran = experiment.run()
            found = tuple((kind, tuple(ranks)) for kind, ranks, _ in named(ran))
            right[experiment.name] += found == experiment.wanted
            took_s = time.monotonic() - began_s
            print(f"{number:3} {experiment.name}: {_say(found)} ({took_s:.0f} s)", flush=True)
            if found != experiment.wanted:
                _show(ran)
    for experiment in EXPERIMENTS:
        print(f"{right[experiment.name]:3} of {runs}  {experiment.name}: {_say(experiment.wanted)}")
    return 0 if all(right[experiment.name] == runs for experiment in EXPERIMENTS) else 1


def _show(ran: Ran) -> None:
    data = ran.report["data"]
    for result in (*data["nodes"], *data["pairs"]):
        print(f"    {result['ranks']}: {result['busbws_gb_s']} GB/s, {result['latencies_us']} us")
    for arrival in data["arrivals"]:
        print(f"    {arrival}")


def _say(found: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    return ", ".join(f"{kind} {' and '.join(map(str, ranks))}" for kind, ranks in found) or "nobody"


def _nodes(host: int | None = None, link: tuple[int, int] | None = None) -> Ran:
    with lent_hosts(3) as hosts:
        if host is not None:
            limit_host(hosts, host)
        if link is not None:
            limit_link(hosts, *link)
        return bench_on(hosts, *SMALL, "--by-node")


EXPERIMENTS = (
    Experiment("three hosts", _nodes, ()),
    Experiment("100 Mbit/s at host 2 of three", lambda: _nodes(host=2), (("slow-node", (2,)),)),
    Experiment("100 Mbit/s between hosts 0 and 2", lambda: _nodes(link=(0, 2)), (("slow-link", (0, 2)),)),
    Experiment("three ranks", lambda: bench(*SMALL, "--pairs", ranks=3), ()),
    Experiment(
        "a core that rank 2 of three has to share",
        lambda: bench(*SMALL, "--pairs", ranks=3, **crowded(2)),
        (("slow-rank", (2,)),),
    ),
    Experiment("two ranks", lambda: bench(*ENOUGH), ()),
    Experiment("rank 1 of three comes 20 ms late", lambda: bench(*ENOUGH, ranks=3, **late(1)), (("slow-rank", (1,)),)),
)


if __name__ == "__main__":
    sys.exit(main())
