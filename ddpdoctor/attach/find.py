"""Finds the training jobs on this machine, and picks the one that the user means."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.attach.process import SUDO
from ddpdoctor.collect import launch, proc
from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.run_ranks import WORLD_SIZE_NAMES
from ddpdoctor.model.attached import JobIdentity, RankBy, SeenRank
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import select_variables
from ddpdoctor.model.words import count_of, format_numbers, grouped, name_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.proc import Process

MOST_ANCESTORS = 64
NO_JOB = "no training job"  # how the message begins if there is no job, or none of the given name
PROC = Path("/proc")
# The kernel's names for threads that torch starts with a process group. A forked worker does not inherit threads.
GROUP_THREADS = frozenset({"pt_gloo_runloop", "pt_nccl_watchdg", "pt_nccl_heartbt"})
LOADER_WORKER = "pt_data_worker"
SPAWNED = "multiprocessing.spawn"  # in the command line of a process that multiprocessing started by spawn
_IDENTITY = (*launch.RANK_VARIABLES, *launch.LOCAL_RANK_VARIABLES, "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# Our choice: reading the environment of a process waits for the lock of its memory, which a stuck driver may hold.
STUCK_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    """A job with its ranks on this machine, in order."""

    identity: JobIdentity
    ranks: tuple[SeenRank, ...]
    # The whole environment of each rank, by pid. It never leaves this process.
    environments: Mapping[int, Mapping[str, str]]

    @property
    def world_size(self) -> int | None:
        return max((rank.world_size for rank in self.ranks if rank.world_size is not None), default=None)

    def line(self) -> str:
        numbers = sorted(rank.rank for rank in self.ranks if rank.rank is not None)
        of = f" of {self.world_size}" if self.world_size is not None else ""
        pids = name_list([str(rank.pid) for rank in self.ranks])
        what = self.ranks[0]
        which = f" ({format_numbers(numbers)})" if numbers else ""
        return (
            f"  --job {self.identity.name}: {count_of(len(self.ranks), 'rank')}{of}{which}, pid {pids}, "
            f"{what.launcher}, {what.user}: {what.command}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A process of another user that has joined a process group, and whose environment we may not read."""

    pid: int
    user: str
    state: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJobs:
    """What was found on this machine."""

    jobs: tuple[FoundJob, ...]
    closed: tuple[Closed, ...]
    processes: Mapping[int, Process]


def find_jobs() -> FoundJobs:
    processes = proc.read_processes()
    own = frozenset(_ancestors(os.getpid(), processes))
    chosen = choose_ranks(processes, own | {os.getpid()})
    grouped_ranks = grouped((_identity(candidate), candidate) for candidate in chosen)
    names, jobs = [identity.name for identity in grouped_ranks], list[FoundJob]()
    for identity, members in grouped_ranks.items():
        members.sort(key=lambda member: member.pid)
        unknown = [member.pid for member in members if member.rank is None]
        ranks = sorted((_seen_rank(member, unknown) for member in members), key=lambda rank: (rank.rank or 0, rank.pid))
        # Two of one name get their port or parent added.
        shown = replace(identity, name=_longer_name(identity)) if names.count(identity.name) > 1 else identity
        environments = {member.pid: member.env for member in members}
        jobs.append(FoundJob(identity=shown, ranks=tuple(ranks), environments=environments))
    unread = (found for found in processes.values() if found.state not in "ZX" and not proc.read_environment(found.pid))
    closed = tuple(
        Closed(pid=found.pid, user=_user(found.pid), state=found.state, command=proc.read_command(found.pid))
        for found in unread
        if GROUP_THREADS & read_thread_names(found.pid)
    )
    jobs.sort(key=lambda job: job.identity.name)
    return FoundJobs(jobs=tuple(jobs), closed=closed, processes=processes)


