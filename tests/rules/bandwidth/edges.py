"""Pairs and nodes that were measured in nine turns, for the rules that say who is slow."""

import math
from itertools import combinations

from ddpdoctor.model.bandwidth import Arrival, Bench, BenchSettings, Member, NodeResult, Pair
from ddpdoctor.rules.bandwidth.curve import Measured

TURNS = 9
USUAL_GB_S, USUAL_US = 1.0, 400.0
NARROW = 0.012
"""Of the usual bandwidth: a limit of 100 Mbit/s."""


def noise(*place):
    """Return a factor of 0.8 to 1.25, always the same for the same place."""
    return 1.25 ** math.sin(sum(number * step for number, step in zip(place, (12.9898, 78.233, 37.719), strict=False)))


def pairs(hosts, bandwidth=None, latency=None, turns=None, *, alone=True):
    """Return all pairs of ranks; ``bandwidth`` and ``latency`` are factors by pair, in the turns given or in all."""
    return tuple(
        Pair(
            ranks=(one, other), hosts=(hosts[one], hosts[other]), alone=alone, cv=0.1,
            **series(
                (one, other), (bandwidth or {}).get((one, other), 1.0), (latency or {}).get((one, other), 1.0), turns
            ),
        )
        for one, other in combinations(range(len(hosts)), 2)
    )  # fmt: skip


def nodes(hosts, bandwidth=None, latency=None, turns=None, *, alone=True):
    """Return each host with several ranks by itself, then all pairs of hosts; factors by host or two of them."""
    names = tuple(dict.fromkeys(hosts))
    several = [name for name in names if hosts.count(name) > 1]
    return tuple(
        NodeResult(
            host=host, peer=peer, alone=alone, cv=0.1,
            ranks=tuple(rank for rank, name in enumerate(hosts) if name in {host, peer}),
            **series(
                (names.index(host), 0 if peer is None else names.index(peer)),
                (bandwidth or {}).get((host, peer), 1.0), (latency or {}).get((host, peer), 1.0), turns,
            ),
        )
        for host, peer in (*((name, None) for name in several), *combinations(names, 2))
    )  # fmt: skip


def series(place, bandwidth, latency, turns):
    """Return the fields of a result that was measured in nine turns, and slow by these factors in some or all."""
    slow = range(TURNS) if turns is None else turns
    busbws_gb_s = tuple(
        USUAL_GB_S * noise(*place, turn) * (bandwidth if turn in slow else 1.0) for turn in range(TURNS)
    )
    latencies_us = tuple(USUAL_US * noise(*place, -turn) * (latency if turn in slow else 1.0) for turn in range(TURNS))
    return {
        "busbws_gb_s": busbws_gb_s, "busbw_gb_s": sorted(busbws_gb_s)[TURNS // 2],
        "latencies_us": latencies_us, "latency_us": sorted(latencies_us)[TURNS // 2],
    }  # fmt: skip


def with_end(end, count, factor):
    """Return this factor for all pairs of one end."""
    return {(one, other): factor for one, other in combinations(range(count), 2) if end in {one, other}}


def arrival(rank, late_us, share, calls=500):
    return Arrival(rank=rank, host="a", late_us=late_us, late_p95_us=2 * abs(late_us), share=share, calls=calls)


def scene(hosts, *, reasons=(), **seen):
    members = tuple(
        Member(
            rank=rank, local_rank=0, host=host, pid=1, device="cpu", device_name="", cores=1, version="", torch="",
        )
        for rank, host in enumerate(hosts)
    )  # fmt: skip
    asked = BenchSettings(pairs="pairs" in seen, by_node="nodes" in seen)
    return Measured(bench=Bench(settings=asked, members=members, **seen), reasons=reasons)
