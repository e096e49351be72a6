"""How the ranks of a probe cooperate: they connect, agree on options, backend and devices, and exit alike."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ddpdoctor
from ddpdoctor.collect.proc import read_text
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.reach import reach
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.bandwidth import Member
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.launch import find_variable, select_variables
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.words import format_size, grouped, rank_list
from ddpdoctor.probes.loading import Lifeline

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import BenchSettings
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.trial import TrialSettings

Kind = TypeVar("Kind")
# Our choice: how long rank 0 may take to judge and draw. The first import of a plotting library takes seconds.
REPORT_LIMIT_S = 120.0
ABOVE_OURS = 3  # torch's timeout is this many times ours, so that a probe notices a hang first and says more
# Our choice: how long rank 0 waits until the others have received the status. Rank 0 may be serving the store.
LEAVE_LIMIT_S = 5.0
NOTHING_TO_WAIT_FOR_S = 3.0  # our choice: how long rank 0 waits for the others if its own command line is already wrong
# Options whose names differ from the field of the settings.
NAMES = {
    "collectives": "--collective",
    "dtypes": "--dtype",
    "redop": "--op",
    "modes": "--mode",
    "min_size_bytes": "--min-size",
    "max_size_bytes": "--max-size",
    "budget_s": "--budget",
    "iterations": "--iters",
    "hang_timeout_s": "--hang-timeout",
    "unused": "--find-unused-parameters",
    "allowed": "--allow-different",
    "limit_s": "--timeout",
}
AUTO = "auto"  # the backend if the user chose none
CUDA_LIMIT_S = 60.0  # our choice: without a persistence daemon, CUDA takes some seconds to start each GPU
CUDA_HANGS = (
    f"ddpdoctor: CUDA did not answer within {CUDA_LIMIT_S:g} s on {os.uname().nodename}: the NVIDIA driver or a GPU "
    "hangs.\n"
    "  See `sudo dmesg | grep -E 'NVRM|Xid'`; `ddpdoctor check-env` tests each GPU in its own process. Reboot if "
    "`nvidia-smi` hangs too.\n"
    "  Where it stood:"
)
HOST_ID = "NCCL_HOSTID"
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
# The first NCCL that reads the variable. 2.30.7 compares the UUIDs of GPUs, earlier versions their PCI addresses.
SHARES_SINCE = (2, 30, 3)
# Components whose environment variables affect a measurement.
BEARING = frozenset({"nccl", "torch", "gloo", "cuda", "openmp"})
DRIVER_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Rank 0's last message: the exit status of all ranks."""

    status: int


class Ranks:
    """This rank's link to the other ranks, if any. Every call raises ``StoreError`` if a rank does not answer."""

    def __init__(self, launch: Launch, conversation: Conversation, limit_s: float) -> None:
        self.rank, self.world_size = launch.rank, launch.world_size
        self.conversation = conversation
        self._launch, self._limit_s = launch, limit_s

    def gather(self, name: str, record: Kind) -> tuple[Kind, ...] | None:
        """Return the records of all ranks in rank order on rank 0, and None immediately on the others."""
        if self.rank != 0:
            self.conversation.send(f"{name}/{self.rank}", record)
            return None
        others = range(1, self.world_size)
        heard = self.conversation.gather(type(record), name, lambda: others, self._limit_s)
        if missing := [rank for rank in others if rank not in heard]:
            raise StoreError(f"no message from {rank_list(missing)} within {self._limit_s:g} s")
        return (record, *(heard[rank] for rank in others))

    def agree(self, kind: type[Kind], name: str, decided: Kind | None) -> Kind:
        """Return rank 0's decision on every rank. The other ranks pass None."""
        return self.conversation.agree(kind, name, decided, self._limit_s)

    def end(
        self, decide: Callable[[], int], limit_s: float = REPORT_LIMIT_S, others: Callable[[], int] | None = None
    ) -> int:
        """Let rank 0 decide the exit status within ``limit_s``, and return it on every rank.

        ``others`` returns how many receive the status: fewer than all if some never came.
        """
        # All exit together, because torchrun stops the remaining ranks when one fails.
        if self.world_size == 1:
            return decide()
        if self.rank != 0:
            word = self.conversation.hear_goodbye(Ended, limit_s, ends_process=True)
            return ExitStatus.INCONCLUSIVE if word is None else word.status
        listening = others or (lambda: self.world_size - 1)
        status: int = ExitStatus.DEFECT
        try:
            status = decide()
        except UserError as error:
            status = error.status
            raise
        finally:
            self.conversation.say_goodbye(Ended(status=int(status)), listening, LEAVE_LIMIT_S, ends_process=True)
        return status

    def open_process_group(self, backend: str, device: str, store_limit_s: float, timeout_s: float) -> Any:
        """Create the default process group and return its store, which must live as long. torch's errors propagate."""
        import torch
        from torch import distributed
        from torch.distributed import HashStore, PrefixStore, TCPStore

        gpu = torch.device(device) if device.startswith("cuda") else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        launch, limit = self._launch, timedelta(seconds=store_limit_s)
        store: Any
        if self.world_size == 1:
            store = HashStore()
        elif launch.launcher is Launcher.TORCHRUN:
            store = TCPStore(launch.hosts[0], launch.port, is_master=False, wait_for_workers=False, timeout=limit)
            store = PrefixStore(f"ddpdoctor/{launch.run}/group/{self.conversation.prefix}", store)
        elif self.rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            self.conversation.send("port", store.port)
        else:
            port = self.conversation.wait(int, "port", store_limit_s, "rank 0")
            if port is None:
                raise StoreError(f"rank 0 did not open a store within {store_limit_s:g} s")
            host = reach(launch.hosts, port, store_limit_s, _address)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        distributed.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=timeout_s),
            device_id=gpu,
        )  # fmt: skip
        return store