def choose_job(found: FoundJobs, pid: int | None = None, name: str | None = None) -> FoundJob:
    """Return the job that is meant. Raises UserError if there is none, or more than one."""
    jobs: Iterable[FoundJob] = found.jobs
    if pid is not None:
        # The jobs with a rank that is this process, one above it, or one below it
        related = {pid, *_ancestors(pid, found.processes)}
        related |= {descendant.pid for descendant in proc.descendants(pid, dict(found.processes))}
        itself = [job for job in found.jobs if any(rank.pid == pid for rank in job.ranks)]
        jobs = itself or [job for job in found.jobs if any(rank.pid in related for rank in job.ranks)]
    if name is not None:
        names = [(job, job.identity.name, _longer_name(job.identity)) for job in jobs]
        jobs = [job for job, short, long in names if name in {short, long} or short.startswith(f"{name}@")]
    meant = list(jobs)
    if len(meant) == 1:
        return meant[0]
    closed = [process for process in found.closed if pid in {None, process.pid}]
    if not meant and (not found.jobs or (pid is not None and closed)):
        if pid is not None and pid not in found.processes:
            what = f"no process has the pid {pid}"
            raise UserError(what, help="A container has its own pids: run ddpdoctor inside it.")
        if closed:
            lines = [f"  pid {rank.pid} of {rank.user}, state {rank.state}: {rank.command}" for rank in closed]
            what = f"{count_of(len(closed), 'process', 'processes')} of a training job may not be read by this user"
            raise UserError(
                what, help=f"Run it as that user or as root: {SUDO} --pid {closed[0].pid}\n" + "\n".join(lines)
            )
        raise UserError(
            f"{NO_JOB} runs on this machine" if pid is None else f"process {pid} is not a rank of a training job",
            help="Ranks are processes with RANK or a launcher's variable in their environment. Run ddpdoctor attach on "
            f"the machine and in the container where they run; for another user's job: {SUDO}",
        )
    message = f"{count_of(len(meant), 'training job')} run on this machine: choose one"
    if not meant and name is not None:
        message = f"{NO_JOB} named {name} runs on this machine"
    elif not meant:
        message = f"process {pid} does not belong to a training job"
    listed = "\n".join(job.line() for job in meant or found.jobs)
    raise UserError(message, help=f"Give --job NAME or --pid PID. Jobs on this machine:\n{listed}")


def _ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    found: list[int] = []
    while pid in processes and len(found) < MOST_ANCESTORS:
        pid = processes[pid].ppid
        if pid > 1:
            found.append(pid)
    return found


def _identity(candidate: Candidate) -> JobIdentity:
    env = candidate.env
    addr, port = launch.text(env, "MASTER_ADDR") or None, launch.number(env, "MASTER_PORT")
    run_id = launch.text(env, "TORCHELASTIC_RUN_ID") or None
    slurm = launch.text(env, "SLURM_JOB_ID", "SLURM_JOBID") or None
    step = None if addr else launch.text(env, "SLURM_STEP_ID", "SLURM_STEPID", "PMIX_NAMESPACE") or None
    parent = candidate.process.ppid if candidate.rank is None or not (addr or slurm or step or run_id) else None
    if slurm:
        name = f"slurm-{slurm}"
    elif run_id and run_id != "none":
        name = run_id
    else:
        name = f"{addr}:{port}" if addr else ""
    return JobIdentity(
        name=name or f"pid-{parent}",
        master_addr=addr, master_port=port, run_id=run_id, slurm_job=slurm, step=step, parent_pid=parent,
    )  # fmt: skip


def _longer_name(identity: JobIdentity) -> str:
    return f"{identity.name}@{identity.master_port or identity.step or identity.parent_pid}"


