"""What ranks of the tests run: `python -m tests.unit.probes.bandwidth.rank_jobs JOB RANK SIZE FOLDER`."""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Member, Mode
from ddpdoctor.model.codec import encode
from ddpdoctor.probes.bandwidth.collectives import RankGroup, Tracker, check, make_buffers, make_sets
from ddpdoctor.probes.bandwidth.plan import DTYPES, REDOPS, list_cases, reducible
from ddpdoctor.probes.bandwidth.session import run_sweep
from ddpdoctor.probes.bandwidth.timing import BarrierWaits, Effort, ResultLog, measure
from tests import forking
from tests.scenarios.running import clean_environment

LATE_S = 0.4  # where processes wait for a core, others come a tenth of a second late
SMALL = BenchSettings(modes=(Mode.LATENCY,), min_size_bytes=4096, max_size_bytes=4096)
LARGE_BYTES = 600_000
"""More than a period of the pattern, on each of three ranks, in every dtype that it is used with."""


def main(job, rank, size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    group = RankGroup(None, tuple(range(size)), torch.device("cpu"), "gloo", Tracker())
    (folder / f"{rank}.json").write_text(json.dumps(JOBS[job](group)))
    if job != "raise":
        dist.barrier()
    dist.destroy_process_group()


def hosts_of(group):
    return [f"host{rank}" for rank in range(group.size)]


def members_of(group):
    return [
        Member(
            rank=rank, local_rank=0, host=host, pid=1, device="cpu", device_name="", cores=1, version="", torch=""
        )
        for rank, host in enumerate(hosts_of(group))
    ]  # fmt: skip


def check_one(group, case):
    wrong, first_us = check(group, case, make_buffers(group, case), hosts_of(group))
    assert first_us > 0
    return [encode(one) for one in wrong]


def case_of(collective, size, **changes):
    settings = replace(SMALL, collectives=(Collective(collective),), **changes)
    (case,) = list_cases(settings, size)
    return case


def collectives_of(group):
    return [one for one in Collective if group.size > 1 or one is not Collective.SEND_RECV]


@contextmanager
def altered(name, change):
    """Put a function in the place of one of torch.distributed: it is handed the real one, and all arguments."""
    real = getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: change(real, *args, **kwargs))
    try:
        yield
    finally:
        setattr(dist, name, real)


def check_everything(group):
    """Check all collectives with all dtypes and operators, in place and out of place; then some of them large."""
    wrong, checked = [], 0
    reduces = [(Collective.ALL_REDUCE, False), (Collective.REDUCE, False)]
    reduces += [(Collective.REDUCE_SCATTER, place) for place in (False, True)]
    carries = [(Collective.ALL_GATHER, place) for place in (False, True)]
    others = {Collective.BROADCAST, Collective.ALL_TO_ALL, Collective.SEND_RECV}
    carries += [(one, False) for one in collectives_of(group) if one in others]
    cases = [(one, dtype, redop) for one, (dtype, redop) in product(reduces, product(DTYPES, REDOPS))]
    cases = [one for one in cases if reducible("gloo", one[1], one[2])]
    cases += [(one, dtype, "sum") for one, dtype in product(carries, DTYPES)]
    for (collective, in_place), dtype, redop in cases:
        case = case_of(collective.value, group.size, dtypes=(dtype,), redop=redop, in_place=in_place)
        wrong += check_one(group, case)
        checked += 1
    for collective, dtype in product(collectives_of(group), ("bfloat16", "int8")):
        large = {"min_size_bytes": LARGE_BYTES, "max_size_bytes": LARGE_BYTES}
        wrong += check_one(group, case_of(collective.value, group.size, dtypes=(dtype,), **large))
        checked += 1
    return [checked, wrong]


