"""One rank of a bench from start to end: join, agree, read the machine, connect, measure, report, leave."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import distributed

from ddpdoctor.collect.limits import read_machine, read_memory_limit
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.bandwidth import Bench, Collective, LeftOut, NcclLog, describe_shared_gpus
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.words import format_size
from ddpdoctor.probes.bandwidth import collectives, plan
from ddpdoctor.probes.bandwidth.localize import run_nodes, run_pairs
from ddpdoctor.probes.bandwidth.timing import BarrierWaits, Effort, ResultLog, measure, most_calls
from ddpdoctor.probes.bandwidth.watch import Watcher
from ddpdoctor.probes.ranks import ABOVE_OURS, meet_ranks, propose, run_agreed, unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import BenchSettings, Case, Member
    from ddpdoctor.model.facts import Space
    from ddpdoctor.model.launch import Launch

    Progress = Callable[[str, float, float | None], None]

LEAST_GROUP_LIMIT_S = 120.0
SLOWEST_GB_S = 0.01  # our choice: the slowest speed that a first call is given time for, about a 100 Mbit/s network
USABLE_SHARE = 0.8  # Our choice: the rest is for other processes. A machine short of memory would measure its swap.
UNKNOWN_BYTES = 2**60  # more than any machine has, if neither the machine nor a control group says what is free
NCCL_FILE = "nccl.%h.%p.log"  # NCCL replaces %h by the host's name and %p by the process id
MOST_LOG_BYTES = 16 * 2**20  # our choice: even the log of a rank among thousands is smaller than this
NCCL_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
# A channel to another rank: "[send] via NET/IB/3/GDRDMA", where 3 is the card, or "NET/IB/3(5)" through rank 5.
NCCL_WAY = re.compile(
    r"NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\] (?:\[(?:send|receive)\] )?via "
    r"(?:(?P<near>P2P/direct pointer|P2P/\w+|SHM)|(?P<net>(?:NET|COLLNET)/[^/\n]+)/\d+(?:\(\d+\))?(?P<gdr>/GDRDMA)?)"
)
NCCL_CARDS = re.compile(r"NCCL INFO NET/IB : Using (.*?)(?:; OOB.*)?$", re.MULTILINE)
# A port in "[0]mlx5_0:1/IB", since 2.30 in "[0]mlx5_0:1", and in "[0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}" if NCCL
# merges two ports.
NCCL_CARD = re.compile(r"([\w.-]+:\d+)(?=[/\s,}]|$)")
NCCL_SOCKETS = re.compile(r"NCCL INFO NET/Socket : Using (.*)$", re.MULTILINE)
NCCL_INTERFACE = re.compile(r"\[\d+\]([^\s:]+):")
MULTICAST = re.compile(r"NCCL INFO NVLS multicast support is (not )?available")
NVLS_CHANNELS = re.compile(r"NCCL INFO .*?(\d+) nvls channels")


def run_rank(  # noqa: PLR0913 - what a bench is for, by names
    launch: Launch,
    env: Mapping[str, str],
    settings: BenchSettings,
    timeout_s: float,
    *,
    read_machines: Callable[[Conversation], None],
    report: Callable[[Bench], int],
    show_error: Callable[[UserError], None],
    progress: Progress,
) -> int:
    """Take part in a bench and return the exit status, which is the same on all ranks.

    The backend may be ``AUTO``. ``timeout_s`` is how long to wait for the slowest rank. ``read_machines`` is called on
    every rank while nothing else runs, and may raise ``StoreError``. ``report`` is called on the rank that reports:
    it judges and shows a bench, and returns the exit status. Raises ``UserError`` if the ranks cannot connect.
    """

    def check(backend: str) -> None:
        plan.check_possible(replace(settings, backend=backend))

    def run(backend: str, members: tuple[Member, ...]) -> int:
        log, tracker = ResultLog(replace(settings, backend=backend), members), collectives.Tracker()
        nccl_logs, everybody, device = NcclLogs(backend), tuple(range(len(members))), members[launch.rank].device
        watcher = Watcher(
            rank=launch.rank, members=members, tracker=tracker, conversation=ranks.conversation,
            hang_timeout_s=settings.hang_timeout_s, finish=lambda stop: report(log.bench(stop)),
            clean_up=nccl_logs.close,
        )  # fmt: skip
        with watcher:
            try:
                read_machines(ranks.conversation)
            except StoreError as error:
                log.note(f"the machines could not be read: {error}")
            if shared := describe_shared_gpus(members):
                log.note(shared)
            tracker.at("connect", allowance_s=timeout_s)
            with nccl_logs:
                tracker.enter("init_process_group", everybody)
                group_limit_s = max(LEAST_GROUP_LIMIT_S, ABOVE_OURS * settings.hang_timeout_s)
                store = ranks.open_process_group(backend, device, timeout_s, group_limit_s)
                tracker.leave()
                group = collectives.RankGroup(None, everybody, torch.device(device), backend, tracker)
                run_sweep(group, log, progress)
                if settings.pairs:
                    run_pairs(group, log, progress)
                if settings.by_node:
                    run_nodes(group, log, progress)
                tracker.at("end")
                log.nccl_logs = nccl_logs.share(group, ranks.conversation)
            distributed.destroy_process_group()
            del store
        return ranks.end(lambda: report(log.bench()))

    try:
        with meet_ranks(launch, env, meet_limit_s=timeout_s, limit_s=timeout_s) as ranks:
            return run_agreed(ranks, propose(launch, env, settings), timeout_s, show_error, run, check)
    except StoreError as error:
        if launch.rank != 0:
            raise unreachable(launch, error) from error
        problem, advice = f"the ranks cannot connect at {launch.hosts[0]}:{launch.port}", "Choose another MASTER_PORT."
        raise UserError(f"{problem}: {error}", help=advice, status=ExitStatus.INCONCLUSIVE) from error


def run_sweep(group: collectives.RankGroup, log: ResultLog, progress: Progress) -> None:
    """Check and measure all cases of ``log.settings`` within its budget, by all ranks, into ``log`` on each.

    Cases without enough time or memory are listed in ``log.left_out``. torch's errors propagate.
    """
    settings = log.settings
    log.left_out.extend(plan.list_impossible(settings, group.size))
    # Note the collectives that --in-place does not apply to
    other = [collective.value for collective in settings.collectives if not plan.is_in_place(collective, asked=True)]
    if settings.in_place and other:
        log.note(f"{' and '.join(other)}: measured out of place, because an in-place form does not exist")
    sweep = _Sweep(group, log, progress)
    steps = list_steps(plan.list_cases(settings, group.size))
    while steps:
        steps = sweep.take(steps)


def list_steps(cases: Sequence[Case]) -> list[plan.Step]:
    groups = groupby(cases, key=lambda case: (case.collective, case.dtype, case.size_bytes))
    return [plan.Step(cases=tuple(members)) for _, members in groups]


class _Sweep:
    def __init__(self, group: collectives.RankGroup, log: ResultLog, progress: Progress) -> None:
        self._group, self._log, self._settings, self._progress = group, log, log.settings, progress
        self._forecast = plan.Forecast(log.settings.backend, log.settings.iterations)
        self._arrivals = BarrierWaits([log.hosts[rank] for rank in group.ranks])
        self._began_s = time.monotonic()
        self._ends_s: float | None = None  # when the sweep is expected to end

    def take(self, steps: list[plan.Step]) -> list[plan.Step]:
        """Measure the first step, or leave out the rest of its curve. Return the remaining steps."""
        first, group, log = steps[0], self._group, self._log
        elapsed_s = group.agree(time.monotonic() - self._began_s)
        slot = plan.share_out(steps, self._forecast, self._settings.budget_s - elapsed_s)
        # The room of the rank that has least. No buffers are held here.
        own_bytes = read_free_bytes(group.device) / count_takers(log.members[group.ranks[group.index]], log.members)
        free_bytes = [row[0] for row in group.gather([own_bytes])]
        least, most = min(range(group.size), key=free_bytes.__getitem__), most_calls(self._effort())
        needed = needed_bytes(first.cases[0], group, most)
        reason = find_lack(needed, int(free_bytes[least]), group.ranks[least])
        if slot is None or reason:
            sizes, (what, dtype) = tuple(step.size_bytes for step in steps if step.curve == first.curve), first.curve
            reason = reason or f"the budget of {self._settings.budget_s:g} s is too short"
            log.left_out.append(LeftOut(collective=what, dtype=dtype, mode=None, sizes_bytes=sizes, reason=reason))
            return [step for step in steps if step.curve != first.curve]
        self._ends_s = None if slot.left_s is None else time.monotonic() + slot.left_s
        began_s = time.monotonic()
        self._come_to("check", first, self._longest_s(first))
        sets = collectives.make_sets(group, first.cases[0], most)
        wrong, first_us = collectives.check(group, first.cases[0], sets[0], log.hosts)
        log.wrong.extend(wrong)
        timed_s = 0.0
        for case in first.cases:
            self._come_to("measure", first, max(slot.seconds[case.mode], self._longest_s(first)))
            measured = measure(group, case, self._effort(slot.seconds[case.mode]), sets)
            result = replace(measured.measurement, wrong=sum(fault.count for fault in wrong))
            if case == first.cases[0]:
                # The check made the first call, which opens connections and warms up.
                result = replace(result, first_us=first_us)
            log.results.append(result)
            self._arrivals.add(measured.waits_us)
            if measured.note:
                log.note(f"{name_step(first)}: {measured.note}")
            self._forecast.see(first, case.mode, group.agree(measured.timed_s / result.iterations))
            timed_s += measured.timed_s
        self._forecast.see(first, None, group.agree(time.monotonic() - began_s - timed_s))
        log.arrivals = self._arrivals.summary()
        return steps[1:]

    def _come_to(self, phase: str, step: plan.Step, allowance_s: float) -> None:
        self._group.tracker.at(phase, name_step(step), allowance_s=allowance_s)
        now_s = time.monotonic()
        elapsed_s = now_s - self._began_s
        left_s = None if self._ends_s is None else max(0.0, self._ends_s - now_s)
        whole_s = max(elapsed_s, self._settings.budget_s) if left_s is None else elapsed_s + left_s
        self._progress(name_step(step), elapsed_s / whole_s if whole_s else 0.0, left_s)

    def _longest_s(self, step: plan.Step) -> float:
        """Return how long a call may take before it looks like a hang."""
        if self._forecast.knows(step):
            return self._forecast.predict(step)
        return step.size_bytes / (SLOWEST_GB_S * 1e9)

    def _effort(self, seconds: float = 0.0) -> Effort:
        asked = self._settings
        return Effort(warmup=asked.warmup, iterations=asked.iterations, seconds=seconds, cold=asked.cold)


def name_step(step: plan.Step) -> str:
    collective, dtype = step.curve
    return f"{collective.value} {dtype} {format_size(step.size_bytes)}"


def find_lack(needed_bytes: int, free_bytes: int, rank: int) -> str:
    """Return why a case cannot be measured with this much free memory, as a phrase, or "" if it can."""
    if needed_bytes <= free_bytes * USABLE_SHARE:
        return ""
    return f"needs {_readable(needed_bytes)} of {_readable(free_bytes)} free on rank {rank}"


def _readable(size_bytes: int) -> str:
    """Return a size in whole GiB, or below 10 GiB in whole MiB, so that rounding loses less than a tenth."""
    unit = 2**30 if size_bytes >= 10 * 2**30 else 2**20
    return format_size(round(size_bytes / unit) * unit)


def count_takers(own: Member, members: Sequence[Member]) -> int:
    """Return how many ranks share a rank's memory: those on its GPU, or without GPUs those on its host."""
    if own.device != "cpu":
        return own.gpu_ranks
    return sum(member.host == own.host for member in members)