def _seen_rank(candidate: Candidate, unknown: list[int]) -> SeenRank:
    """Return a rank. ``unknown`` are the pids of all whose variables do not say which one they are."""
    env, ordered = candidate.env, candidate.rank is None
    rank = unknown.index(candidate.pid) if ordered else candidate.rank
    numbers = proc.read_status(candidate.pid).get("NSpid", "").split()
    path = launch.text(env, "DDPDOCTOR_RUN")
    absolute = str(Path(proc.read_link(Path(f"/proc/{candidate.pid}/cwd")), path)) if path else None
    is_step = launch.is_slurm_step(env)
    steps = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if is_step and "RANK" not in env else ()
    size = launch.number(env, *WORLD_SIZE_NAMES, *steps)
    return SeenRank(
        pid=candidate.pid, namespace_pid=int(numbers[-1]) if len(numbers) > 1 else None,
        rank=rank, rank_by=RankBy.PID_ORDER if ordered else RankBy.ENVIRONMENT,
        local_rank=rank if ordered else launch.read_local_rank(env), start_ticks=candidate.process.start_ticks,
        world_size=(len(unknown) if candidate.is_spawned else None) if ordered else size,
        node_rank=launch.number(env, "GROUP_RANK", *("SLURM_NODEID",) if is_step else ()),
        restart_count=launch.number(env, "TORCHELASTIC_RESTART_COUNT"), launcher=_launcher(candidate, ordered=ordered),
        parent_pid=candidate.process.ppid, command=proc.read_command(candidate.pid), user=_user(candidate.pid),
        wrap_folder=absolute, variables=select_variables(env)[0],
    )  # fmt: skip


def _launcher(candidate: Candidate, *, ordered: bool) -> str:
    env = candidate.env
    if ordered:
        return "mp.spawn" if candidate.is_spawned else "unknown"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    if "OMPI_COMM_WORLD_RANK" in env:
        return "mpirun"
    if launch.is_slurm_step(env):
        return "srun"
    return "mpiexec" if "PMI_RANK" in env or "PMIX_RANK" in env else "environment"


def _user(pid: int) -> str:
    uid = (proc.read_status(pid).get("Uid", "").split() or ["?"])[0]
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return uid


def named_file(pid: int, path: str) -> Path:
    """Return where a path of another process is for us: it may have another root folder, or be relative."""
    root, cwd = Path(f"/proc/{pid}/root"), Path(f"/proc/{pid}/cwd")
    if not path.startswith("/"):
        return cwd / path
    same = os.path.realpath(f"/proc/{pid}/ns/mnt") == os.path.realpath("/proc/self/ns/mnt")
    return Path(path) if same else root / path.lstrip("/")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A process, with its role in a job according to its environment and threads."""

    process: Process
    env: Mapping[str, str]
    rank: int | None

    @property
    def pid(self) -> int:
        return self.process.pid

    @cached_property
    def threads(self) -> frozenset[str]:
        return read_thread_names(self.pid)

    @property
    def joined(self) -> bool:
        """Whether it is a member of a process group, as torch 2.6 and later show by the names of threads."""
        return bool(GROUP_THREADS & self.threads)

    @cached_property
    def has_torch(self) -> bool:
        return "libtorch" in proc.read_text(PROC / str(self.pid) / "maps")

    @cached_property
    def is_spawned(self) -> bool:
        """Whether multiprocessing spawned it for something other than a loader worker."""
        command = proc.read_text(PROC / str(self.pid) / "cmdline")
        return SPAWNED in command and LOADER_WORKER not in self.threads


def read_candidate(process: Process) -> Candidate:
    pairs = (os.fsdecode(pair).partition("=") for pair in proc.read_environment(process.pid))
    env = {name: value for name, _, value in pairs if name}
    return Candidate(process=process, env=env, rank=launch.read_rank(env))


def read_thread_names(pid: int) -> frozenset[str]:
    """Return the names of a process's threads, which every user may read."""
    tasks = PROC / str(pid) / "task"
    return frozenset(proc.read_text(tasks / str(tid) / "comm").strip() for tid in proc.list_pids(tasks))


