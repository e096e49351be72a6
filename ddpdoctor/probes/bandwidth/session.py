"""One rank of a bench from its start to its end: meet, agree, look at the machine, connect, measure, report, leave."""

from __future__ import annotations

import signal
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.exchange.meeting import Meeting
from ddpdoctor.exchange.store import StoreError, wait_for
from ddpdoctor.model.bandwidth import describe_shared_gpus
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.probes.bandwidth.agreement import Disagreement, Proposal, agree
from ddpdoctor.probes.bandwidth.log import Log
from ddpdoctor.probes.bandwidth.member import name_member, read_gpu, read_member
from ddpdoctor.probes.bandwidth.nccl_logs import NcclLogs
from ddpdoctor.probes.bandwidth.room import Room
from ddpdoctor.probes.bandwidth.tracker import Tracker
from ddpdoctor.probes.bandwidth.watch import Watched, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.bandwidth import Bench, Settings
    from ddpdoctor.model.launch import Launch

REPORT_LIMIT_S = 120.0
"""Ours: how long rank 0 may take to judge and draw; a first import of a plotting library takes several seconds."""
LEAVE_LIMIT_S = 5.0
"""Ours: how long rank 0, which may serve the store, waits for the others to have heard the status."""
LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the command line hands to a rank."""

    launch: Launch
    env: Mapping[str, str]
    settings: Settings
    """The backend may be left open."""
    timeout_s: float
    """For the slowest rank to come."""
    read_machines: Callable[[Meeting, Store], None]
    """Called on every rank, over a store of its own keys, with nothing else running. Raises ``StoreError``."""
    report: Callable[[Bench], int]
    """Judges and shows a bench on the rank that reports; returns the exit status."""
    show_error: Callable[[UserError], None]
    progress: Callable[[str, float, float | None], None]


def run_rank(job: Job) -> int:
    """Take part in a bench; return this rank's exit status, which is the same on all ranks.

    Raises ``UserError`` where the ranks cannot meet.
    """
    try:
        with Meeting(job.launch, job.env) as meeting, closing(meeting.open(job.timeout_s)) as store:
            return _take_part(job, Room(meeting, store), meeting)
    except StoreError as error:
        raise _unreachable(job.launch, error) from error


def run_wrong_rank(
    launch: Launch, env: Mapping[str, str], error: UserError, limit_s: float, show_error: Callable[[UserError], None]
) -> int:
    """Take part only to say that this rank's command line is wrong, as that of all ranks may be; return the status."""
    proposal = Proposal(member=name_member(launch), settings=None, problem=error.message, help=error.help)
    try:
        with Meeting(launch, env) as meeting, closing(meeting.open(limit_s)) as store:
            room = Room(meeting, store)
            try:
                agree(room, proposal, launch.world_size, limit_s)
            except Disagreement as told:
                return _end_disagreed(launch, room, told, show_error)
    except StoreError:
        pass  # nobody hears of it but the user
    show_error(error)
    return error.status


def _take_part(job: Job, room: Room, meeting: Meeting) -> int:
    proposal = Proposal(
        member=read_member(job.launch, job.env),
        settings=job.settings,
        gpu=read_gpu(job.launch.local_rank or 0, job.env),
    )
    try:
        agreed = agree(room, proposal, job.launch.world_size, job.timeout_s)
    except Disagreement as told:
        return _end_disagreed(job.launch, room, told, job.show_error)
    log, tracker = Log(agreed.settings, agreed.members), Tracker()
    nccl_logs = NcclLogs(agreed.settings.backend)
    with Watcher(_watched(job, room, log, tracker, nccl_logs)):
        _read_machines(job, room, meeting, log)
        _measure(job, room, log, tracker, nccl_logs)
    return _leave(job.launch, room, _report(job, room, log))


def _end_disagreed(launch: Launch, room: Room, told: Disagreement, show_error: Callable[[UserError], None]) -> int:
    if launch.rank == 0:
        show_error(told)
    return _leave(launch, room, told.status)


def _watched(job: Job, room: Room, log: Log, tracker: Tracker, nccl_logs: NcclLogs) -> Watched:
    return Watched(
        rank=job.launch.rank,
        members=log.members,
        tracker=tracker,
        room=room,
        hang_timeout_s=log.settings.hang_timeout_s,
        finish=lambda stop: job.report(log.bench(stop)),
        clean_up=nccl_logs.close,
    )


def _read_machines(job: Job, room: Room, meeting: Meeting, log: Log) -> None:
    try:
        job.read_machines(meeting, room)
    except StoreError as error:
        log.note(f"the machines could not be read: {error}")


def _measure(job: Job, room: Room, log: Log, tracker: Tracker, nccl_logs: NcclLogs) -> None:
    import torch
    from torch import distributed

    from ddpdoctor.probes.bandwidth.connect import open_process_group
    from ddpdoctor.probes.bandwidth.group import Group
    from ddpdoctor.probes.bandwidth.localise import run_nodes, run_pairs
    from ddpdoctor.probes.bandwidth.sweep import run_sweep

    member, hosts = log.members[job.launch.rank], [one.host for one in log.members]
    everybody = tuple(range(len(hosts)))
    if shared := describe_shared_gpus(log.members):
        log.note(shared)
    tracker.at("connect", allowance_s=job.timeout_s)
    with nccl_logs:
        tracker.enter("init_process_group", everybody)
        store = open_process_group(job.launch, room, log.settings, member, job.timeout_s)
        tracker.leave()
        group = Group(None, everybody, torch.device(member.device), log.settings.backend, tracker)
        run_sweep(group, log.settings, hosts, log, job.progress)
        if log.settings.pairs:
            run_pairs(group, log.settings, hosts, log, job.progress)
        if log.settings.by_node:
            run_nodes(group, log.settings, hosts, log, job.progress)
        tracker.at("end")
        log.nccl_logs = nccl_logs.share(group, room)
    distributed.destroy_process_group()
    del store


def _report(job: Job, room: Room, log: Log) -> int:
    """Return the status of rank 0's report; the others report nothing, and hear of it."""
    if job.launch.rank != 0:
        return 0
    try:
        return job.report(log.bench())
    except Exception:
        room.set("status", b"%d" % ExitStatus.DEFECT)
        raise


def _leave(launch: Launch, room: Room, status: int) -> int:
    """End together and with one status: torchrun stops those that are left when one ends badly."""
    if launch.rank == 0:
        room.leave()
        room.set("status", b"%d" % status)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on nothing is left that it should cut short
        _see_off(room)
        return status
    told = wait_for(room, "status", REPORT_LIMIT_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(StoreError):  # rank 0 may have waited long enough
        room.add("left", 1)
    return ExitStatus.INCONCLUSIVE if told is None else int(told)


def _see_off(room: Room) -> None:
    deadline = time.monotonic() + LEAVE_LIMIT_S
    with suppress(StoreError):
        while room.add("left", 0) < room.add("came", 0) - 1 and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)


def _unreachable(launch: Launch, error: StoreError) -> UserError:
    place = f"{launch.hosts[0]}:{launch.port}"
    if launch.rank == 0:
        return UserError(
            f"the ranks cannot meet at {place}: {error}",
            help="Choose another MASTER_PORT.",
            status=ExitStatus.INCONCLUSIVE,
        )
    return UserError(
        f"rank {launch.rank} cannot go on without rank 0 at {place}: {error}",
        help="Is the command running on rank 0's host? Check MASTER_ADDR, MASTER_PORT and firewalls.",
        status=ExitStatus.INCONCLUSIVE,
    )
