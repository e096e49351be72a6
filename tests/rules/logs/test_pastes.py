"""Complete logs of jobs whose culprit is known, and what people paste of them: some ranks' lines, and cut."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.diagnose.logs import analyze
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Finding, Severity, now
from ddpdoctor.report.text import render_text, render_verdict
from tests.flight_dumps import Recorder, write
from tests.log_texts import (
    DEFAULT,
    agent,
    closed_by,
    dump_signal,
    gloo_timeout,
    nccl2_timeout,
    old_watchdog,
    raised,
    steps,
    table,
    text,
    watchdog,
    work,
)

Lines = list[tuple[int | None, str]]
"""Each line with the rank that wrote it; None: the launcher."""


@dataclass
class Job:
    """What a job left, and the truth about it."""

    world: int
    culprits: frozenset[int]
    """Empty: no rank is at fault."""
    ranks: dict[int, list[str]] = field(default_factory=dict)
    """The lines of each rank from the failure on."""
    head: Lines = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    """The launcher's last lines."""
    before: Lines = field(default_factory=list)
    """An earlier run in the same log."""
    earlier: frozenset[int] = frozenset()
    """Whose fault that was."""
    dumps: dict[int, Recorder] = field(default_factory=dict)

    def lines(self, dice: random.Random, kept: Iterable[int], *, launcher: bool) -> Lines:
        """Return what was written of some ranks, in the order of one pipe."""
        kept = set(kept)
        if dice.random() < 0.5:
            turns = list(zip_longest(*([(rank, line) for line in lines] for rank, lines in self.ranks.items())))
            body = [one for turn in turns for one in turn if one is not None]
        else:
            order = dice.sample(sorted(self.ranks), len(self.ranks))
            body = [(rank, line) for rank in order for line in self.ranks[rank]]
        whole = [*self.before, *self.head, *body, *((None, line) for line in self.tail)]
        return [one for one in whole if (launcher if one[0] is None else one[0] in kept)]


def options(rank: int, world: int, group: str = "PG ID 0 PG GUID 0", name: str = "0", place: int | None = None) -> str:
    return (
        f"[rank{rank}]:[I309 14:00:00.019022791 ProcessGroupNCCL.cpp:991] [{group} Rank {rank if place is None else place}] "
        f"ProcessGroupNCCL initialization options: size: {world}, global rank: {rank}, TIMEOUT(ms): 600000, "
        f"USE_HIGH_PRIORITY_STREAM: 0, SPLIT_FROM: 0, SPLIT_COLOR: 0, PG Name: {name}"
    )


def _start(job: Job, dice: random.Random) -> None:
    """Write how it began: who there is, by torch or not at all, and steps, with labels of ranks or without."""
    if dice.random() < 0.5:
        job.head += [(rank, options(rank, job.world)) for rank in range(job.world)]
    if dice.random() < 0.5:
        job.head += [(rank, f"[rank{rank}]: {line}") for line in steps(6) for rank in range(job.world)]
    else:
        job.head += [(None, line) for line in steps(12)]


def _own_signal(rank: int, enqueued: int, completed: int) -> list[str]:
    return [
        line.replace("from  rank 0", "from this local rank") for line in dump_signal(rank, 0, enqueued, completed)[1:]
    ]


def behind(dice: random.Random) -> Job:
    """One rank, or two, did not come: told to dump, silent, or with a watchdog that is stuck."""
    world = dice.choice([4, 8, 8, 16])
    late = frozenset(dice.sample(range(world), dice.choice([1, 1, 2])))
    job = Job(world, late)
    _start(job, dice)
    torch, number = dice.choice(["2.2", "2.3", "2.4", "2.6", "2.6"]), dice.randint(40, 4000)
    call = work(number, *dice.choice([("ALLREDUCE", 4096), ("_ALLGATHER_BASE", 1000, 1000 * world)]))
    source = next(rank for rank in range(world) if rank not in late)
    told = torch == "2.6" and dice.random() < 0.6
    stuck = dice.random() < 0.3
    for rank in range(world):
        if rank not in late:
            job.ranks[rank] = old_watchdog(rank, call) if torch == "2.2" else watchdog(rank, call, torch=torch)
            if stuck and torch == "2.6" and rank == (source + 1) % world:
                job.ranks[rank] = _stuck(rank)
        else:
            job.ranks[rank] = dump_signal(rank, source, number - 1, number - 1) if told else []
    return job


