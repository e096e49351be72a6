"""What the mesh of many hosts would take, worked out: the order of its rounds, with durations that are put in.

    python -m tests.bench.mesh_on_paper [HOSTS …]

Nodes follow ``rounds`` as the real ones do: a node goes to its next target when it is done with the last one, a target
serves one at a time, in the order in which they come, and blocks are left when all sources were there.
"""

import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ddpdoctor.probes.mesh import (
    ALL_SENDS_S,
    FAILURES,
    LEAST_SEND_S,
    LONGEST_SEND_S,
    MeshLimits,
    blocks_of,
    partners_of,
)
from ddpdoctor.probes.payloads import LARGE_BYTES

HEALTHY_S = LARGE_BYTES / 1.25e9 + 0.005
"""A large payload at 10 Gbit/s, and what greeting, small payload and Python take beside it."""
STORE_S = 40e-6
"""The server's share of one request, measured on one core; it serves all nodes from one thread."""
LIMITS = MeshLimits()
SICK = 1
"""The host with which something is wrong; any."""


def _never(_source: int, _target: int) -> bool:
    return False


@dataclass
class Network:
    """What is wrong with one host."""

    unconnected: Callable[[int, int], bool] = _never
    """Whether first packets of a pair are dropped."""
    stalls: Callable[[int, int], bool] = _never
    slow: Callable[[int, int], bool] = _never


@dataclass
class State:
    """Where all nodes are."""

    count: int
    now: list[float]
    """When each node is free to send."""
    serving: list[float]
    """When each node is free to serve."""
    lost: dict[tuple[str, int], float] = field(default_factory=dict)
    """What each has spent on payloads that stalled, as a source and as a target."""


def simulate(count: int, network: Network) -> float:
    """Return when the last node is done, in seconds."""
    state = State(count=count, now=[0.0] * count, serving=[0.0] * count)
    for rounds in blocks_of(count):
        _run_block(state, rounds, network)
    return max(state.now)


def _run_block(state: State, rounds: range, network: Network) -> None:
    count = state.count
    targets = [partners_of(place, rounds, count)[0] for place in range(count)]
    begun = list(state.now)
    store_s = count * (len(rounds) + 3) * STORE_S
    waiting: list[tuple[float, int, int]] = []
    for place in range(count):
        heard = max(begun[place], *(begun[target] for target in targets[place])) + store_s
        dropped = any(network.unconnected(place, target) for target in targets[place])
        heapq.heappush(waiting, (heard + dropped * LIMITS.connect_s, place, 0))
    done = [0.0] * count
    while waiting:
        at, place, step = heapq.heappop(waiting)
        if step == len(rounds):
            done[place] = at
            continue
        target = targets[place][step]
        heapq.heappush(waiting, (_send(state, at, place, target, network), place, step + 1))
    state.now = [
        max(done[place], state.serving[place], *(done[source] for source in partners_of(place, rounds, count)[1]))
        if any(network.unconnected(source, place) for source in partners_of(place, rounds, count)[1])
        else max(done[place], state.serving[place])
        for place in range(count)
    ]


def _send(state: State, at: float, source: int, target: int, network: Network) -> float:
    if network.unconnected(source, target) or state.lost.get(("source", source), 0) >= FAILURES * LIMITS.stall_s:
        return at
    begins = max(at, state.serving[target])
    if state.lost.get(("target", target), 0) >= FAILURES * LIMITS.stall_s:
        return begins
    takes = HEALTHY_S
    if network.slow(source, target):
        takes = min(LONGEST_SEND_S, max(LEAST_SEND_S, ALL_SENDS_S / state.count)) + HEALTHY_S
    if network.stalls(source, target):
        takes = LIMITS.stall_s
        for end in (("source", source), ("target", target)):
            state.lost[end] = state.lost.get(end, 0) + takes
    state.serving[target] = begins + takes
    return begins + takes


NETWORKS = {
    "all is well": Network(),
    "first packets to one host are dropped": Network(unconnected=lambda _, target: target == SICK),
    "first packets from one host are dropped": Network(unconnected=lambda source, _: source == SICK),
    "large packets to one host vanish": Network(stalls=lambda _, target: target == SICK),
    "large packets from one host vanish": Network(stalls=lambda source, _: source == SICK),
    "one host has 10 Mbit/s, both ways": Network(slow=lambda source, target: SICK in {source, target}),
    "two halves cannot connect to each other": Network(unconnected=lambda a, b: a % 2 != b % 2),
    "large packets between two halves vanish": Network(stalls=lambda a, b: a % 2 != b % 2),
}


def main() -> None:
    """Print a table in Markdown."""
    counts = [int(one) for one in sys.argv[1:]] or [4, 16, 64, 512]
    print("| seconds | " + " | ".join(f"{count} hosts" for count in counts) + " |")
    print("|---|" + "---|" * len(counts))
    for name, network in NETWORKS.items():
        print(f"| {name} | " + " | ".join(f"{simulate(count, network):.1f}" for count in counts) + " |", flush=True)


if __name__ == "__main__":
    main()