def needed_bytes(case: Case, group: collectives.RankGroup, most: int = 1) -> int:
    """Return the memory of a rank for a case: its buffers (``most`` is as in ``make_sets``) and working memory."""
    # The correctness pass needs a little. Gloo gathers into a copy of the output, and reduces a copy of
    # reduce_scatter's input (seen as growth of the process with torch 2.13). The other collectives take next to
    # nothing.
    copies: bool = group.backend == "gloo" and case.collective in {Collective.ALL_GATHER, Collective.REDUCE_SCATTER}
    sets_bytes = collectives.count_sets(group.device, case, group.size, most) * collectives.set_bytes(case, group.size)
    return sets_bytes + copies * case.size_bytes + collectives.working_bytes(case, group)


def read_free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of this machine within the limits of this process's control groups."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch caches the memory of freed tensors and reuses it for new ones.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return left_of(read_machine(), read_memory_limit())


def left_of(*spaces: Space | None) -> int:
    return min([UNKNOWN_BYTES, *(max(0, space.limit_bytes - space.used_bytes) for space in spaces if space)])


class NcclLogs:
    """A context manager around the life of the process group. With another backend than NCCL, it does nothing."""

    def __init__(self, backend: str) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        if backend == "nccl":
            self._folder = TemporaryDirectory(prefix="ddpdoctor-nccl-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        if self._folder is not None:
            os.environ.update(nccl_log_environment(os.environ, self._folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. It does no harm if NCCL is still writing."""
        if self._folder is not None:
            self._folder.cleanup()

    def share(self, group: collectives.RankGroup, conversation: Conversation) -> tuple[NcclLog, ...]:
        """Return the logs of all ranks on rank 0, and the own one on the others. Raises ``StoreError``."""
        if self._folder is None:
            return ()
        rank = group.ranks[group.index]
        own = read_nccl_log(self._folder.name, rank)
        if own is not None:
            conversation.send(f"nccl/{rank}", own)
        group.barrier()
        if rank != 0:
            return () if own is None else (own,)
        found = (conversation.get(NcclLog, f"nccl/{other}", f"rank {other}") for other in group.ranks)
        return tuple(log for log in found if log is not None)


def nccl_log_environment(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables that make NCCL log to ``folder``, or {} if the user already has NCCL log."""
    # They must be set before the first communicator is created. The user loses nothing: without NCCL_DEBUG, NCCL writes
    # nothing, and torch's errors repeat its last warning.
    if env.get("NCCL_DEBUG") or env.get("NCCL_DEBUG_FILE"):
        return {}
    file = f"{folder.replace('%', '%%')}/{NCCL_FILE}"
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": file}


def read_nccl_log(folder: str, rank: int) -> NcclLog | None:
    """Return what NCCL has logged to the folder so far, or None if it has not logged its network."""
    texts = []
    for path in sorted(Path(folder).glob("nccl.*.log")):
        with suppress(OSError), path.open("rb") as file:
            texts.append(file.read(MOST_LOG_BYTES).decode(errors="replace"))
    return parse_nccl_log("\n".join(texts), rank)


def parse_nccl_log(text: str, rank: int) -> NcclLog | None:
    """Return a log's facts about all communicators together, or None if no line names the network."""
    networks = NCCL_NETWORK.findall(text)
    if not networks:
        return None
    # The ports of RDMA cards, or the interfaces of TCP. Other network plugins log neither.
    lines, each = (NCCL_SOCKETS, NCCL_INTERFACE) if networks[0] == "Socket" else (NCCL_CARDS, NCCL_CARD)
    interfaces = chain.from_iterable(each.findall(line) for line in lines.findall(text))
    ways = Counter(match["near"] or match["net"] + (match["gdr"] or "") for match in NCCL_WAY.finditer(text))
    return NcclLog(
        rank=rank,
        network=networks[0],
        interfaces=tuple(dict.fromkeys(interfaces)),
        transports=dict(ways),
        # None if NCCL did not look for NVLink SHARP, as with two GPUs. One communicator with its channels is enough,
        # because a communicator of two ranks never has them.
        nvls=any(map(int, NVLS_CHANNELS.findall(text))) if MULTICAST.search(text) else None,
    )