def choose_ranks(processes: Mapping[int, Process], own: frozenset[int] = frozenset()) -> list[Candidate]:
    """Return the ranks among these processes; ``own`` are ddpdoctor's processes, which are left out."""
    alive = [process for pid, process in processes.items() if process.state not in "ZX" and pid not in own]
    # What cannot be read of a process that is stuck in the kernel is left out.
    stuck = {str(process.pid): partial(read_candidate, process) for process in alive if process.state == "D"}
    replies = ask_side_by_side(stuck, STUCK_LIMIT_S).values()
    read = [read_candidate(process) for process in alive if process.state != "D"]
    read += [reply.value for reply in replies if reply.value is not None]
    seen = {candidate.pid: candidate for candidate in read if candidate.env}  # else it is another user's
    numbered = {pid: candidate for pid, candidate in seen.items() if candidate.rank is not None}
    families: dict[int, list[Candidate]] = {}
    launching: set[int] = set()
    for candidate in numbered.values():
        top, above = _climb(candidate, numbered, processes)
        families.setdefault(top.pid, []).append(candidate)
        if above is not None:
            launching.add(_climb(above, numbered, processes)[0].pid)
    chosen = [rank for top, family in families.items() for rank in _of_family(top, family, launching=top in launching)]
    # Processes that have joined a group and have no variable of a rank, as those of mp.spawn
    others = [candidate for pid, candidate in seen.items() if pid not in numbered]
    outside = [other for other in others if _nearest_above(other, numbered, processes) is None]
    joined = [candidate for candidate in outside if candidate.joined]
    return [*chosen, *_with_siblings(joined, outside)]


def _climb(
    candidate: Candidate, numbered: Mapping[int, Candidate], processes: Mapping[int, Process]
) -> tuple[Candidate, Candidate | None]:
    """Return the top of a process's family, and the process of another family above it."""
    while True:
        above = _nearest_above(candidate, numbered, processes)
        if above is None:
            return candidate, above
        # A rank and its workers have the same variables.
        is_same = all(candidate.env.get(name) == above.env.get(name) for name in _IDENTITY)
        if not is_same and not (above.joined and above.rank == candidate.rank):
            return candidate, above
        candidate = above


def _nearest_above(
    candidate: Candidate, numbered: Mapping[int, Candidate], processes: Mapping[int, Process]
) -> Candidate | None:
    pid, passed = candidate.process.ppid, {candidate.pid}
    while pid in processes and pid not in passed:
        if pid in numbered:
            return numbered[pid]
        passed.add(pid)
        pid = processes[pid].ppid
    return None


def _of_family(top: int, family: list[Candidate], *, launching: bool) -> Iterable[Candidate]:
    family.sort(key=lambda candidate: (candidate.pid != top, candidate.process.start_ticks, candidate.pid))
    joined = [candidate for candidate in family if candidate.joined]
    if len(joined) > 1 and not family[0].joined and all(candidate.is_spawned for candidate in joined):
        return [replace(sibling, rank=None) for sibling in _with_siblings(joined, family)]
    if joined:
        return joined[:1]
    if launching:
        return []
    programs = [(member, Path(proc.read_link(PROC / str(member.pid) / "exe")).name) for member in family]
    pythons = [member for member, program in programs if program.startswith("python")]
    best = next((python for python in pythons if python.has_torch), None)
    if best is None:
        # A rank that still loads torch. Without RANK, it may be any program in a step of Slurm.
        best = next((python for python in pythons if {"RANK", "WORLD_SIZE"} <= python.env.keys()), None)
    return [] if best is None else [best]


def _with_siblings(joined: list[Candidate], others: Iterable[Candidate]) -> list[Candidate]:
    """Add the processes that were spawned beside one that has joined: they may be stuck before."""
    parents = {candidate.process.ppid for candidate in joined if candidate.is_spawned}
    beside = [other for other in others if other.process.ppid in parents and other.is_spawned and not other.joined]
    loading = (candidate for candidate in beside if candidate.has_torch)
    return sorted([*joined, *loading], key=lambda candidate: candidate.pid)