def _stuck(rank: int) -> list[str]:
    return [
        f"[rank{rank}]:[E309 14:20:11.019022791 ProcessGroupNCCL.cpp:1870] [{DEFAULT} Rank {rank}] ProcessGroupNCCL's watchdog "
        "got stuck for 480 seconds without making progress in monitoring enqueued collectives."
    ]


def all_inside(dice: random.Random) -> Job:
    """All wait in one collective: the network."""
    world = dice.choice([2, 4, 8])
    job = Job(world, frozenset())
    _start(job, dice)
    number = dice.randint(1, 900)
    torch = dice.choice(["2.2", "2.4", "2.6"])
    for rank in range(world):
        call = work(number)
        job.ranks[rank] = old_watchdog(rank, call) if torch == "2.2" else watchdog(rank, call, torch=torch)
        if torch == "2.6" and dice.random() < 0.3:
            job.ranks[rank] = dump_signal(rank, 0, number, number - 1) if dice.random() < 0.5 else _stuck(rank)
    return job


def other_call(dice: random.Random) -> Job:
    """Some ranks, fewer than half, call something else, or skip a call."""
    world = dice.choice([4, 8, 8])
    odd = frozenset(dice.sample(range(world), dice.choice([1, 1, world // 2 - 1])))
    job = Job(world, odd)
    _start(job, dice)
    number = dice.randint(40, 900)
    other = dice.choice([work(number, "BROADCAST", 64), work(number, numel=77), work(number + 1, numel=5)])
    for rank in range(world):
        job.ranks[rank] = watchdog(rank, other if rank in odd else work(number))
    return job


def groups(dice: random.Random) -> Job:
    """Tensor and data parallel groups: one rank hangs; its tensor group waits for it, the others for their partners."""
    size, copies = dice.choice([(2, 4), (4, 2), (4, 4), (2, 2)])
    world = size * copies
    late = dice.randrange(world)
    job = Job(world, frozenset({late}))
    _start(job, dice)
    number, other = dice.randint(400, 9000), dice.randint(3, 300)
    guid = dice.choice([False, True])
    default = dice.choice([-1, 5])
    for rank in range(world):
        tensor, data = rank // size, rank % size
        tp = f"PG ID 1 PG GUID {1 + tensor if guid else 1}(tp)"
        dp = f"PG ID 2 PG GUID {20 + data if guid else 9}(dp)"
        if rank == late:
            told = dice.random() < 0.5
            job.ranks[rank] = dump_signal(rank, (late + 1) % world, default, default) if told else []
        elif tensor == late // size:
            lines = watchdog(rank, work(number), group=tp, group_rank=data, spoken=data)
            job.ranks[rank] = [*lines[:3], *_own_signal(rank, default, default), *lines[3:]]
        else:
            lines = watchdog(
                rank,
                work(other, "_REDUCE_SCATTER_BASE", 4096, 4096 // copies),
                group=dp,
                group_rank=tensor,
                spoken=data,
            )
            job.ranks[rank] = [*lines[:3], *_own_signal(rank, default, default), *lines[3:]]
    return job


def pipeline(dice: random.Random) -> Job:
    """Stages of a pipeline pass on; one hangs, so that its neighbors wait in sends and receives."""
    world = dice.choice([4, 8])
    late = dice.randrange(world)
    job = Job(world, frozenset({late}))
    _start(job, dice)
    for rank in range(world):
        if rank == late:
            job.ranks[rank] = dump_signal(rank, (late + 1) % world, 3, 3) if dice.random() < 0.5 else []
        else:
            call = work(dice.randint(30, 60), "RECV" if rank > late else "SEND", 8192)
            job.ranks[rank] = watchdog(rank, call, group="PG ID 3 PG GUID 12(pp)")
    return job


def desync(dice: random.Random) -> Job:
    """torch's desync report names the late ones."""
    job = behind(dice)
    number, waiters = 52, sorted(set(range(job.world)) - job.culprits)
    late = ", ".join(map(str, sorted(job.culprits)))
    for rank in range(job.world):
        job.ranks[rank] = [] if rank in job.culprits else watchdog(rank, work(number))
    job.ranks[waiters[0]] += [
        f"\t - [{waiters[0]}] Timeout at collective: ALLREDUCE, #{number}",
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        f"\t   - [{late}] finished collective #{number - 1}, but didn't join collective #{number} (count from 1)",
    ]
    return job


def crash(dice: random.Random) -> Job:
    """One rank raises; the others lose it, or run into their limit. torchrun has its table."""
    world = dice.choice([4, 8])
    bad = dice.randrange(world)
    job = Job(world, frozenset({bad}))
    _start(job, dice)
    gloo = dice.random() < 0.5
    killed = dice.random() < 0.3
    for rank in range(world):
        if rank == bad:
            job.ranks[rank] = [] if killed else raised("ValueError: math domain error", rank)
        else:
            job.ranks[rank] = closed_by(rank, f"10.0.0.{bad}") if gloo else watchdog(rank, work(88))
    job.tail = [
        *agent(-9 if killed else 1, bad, 5000 + bad, [5000 + rank for rank in range(world) if rank != bad]),
        *table(
            *((rank, -15, 5000 + rank, "") for rank in range(world) if rank != bad),
            (bad, -9 if killed else 1, 5000 + bad, ""),
        ),
    ]
    return job


def victims_table(dice: random.Random) -> Job:
    """One rank hangs in its own code; the others abort at their limit, and the launcher stops it."""
    job = behind(dice)
    for rank in job.ranks:
        job.ranks[rank] = [] if rank in job.culprits else watchdog(rank, work(311))
    first = next(rank for rank in range(job.world) if rank not in job.culprits)
    job.tail = [
        *agent(-6, first, 7000 + first, [7000 + rank for rank in sorted(job.culprits)]),
        *table(
            *(
                (rank, -15 if rank in job.culprits else -6, 7000 + rank, "")
                for rank in range(job.world)
                if rank != first
            ),
            (first, -6, 7000 + first, ""),
            local=job.world,
        ),
    ]
    return job


def groups_without_names(dice: random.Random) -> Job:
    """torch 2.2 writes neither the group nor the global rank: "[Rank 1]" stands for a rank of each group."""
    size, copies = dice.choice([(2, 4), (4, 2), (4, 4)])
    late = dice.randrange(size * copies)
    job = Job(size * copies, frozenset({late}))
    number, near = dice.randint(40, 900), dice.randint(0, 3)
    for rank in range(job.world):
        if rank != late:
            same = rank // size == late // size
            lines = old_watchdog(rank % size if same else rank // size, work(number if same else number + near))
            job.ranks[rank] = lines
    job.head = [(None, line) for line in steps(6)]
    return job


def one_node(dice: random.Random) -> Job:
    """The log of one node of several, with all that its ranks wrote: the late rank is on another node."""
    job = behind(dice)
    half = job.world // 2
    job.ranks = {rank: lines for rank, lines in job.ranks.items() if rank >= half}
    job.head = [(rank, line) for rank, line in job.head if rank is None or rank >= half]
    return job


def lost_peers(dice: random.Random) -> Job:
    """One rank is gone without a word; the others lose their connections, on one machine."""
    world = dice.choice([2, 4, 8])
    late = dice.randrange(world)
    job = Job(world, frozenset({late}))
    _start(job, dice)
    job.ranks = {rank: [] if rank == late else closed_by(rank) for rank in range(world)}
    return job


def numberless(dice: random.Random) -> Job:
    """nccl2's watchdog and Gloo say neither number nor operation."""
    world = dice.choice([4, 8])
    late = dice.randrange(world)
    job = Job(world, frozenset({late}))
    _start(job, dice)
    write = dice.choice([nccl2_timeout, gloo_timeout])
    job.ranks = {rank: [] if rank == late else write(rank) for rank in range(world)}
    return job


def restarted(dice: random.Random) -> Job:
    """An earlier run of the same log had another culprit."""
    first, job = crash(dice), behind(dice)
    job.earlier = first.culprits
    job.before = [
        (None, "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"),
        *first.lines(dice, range(first.world), launcher=True),
        (None, "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"),
    ]
    return job


def dumps(dice: random.Random) -> Job:
    """The flight recorders of a job with one rank behind, or that calls something else."""
    world = dice.choice([4, 8])
    late = dice.randrange(world)
    job = Job(world, frozenset({late}))
    differs = dice.random() < 0.4
    for rank in range(world):
        one = Recorder(rank, world)
        for _ in range(5):
            one.call()
        if rank != late:
            one.call(state="scheduled")
        elif differs:
            one.call("broadcast", (7,), state="scheduled")
        job.dumps[rank] = one
    return job


JOBS: tuple[Callable[[random.Random], Job], ...] = (
    behind, all_inside, other_call, groups, pipeline, desync, crash, victims_table, numberless, restarted, dumps,
    groups_without_names, one_node, lost_peers,
)  # fmt: skip


def paste(make: Callable[[random.Random], Job], seed: int, folder: Path) -> tuple[Job, bool]:
    """Write what somebody pastes of a job into a folder; return the job, and whether it is all of it."""
    dice = random.Random(f"{make.__name__} {seed}")
    job = make(dice)
    ranks = sorted(dice.sample(range(job.world), dice.randint(1, job.world))) if seed % 4 else list(range(job.world))
    if job.dumps:
        for rank in ranks:
            write(folder, rank, job.dumps[rank].body(), "comm_lib_trace_rank_")
        return job, len(ranks) == job.world
    launcher = dice.random() < 0.7
    lines = job.lines(dice, ranks, launcher=launcher)
    cut = dice.choice(["", "", "head", "tail", "middle"]) if seed % 4 else ""
    if cut and lines:
        first, last = sorted(dice.choices(range(len(lines)), k=2))
        marker: Lines = [(None, "...")] if dice.random() < 0.5 else []
        lines = {"head": lines[first:], "tail": lines[:last], "middle": [*lines[:first], *marker, *lines[last:]]}[cut]
    (folder / "job.log").write_text("\n".join(line for _, line in lines) + "\n")
    if cut or not launcher:
        job.culprits |= job.earlier  # nothing need show where the later run begins
    return job, not cut and len(ranks) == job.world and (launcher or not job.before)


def grade(job: Job, verdict: Finding | None) -> str:
    """Return "none", "true", "hedged" or "false": what a verdict is worth."""
    if verdict is None:
        return "none"
    ranks, hedged = set(verdict.ranks), verdict.confidence is Confidence.LOW and " may " in verdict.summary
    if not ranks:
        is_right = not job.culprits or verdict.kind not in {"stuck", "transport"}
        return "none" if is_right else "hedged" if hedged else "false"
    both = verdict.kind == "mismatch" and bool(ranks & job.culprits) and verdict.confidence is not Confidence.HIGH
    return "true" if ranks <= job.culprits or both else "hedged" if hedged else "false"


# Some ranks' lines of a job's log, and cuts of it, never make an innocent rank guilty.


CALL = work(71)
SEEDS = [range(4), pytest.param(range(4, 24), marks=pytest.mark.full)]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds.start}")
@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_no_paste_of_a_log_blames_an_innocent_rank_for_sure(make, seeds: range, tmp_path: Path) -> None:
    grades: Counter[tuple[bool, str]] = Counter()
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        job, is_whole = paste(make, seed, folder)
        try:
            verdict = analyze([str(folder)], ("ddpdoctor", "analyze"), now()).verdict
        except UserError:  # nothing is left in it
            verdict = None
        assert grade(job, verdict) != "false", f"{folder}: {verdict} but it was {sorted(job.culprits)}"
        assert verdict is None or verdict.confidence is not Confidence.LOW or " may " in verdict.summary, verdict
        grades[is_whole, grade(job, verdict)] += 1
    assert grades[False, "hedged"] <= len(seeds) // 4
    assert grades[True, "hedged"] == 0


@pytest.mark.parametrize("form", ["text", "json", "markdown", "html", "junit", "sarif", "github", "an agent's"])
def test_every_format_says_how_sure_it_is(form: str, tmp_path: Path) -> None:
    lines = [
        f"{rank}: {line}" for rank in range(4) for line in [*steps(9), *(old_watchdog(rank, CALL) if rank else [])]
    ]
    (tmp_path / "job.log").write_text(text(lines))
    report = analyze([str(tmp_path)], ("ddpdoctor", "analyze"), now())
    assert report.verdict is not None
    assert (report.verdict.ranks, report.verdict.confidence) == ((0,), Confidence.LOW)
    written = {
        "text": lambda: render_text(report, width=None, color=False, run_dir=None),
        "an agent's": lambda: render_verdict(report),
    }.get(form, lambda: render(report, form, fail_on=Severity.ERROR))()
    assert re.search(r"confidence\W{1,6}low", written)
    assert "rank 0 may not have called" in " ".join(written.split())
