"""One rank of a bench from start to end: meet, agree, read the machine, connect, measure, report, leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.bandwidth import describe_shared_gpus
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.probes.agreement import propose, run_agreed
from ddpdoctor.probes.bandwidth.cases import check_possible
from ddpdoctor.probes.bandwidth.log import ResultLog
from ddpdoctor.probes.bandwidth.nccl_log import NcclLogs
from ddpdoctor.probes.bandwidth.tracker import Tracker
from ddpdoctor.probes.bandwidth.watch import Watched, Watcher
from ddpdoctor.probes.ranks import ABOVE_OURS, meet_ranks, unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import Bench, BenchSettings, Member
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.ranks import Ranks

LEAST_GROUP_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """What the command line hands to a rank."""

    launch: Launch
    env: Mapping[str, str]
    settings: BenchSettings
    """The backend may be ``AUTO``."""
    timeout_s: float
    """How long to wait for the slowest rank."""
    read_machines: Callable[[Conversation], None]
    """Called on every rank while nothing else runs. Raises ``StoreError``."""
    report: Callable[[Bench], int]
    """Called on the rank that reports: judges and shows a bench, and returns the exit status."""
    show_error: Callable[[UserError], None]
    progress: Callable[[str, float, float | None], None]


def run_rank(job: BenchTask) -> int:
    """Take part in a bench and return the exit status, which is the same on all ranks.

    Raises ``UserError`` if the ranks cannot meet.
    """
    try:
        with meet_ranks(job.launch, job.env, meet_limit_s=job.timeout_s, limit_s=job.timeout_s) as ranks:
            return _take_part(job, ranks)
    except StoreError as error:
        raise _unreachable(job.launch, error) from error


def _take_part(job: BenchTask, ranks: Ranks) -> int:
    own = propose(job.launch, job.env, job.settings)

    def run(backend: str, members: tuple[Member, ...]) -> int:
        return _run(job, ranks, ResultLog(replace(job.settings, backend=backend), members))

    def check(backend: str) -> None:
        check_possible(replace(job.settings, backend=backend))

    return run_agreed(ranks, own, job.timeout_s, job.show_error, run, check=check)


def _run(job: BenchTask, ranks: Ranks, log: ResultLog) -> int:
    tracker, nccl_logs = Tracker(), NcclLogs(log.settings.backend)
    with Watcher(_watched(job, ranks.conversation, log, tracker, nccl_logs)):
        _read_machines(job, ranks.conversation, log)
        _measure(job, ranks, log, tracker, nccl_logs)
    return ranks.end(lambda: job.report(log.bench()))


def _watched(
    job: BenchTask, conversation: Conversation, log: ResultLog, tracker: Tracker, nccl_logs: NcclLogs
) -> Watched:
    return Watched(
        rank=job.launch.rank,
        members=log.members,
        tracker=tracker,
        conversation=conversation,
        hang_timeout_s=log.settings.hang_timeout_s,
        finish=lambda stop: job.report(log.bench(stop)),
        clean_up=nccl_logs.close,
    )


def _read_machines(job: BenchTask, conversation: Conversation, log: ResultLog) -> None:
    try:
        job.read_machines(conversation)
    except StoreError as error:
        log.note(f"the machines could not be read: {error}")


def _measure(job: BenchTask, ranks: Ranks, log: ResultLog, tracker: Tracker, nccl_logs: NcclLogs) -> None:
    import torch
    from torch import distributed

    from ddpdoctor.probes.bandwidth.group import RankGroup
    from ddpdoctor.probes.bandwidth.localize import run_nodes, run_pairs
    from ddpdoctor.probes.bandwidth.sweep import run_sweep

    member, hosts = log.members[job.launch.rank], [one.host for one in log.members]
    everybody = tuple(range(len(hosts)))
    if shared := describe_shared_gpus(log.members):
        log.note(shared)
    tracker.at("connect", allowance_s=job.timeout_s)
    with nccl_logs:
        tracker.enter("init_process_group", everybody)
        group_limit_s = max(LEAST_GROUP_LIMIT_S, ABOVE_OURS * log.settings.hang_timeout_s)
        store = ranks.open_process_group(log.settings.backend, member.device, job.timeout_s, group_limit_s)
        tracker.leave()
        group = RankGroup(None, everybody, torch.device(member.device), log.settings.backend, tracker)
        run_sweep(group, log.settings, hosts, log, job.progress)
        if log.settings.pairs:
            run_pairs(group, log.settings, hosts, log, job.progress)
        if log.settings.by_node:
            run_nodes(group, log.settings, hosts, log, job.progress)
        tracker.at("end")
        log.nccl_logs = nccl_logs.share(group, ranks.conversation)
    distributed.destroy_process_group()
    del store


def _unreachable(launch: Launch, error: StoreError) -> UserError:
    place = f"{launch.hosts[0]}:{launch.port}"
    if launch.rank == 0:
        return UserError(
            f"the ranks cannot meet at {place}: {error}",
            help="Choose another MASTER_PORT.",
            status=ExitStatus.INCONCLUSIVE,
        )
    return unreachable(launch, error)