def _address(connection: socket.socket) -> str:
    with connection:
        return str(connection.getpeername()[0])


@contextmanager
def meet_ranks(launch: Launch, env: Mapping[str, str], *, meet_limit_s: float, limit_s: float) -> Iterator[Ranks]:
    """Connect to the other ranks. Raises ``StoreError``, also if they get lost later."""
    with meet(launch, env, meet_limit_s) as conversation:
        yield Ranks(launch, conversation.begin("probe"), limit_s)


def unreachable(launch: Launch, error: StoreError) -> UserError:
    place = f"{launch.hosts[0]}:{launch.port}"
    if launch.rank == 0:
        advice = "Did a rank fail earlier? Is the command the same on every rank?"
        return UserError(f"the ranks cannot continue at {place}: {error}", help=advice, status=ExitStatus.INCONCLUSIVE)
    return UserError(
        f"rank {launch.rank} cannot continue without rank 0 at {place}: {error}",
        help="Is the command running on rank 0's host? Check MASTER_ADDR, MASTER_PORT and firewalls.",
        status=ExitStatus.INCONCLUSIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank was asked to do, and on which device and versions."""

    member: Member
    # What must be the same on all ranks, in words, by the name that the user knows.
    asked: dict[str, str] = field(default_factory=dict)
    backend: str = AUTO
    gpu: RankGpu | None = None  # the GPU that it would use, or None if it has none for NCCL
    problem: str = ""  # what is wrong with its command line, or "" if nothing is
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecision:
    """Rank 0's decision for all ranks: on what they run, or why they do not."""

    backend: str = ""
    members: tuple[Member, ...] = ()
    problem: str = ""
    help: str = ""
    status: int = ExitStatus.WRONG_USE


def propose(launch: Launch, env: Mapping[str, str], settings: BenchSettings | TrialSettings) -> Proposal:
    """Return this rank's proposal, with its versions, and the processor as its device. Imports torch."""
    import torch

    listed, _ = select_variables(env)
    bearing = [name for name in listed if getattr(find_variable(name), "component", "") in BEARING]
    with _asking_cuda() as possible:
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version()[:3]) if possible else None
    member = replace(
        name_member(launch), torch=str(torch.__version__), nccl=nccl,
        driver=read_text(DRIVER_VERSION).strip() or None, variables={name: listed[name] for name in bearing},
    )  # fmt: skip
    asked, gpu = describe_asked(settings, member), read_gpu(launch.local_rank or 0, env)
    return Proposal(member=member, asked=asked, backend=settings.backend or AUTO, gpu=gpu)


def run_agreed(
    ranks: Ranks,
    own: Proposal,
    limit_s: float,
    show_error: Callable[[UserError], None],
    run: Callable[[str, tuple[Member, ...]], int],
    check: Callable[[str], None] = lambda _: None,
) -> int:
    """Return the exit status of ``run``, which every rank calls with the backend and the members.

    If the ranks cannot start, rank 0 tells the user, and all exit with one status. ``check`` raises ``UserError`` for a
    backend that cannot do what is asked. Raises ``StoreError``.
    """
    conversation = ranks.conversation
    rank = own.member.rank
    if conversation.add(f"come/{rank}", 1) > 1:
        raise UserError(f"another process is also rank {rank}", help="Give each process its own RANK.")
    conversation.add("came", 1)
    verdict = None
    if rank == 0:
        waits_s = min(limit_s, NOTHING_TO_WAIT_FOR_S) if own.problem else limit_s
        heard = {0: own, **conversation.gather(Proposal, "proposal", lambda: range(1, ranks.world_size), waits_s)}
        verdict = judge([heard[rank] for rank in sorted(heard)], ranks.world_size, limit_s, check)
    else:
        conversation.send(f"proposal/{rank}", own)
    # Rank 0 may itself start up to limit_s later than this rank, and then waits limit_s for the slowest.
    verdict = conversation.agree(StartDecision, "verdict", verdict, 2 * limit_s)
    if not verdict.problem:
        return run(verdict.backend, verdict.members)

    def show() -> int:
        show_error(UserError(verdict.problem, help=verdict.help))
        return verdict.status

    # Do not wait for ranks that never came.
    return ranks.end(show, others=lambda: ranks.conversation.add("came", 0) - 1)