def seed_wrong_data(group):
    """Alter results on one rank, in the ways that networks and memories do, and check."""
    index = dist.get_rank()

    def on(rank, change):
        def call(real, tensor, *args, **kwargs):
            work = real(tensor, *args, **kwargs)
            if index == rank:
                change(tensor)
            return work

        return call

    def add_one(place):
        def change(tensor):
            if tensor.numel() > place:
                tensor[place] += 1

        return change

    def nothing(real, *args, **kwargs):
        """A call that returns at once and moves no data."""

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    seen = {}
    with altered("all_reduce", on(1, add_one(777))):
        seen["one element"] = check_one(group, case_of("all_reduce", group.size))
        small = {"min_size_bytes": 64, "max_size_bytes": 64}
        seen["another size"] = check_one(group, case_of("all_reduce", group.size, **small))
        for redop in (one for one in REDOPS if reducible("gloo", "float32", one)):
            seen[redop] = check_one(group, case_of("all_reduce", group.size, redop=redop))
        seen["bfloat16"] = check_one(group, case_of("all_reduce", group.size, dtypes=("bfloat16",)))
        large = {"min_size_bytes": LARGE_BYTES, "max_size_bytes": LARGE_BYTES}
        seen["large"] = check_one(group, case_of("all_reduce", group.size, **large))
    with altered("all_reduce", on(0, lambda tensor: tensor[-3:].fill_(math.nan))):
        seen["not a number"] = check_one(group, case_of("all_reduce", group.size))
    with altered("all_reduce", nothing):
        seen["not reduced"] = check_one(group, case_of("all_reduce", group.size))
    with altered("broadcast", on(2, add_one(5))):
        seen["broadcast"] = check_one(group, case_of("broadcast", group.size))
    with altered(gather, on(0, lambda tensor: tensor.copy_(tensor.roll(tensor.numel() // group.size)))):
        seen["slots of others"] = check_one(group, case_of("all_gather", group.size))
    with altered(gather, nothing):
        seen["stale output"] = check_one(group, case_of("all_gather", group.size))
    with altered("reduce", on(1, add_one(5))):
        seen["reduce elsewhere"] = check_one(group, case_of("reduce", group.size))
    return seen


def measure_everything(group):
    """Measure every collective in both modes, warm and cold, with a number of calls that the user asks for."""
    settings = replace(SMALL, collectives=tuple(Collective), modes=tuple(Mode))
    measured = []
    for case, cold in product(list_cases(settings, group.size), (False, True)):
        one = measure(group, case, Effort(iterations=6, warmup=1, cold=cold))
        measured.append([encode(one.measurement), [len(row) for row in one.waits_us], one.note])
    return measured


def agree_on_calls(group):
    """Ranks that would not make the same number of calls if each were to decide."""
    effort = Effort(seconds=0.01 * (1 + 10 * group.index))
    measured = [measure(group, case, effort).measurement for case in list_cases(SMALL_BOTH, group.size)]
    return [one.iterations for one in measured]


SMALL_BOTH = replace(SMALL, modes=tuple(Mode))


def come_late(group):
    """Rank 1 is late, before the barrier or after it, or nobody is."""

    def late(real, *args, **kwargs):
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        return real(*args, **kwargs)

    def arrivals():
        seen = BarrierWaits(hosts_of(group))
        seen.add(measure(group, case_of("all_reduce", group.size), Effort(iterations=7, warmup=0)).waits_us)
        return [encode(one) for one in seen.summary()]

    found = {}
    for name in ("barrier", "all_reduce"):
        with altered(name, late):
            found[name] = arrivals()
    found["nobody"] = arrivals()
    return found


def share_memory(group):
    """Say which buffers are the same memory, by where they are."""
    found = {}
    for collective, in_place in product(collectives_of(group), (False, True)):
        case = case_of(collective.value, group.size, in_place=in_place)
        (one,) = make_sets(group, case)
        distance = one.source.data_ptr() - one.target.data_ptr()
        overlap = -one.source.nbytes < distance < one.target.nbytes
        found[f"{collective.value} {in_place}"] = [case.in_place, overlap, distance if overlap else None]
    return found


def sweep(group, settings):
    log, reported = ResultLog(settings, members_of(group)), []
    run_sweep(group, log, lambda *news: reported.append(news))
    return {
        "results": [encode(one) for one in log.results], "left_out": [encode(one) for one in log.left_out],
        "wrong": [encode(one) for one in log.wrong], "arrivals": [encode(one) for one in log.arrivals],
        "notes": log.notes, "reported": reported, "inside": group.tracker.inside, "phase": group.tracker.phase,
    }  # fmt: skip


def sweep_everything(group):
    """Sweep all collectives with few calls, then with too little time, then with sizes that no machine has."""
    few = replace(
        SMALL_BOTH, collectives=tuple(Collective), min_size_bytes=1024, max_size_bytes=4096, factor=4, iterations=3
    )
    short = replace(SMALL, min_size_bytes=1024, max_size_bytes=2**32, factor=4, budget_s=0.5)
    huge = replace(SMALL, min_size_bytes=1024, max_size_bytes=2**45, factor=2**35, iterations=2)
    seen = {name: sweep(group, settings) for name, settings in (("few", few), ("short", short), ("huge", huge))}
    if group.size > 1:
        seen["in place"] = sweep(group, replace(few, in_place=True, budget_s=60.0))
        seen["altered"] = sweep_altered(group)
    return seen


def sweep_altered(group):
    """Alter one element on rank 1 at one size of the sweep."""

    def call(real, tensor, *args, **kwargs):
        work = real(tensor, *args, **kwargs)
        if dist.get_rank() == 1 and tensor.nbytes == 2048:
            tensor[100] -= 1
        return work

    with altered("all_reduce", call):
        return sweep(group, replace(SMALL_BOTH, min_size_bytes=1024, max_size_bytes=4096, iterations=2))


def raise_on_one(group):
    """Rank 1's call raises: so does the sweep there, and on the rank that is left alone once rank 1 is gone."""

    def call(real, *args, **kwargs):
        if dist.get_rank() == 1:
            raise RuntimeError("no route to host")
        return real(*args, **kwargs)

    try:
        with altered("all_reduce", call):
            sweep(group, SMALL)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


JOBS: dict[str, Callable[[RankGroup], Any]] = {
    "check": lambda group: {
        "everything": check_everything(group),
        "seeded": seed_wrong_data(group) if group.size == 3 else {},
    },
    "measure": lambda group: {
        "measured": measure_everything(group), "agreed": agree_on_calls(group),
        "late": come_late(group) if group.size == 3 else {}, "memory": share_memory(group),
    },
    "sweep": sweep_everything,
    "raise": raise_on_one,
}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))


# Runs a function of `rank_jobs` in real Gloo ranks on this machine.


ROOT = Path(__file__).parents[4]


def run_ranks(job, size, folder):
    """Return what the job returned on each rank."""
    module = "tests.unit.probes.bandwidth.rank_jobs"
    ranks = [
        forking.start("-m", module, job, rank, size, folder, cwd=ROOT, env=clean_environment()) for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=forking.LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
