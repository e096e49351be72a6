"""Checks before anything is run: all ranks have come, with the same options and versions. Chooses backend and devices.

Keys in the store: ``come/RANK`` counts the processes that claim this rank, ``came`` the ranks that have come so far.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.words import format_size, grouped, rank_list
from ddpdoctor.probes.gpus import AUTO, RankGpu, choose_backend, choose_devices, read_gpu
from ddpdoctor.probes.member import name_member, read_member
from ddpdoctor.probes.ranks import meet_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import BenchSettings, Member
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.trial import TrialSettings
    from ddpdoctor.probes.ranks import Ranks

NOTHING_TO_WAIT_FOR_S = 3.0
"""Our choice: how long rank 0 waits for the others if its own command line is already wrong."""
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
"""Options whose names differ from the field of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank was asked to do, and on which device and versions."""

    member: Member
    asked: dict[str, str] = field(default_factory=dict)
    """What must be the same on all ranks, in words, by the name that the user knows."""
    backend: str = AUTO
    gpu: RankGpu | None = None
    """The GPU that it would use, or None if it has none for NCCL."""
    problem: str = ""
    """What is wrong with its command line, or "" if nothing is."""
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
    """Return this rank's proposal. Imports torch."""
    member = read_member(launch, env)
    return Proposal(
        member=member,
        asked=describe_settings(settings) | describe_versions(member),
        backend=settings.backend or AUTO,
        gpu=read_gpu(launch.local_rank or 0, env),
    )


def run_agreed(
    ranks: Ranks,
    own: Proposal,
    limit_s: float,
    show_error: Callable[[UserError], None],
    run: Callable[[str, tuple[Member, ...]], int],
    *,
    check: Callable[[str], None] = lambda _: None,
) -> int:
    """Return the exit status of ``run``, which every rank calls with the backend and the members.

    If the ranks cannot start, rank 0 tells the user, and the others exit with the same status. ``check`` raises
    ``UserError`` for a backend that cannot do what is asked. Raises ``StoreError``.
    """
    verdict = _agree(ranks.conversation, own, ranks.world_size, limit_s, check)
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
    """Report to rank 0 that this rank's command line is wrong, and return the exit status. All ranks may be wrong."""
    own = Proposal(member=name_member(launch), problem=error.message, help=error.help)
    with suppress(StoreError), meet_ranks(launch, env, meet_limit_s=limit_s, limit_s=limit_s) as ranks:
        return run_agreed(ranks, own, limit_s, show_error, lambda *_: error.status)
    show_error(error)  # the other ranks cannot be reached
    return error.status


def _agree(
    conversation: Conversation, own: Proposal, world_size: int, limit_s: float, check: Callable[[str], None]
) -> StartDecision:
    rank = own.member.rank
    if conversation.add(f"come/{rank}", 1) > 1:
        raise UserError(f"another process is also rank {rank}", help="Give each process its own RANK.")
    conversation.add("came", 1)
    verdict = None
    if rank == 0:
        waits_s = min(limit_s, NOTHING_TO_WAIT_FOR_S) if own.problem else limit_s
        heard = {0: own, **conversation.gather(Proposal, "proposal", lambda: range(1, world_size), waits_s)}
        verdict = judge([heard[one] for one in sorted(heard)], world_size, limit_s, check)
    else:
        conversation.send(f"proposal/{rank}", own)
    # Rank 0 may itself start up to limit_s later than this rank, and then waits limit_s for the slowest.
    return conversation.agree(StartDecision, "verdict", verdict, 2 * limit_s)


def judge(
    proposals: Sequence[Proposal], world_size: int, limit_s: float, check: Callable[[str], None] = lambda _: None
) -> StartDecision:
    """Return what all ranks do. ``proposals`` are of the ranks that came, in rank order."""
    try:
        _check_problems(proposals, world_size)
        _check_differences(proposals)
        _check_missing({one.member.rank for one in proposals}, world_size, limit_s)
        gpus = {one.member.rank: one.gpu for one in proposals}
        backend = choose_backend(proposals[0].backend, gpus)
        check(backend)
    except UserError as error:
        return StartDecision(problem=error.message, help=error.help, status=error.status)
    return StartDecision(backend=backend, members=choose_devices([one.member for one in proposals], gpus, backend))


def _check_problems(proposals: Sequence[Proposal], world_size: int) -> None:
    wrong = [one for one in proposals if one.problem]
    if not wrong:
        return
    alike = [one.member.rank for one in wrong if one.problem == wrong[0].problem]
    everywhere = len(alike) == len(proposals) or (alike == [0] and len(proposals) < world_size)
    raise UserError(wrong[0].problem if everywhere else f"{rank_list(alike)}: {wrong[0].problem}", help=wrong[0].help)


def _check_differences(proposals: Sequence[Proposal]) -> None:
    differences = find_differences(proposals)
    if differences:
        raise UserError(
            "the ranks have different settings: " + "; ".join(differences),
            help="Nothing was measured. Start every rank with the same command line and the same versions.",
        )


def _check_missing(came: set[int], world_size: int, limit_s: float) -> None:
    missing = sorted(set(range(world_size)) - came)
    if missing:
        raise UserError(
            f"{rank_list(missing)} did not come within {limit_s:g} s",
            help="Start the command on every rank; --timeout gives the slowest more time.",
            status=ExitStatus.INCONCLUSIVE,
        )


def find_differences(proposals: Sequence[Proposal]) -> list[str]:
    """Return the differences as text: "--max-size: 1 GiB on ranks 0 and 1, 64 MiB on rank 2"."""
    hosts = {one.member.rank: one.member.host for one in proposals}
    found = []
    for name in proposals[0].asked:
        sides = grouped((one.asked.get(name, "unknown"), one.member.rank) for one in proposals)
        if len(sides) > 1:
            found.append(f"{name}: " + ", ".join(_side(value, ranks, hosts) for value, ranks in sides.items()))
    return found


def _side(value: str, ranks: list[int], hosts: dict[int, str]) -> str:
    """Return a value and its ranks. Add the host if all of them are on one of several hosts."""
    those = {hosts[rank] for rank in ranks}
    where = f" (host {hosts[ranks[0]]})" if len(those) == 1 < len(set(hosts.values())) else ""
    return f"{value} on {rank_list(ranks)}{where}"


def describe_settings(settings: BenchSettings | TrialSettings) -> dict[str, str]:
    """Return each setting in words, by its option: "64 MiB", "float32,bfloat16", "no", "30 s", "not set"."""
    names = [one.name for one in fields(settings)]
    return {NAMES.get(name, f"--{name.replace('_', '-')}"): _describe(name, getattr(settings, name)) for name in names}


def describe_versions(member: Member) -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    return {
        "the version of ddpdoctor": member.version,
        "the version of torch": member.torch.partition("+")[0],
        "the version of NCCL": ".".join((member.nccl or "none").split(".")[:2]),
    }


def _describe(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_size(value)
    if name.endswith("_s"):
        return f"{value:g} s"
    if value is None or value in {"", ()}:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(_describe("", one) for one in value)
    return str(value.value if isinstance(value, Enum) else value)