def run_wrong_rank(
    launch: Launch, env: Mapping[str, str], error: UserError, limit_s: float, show_error: Callable[[UserError], None]
) -> int:
    """Report to rank 0 that this rank's command line is wrong, as those of all ranks may be. Return the exit status."""
    own = Proposal(member=name_member(launch), problem=error.message, help=error.help)
    with suppress(StoreError), meet_ranks(launch, env, meet_limit_s=limit_s, limit_s=limit_s) as ranks:
        return run_agreed(ranks, own, limit_s, show_error, lambda *_: error.status)
    show_error(error)  # the other ranks cannot be reached
    return error.status


def judge(
    proposals: Sequence[Proposal], world_size: int, limit_s: float, check: Callable[[str], None] = lambda _: None
) -> StartDecision:
    """Return what all ranks do, from the proposals of those that came, in rank order."""
    gpus = {proposal.member.rank: proposal.gpu for proposal in proposals}
    users = Counter(gpu.uuid for gpu in gpus.values() if gpu is not None)
    try:
        refuse_problems([(proposal.member.rank, proposal.problem, proposal.help) for proposal in proposals], world_size)
        if differences := find_differences(proposals):
            return StartDecision(
                problem="the ranks have different settings: " + "; ".join(differences),
                help="Nothing was measured. Start every rank with the same command line and the same versions.",
            )
        if missing := sorted(set(range(world_size)) - gpus.keys()):
            return StartDecision(
                problem=f"{rank_list(missing)} did not connect within {limit_s:g} s",
                help="Start the command on every rank; --timeout gives the slowest more time.",
                status=ExitStatus.INCONCLUSIVE,
            )
        # The user's choice, else NCCL if every rank has its own GPU, else Gloo
        backend = proposals[0].backend
        if backend == AUTO:
            backend = "nccl" if all(gpu is not None and users[gpu.uuid] == 1 for gpu in gpus.values()) else "gloo"
        elif backend == "nccl":
            check_nccl(gpus)
        check(backend)
    except UserError as error:
        return StartDecision(problem=error.message, help=error.help, status=error.status)
    members = [proposal.member for proposal in proposals]
    for place, gpu in enumerate(gpus.values() if backend == "nccl" else ()):
        if gpu is not None:
            device = f"cuda:{gpu.index}"
            members[place] = replace(members[place], device=device, device_name=gpu.name, gpu_ranks=users[gpu.uuid])
    return StartDecision(backend=backend, members=tuple(members))


def refuse_problems(said: Sequence[tuple[int, str, str]], world_size: int) -> None:
    """Raise ``UserError`` for the first of (rank, problem or "", advice), with its ranks unless all have it."""
    for _, first, advice in said:
        if first:
            alike = [rank for rank, problem, _ in said if problem == first]
            everywhere = len(alike) == len(said) or (alike == [0] and len(said) < world_size)
            raise UserError(first if everywhere else f"{rank_list(alike)}: {first}", help=advice)


def find_differences(proposals: Sequence[Proposal]) -> list[str]:
    """Return the differences: "--max-size: 1 GiB on ranks 0 and 1, 64 MiB on rank 2"."""
    hosts = {proposal.member.rank: proposal.member.host for proposal in proposals}
    found = []
    for name in proposals[0].asked:
        sides = grouped((proposal.asked.get(name, "unknown"), proposal.member.rank) for proposal in proposals)
        shown = []
        for value, ranks in sides.items():
            # With the host if all of them are on one of several hosts
            is_one_host = len({hosts[rank] for rank in ranks}) == 1 < len(set(hosts.values()))
            shown.append(f"{value} on {rank_list(ranks)}" + (f" (host {hosts[ranks[0]]})" if is_one_host else ""))
        if len(sides) > 1:
            found.append(f"{name}: " + ", ".join(shown))
    return found


def describe_asked(settings: BenchSettings | TrialSettings, member: Member) -> dict[str, str]:
    """Return what must be the same on all ranks: each setting by its option ("64 MiB", "30 s"), and versions."""
    options = {field.name: NAMES.get(field.name, f"--{field.name.replace('_', '-')}") for field in fields(settings)}
    return {option: _describe_setting(name, getattr(settings, name)) for name, option in options.items()} | {
        "the version of ddpdoctor": member.version,
        "the version of torch": member.torch.partition("+")[0],
        "the version of NCCL": ".".join((member.nccl or "none").split(".")[:2]),
    }


def _describe_setting(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith("_s"):
        return f"{value:g} s"
    if value is None or value in {"", ()}:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(_describe_setting("", part) for part in value)
    return str(value.value if isinstance(value, Enum) else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGpu:
    """The GPU that a rank would use."""

    index: int  # its index among the GPUs that the process sees
    name: str
    uuid: str  # Two ranks with the same UUID share the GPU. If torch knows no UUID, this is the host and the index.
    nccl_host: str  # The host on which NCCL believes this rank is. NCCL lets ranks of different hosts use one GPU.
    # Whether NCCL lets several ranks of one host use a GPU: it is new enough, and the variable is set.
    may_share: bool = False


def lets_share(env: Mapping[str, str], version: tuple[int, ...]) -> bool:
    """Return whether this NCCL version reads the variable, and the variable holds a number other than 0."""
    number = re.match(r"\s*[+-]?(0x[0-9a-fA-F]+|\d+)", env.get(SHARE, ""))
    return version >= SHARES_SINCE and number is not None and int(number[1], 16) != 0


def read_gpu(local_rank: int, env: Mapping[str, str]) -> RankGpu | None:
    import torch

    with _asking_cuda() as possible:
        count = torch.cuda.device_count() if possible else 0
        # Some launchers show each task only its own GPU, which then has index 0 on every rank.
        index = 0 if count == 1 else local_rank
        if index >= count:
            return None
        properties, host = torch.cuda.get_device_properties(index), os.uname().nodename
        return RankGpu(
            index=index, name=str(properties.name), uuid=str(getattr(properties, "uuid", f"{host}:{index}")),
            nccl_host=env.get(HOST_ID, host), may_share=lets_share(env, torch.cuda.nccl.version()[:3]),
        )  # fmt: skip


@contextmanager
def _asking_cuda() -> Iterator[bool]:
    """Yield whether NCCL could run here. If torch has NCCL, this asks the driver, which may hang."""
    import torch

    if not torch.distributed.is_nccl_available():
        yield False
        return
    lifeline = Lifeline(CUDA_HANGS)
    lifeline.put_off(CUDA_LIMIT_S)
    try:
        yield torch.cuda.is_available()
    finally:
        lifeline.release()


def check_nccl(gpus: Mapping[int, RankGpu | None]) -> None:
    """Raise ``UserError`` if NCCL cannot run on these GPUs, which are keyed by rank."""
    lacking = [rank for rank, gpu in gpus.items() if gpu is None]
    if lacking:
        raise UserError(
            "--backend nccl needs its own GPU for every rank; "
            f"{rank_list(lacking)} {'has' if len(lacking) == 1 else 'have'} none",
            help="Start as many ranks as there are GPUs (--nproc-per-node), or use --backend gloo.",
        )
    # The ranks that NCCL does not let share. Each rank checks all pairs, so all ranks need the variable.
    known = {rank: gpu for rank, gpu in gpus.items() if gpu is not None}
    users = Counter((gpu.uuid, gpu.nccl_host) for gpu in known.values())
    sharing = [rank for rank, gpu in known.items() if users[gpu.uuid, gpu.nccl_host] > 1]
    if sharing and not all(gpu.may_share for gpu in known.values()):
        raise UserError(
            f"--backend nccl needs its own GPU for every rank; {rank_list(sharing)} share one",
            help="Start as many ranks as there are GPUs (--nproc-per-node), or use --backend gloo. To share a GPU "
            f"between ranks with NCCL anyway, set another {HOST_ID} for each rank, or {SHARE}=1 on all ranks with NCCL "
            f"{'.'.join(map(str, SHARES_SINCE))} or newer.",
        )


def name_member(launch: Launch) -> Member:
    """Return who this rank is, without importing torch."""
    found = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return Member(
        rank=launch.rank, local_rank=launch.local_rank or 0, host=os.uname().nodename, pid=os.getpid(), device="cpu",
        device_name=found[1].strip() if found else platform.machine(), cores=len(os.sched_getaffinity(0)),
        version=ddpdoctor.__version__, torch="",
    )  # fmt: skip
