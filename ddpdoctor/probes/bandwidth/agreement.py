"""Checks before anything is measured: all ranks have come, with the same options and versions. If not, all ranks end.

Keys in the store: ``come/RANK`` counts the processes that claim this rank, ``came`` the ranks that have come so far.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.probes.bandwidth.gpu_sharing import Gpu, check_backend, count_sharers
from ddpdoctor.probes.bandwidth.possible import check_possible
from ddpdoctor.probes.bandwidth.wording import describe_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.bandwidth import Member, Settings

AUTO = "auto"
"""A proposal's backend if the user chose none."""
NOTHING_TO_WAIT_FOR_S = 3.0
"""Our choice: how long rank 0 waits for the others if its own command line is already wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank was asked to do, and on which device and versions."""

    member: Member
    settings: Settings | None
    """None if its command line is wrong."""
    gpu: Gpu | None = None
    """The GPU that it would use, or None if it has none for NCCL."""
    problem: str = ""
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks do."""

    settings: Settings
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Rank 0's decision for all ranks: what they do, or why they do nothing."""

    agreed: Agreed | None
    problem: str = ""
    help: str = ""
    status: int = ExitStatus.WRONG_USE


class Disagreement(UserError):  # noqa: N818 - says what it is
    """There will be no bench. Rank 0 tells the user. The others print nothing and exit with the same status."""


def agree(conversation: Conversation, proposal: Proposal, world_size: int, limit_s: float) -> Agreed:
    """Return what all ranks do. Raises ``Disagreement`` on every rank if they cannot start, and ``StoreError``."""
    rank = proposal.member.rank
    if conversation.add(f"come/{rank}", 1) > 1:
        raise UserError(f"another process says that it is rank {rank}", help="Give each a RANK of its own.")
    conversation.add("came", 1)
    decided = None
    if rank == 0:
        decided = _decide(conversation, proposal, world_size, limit_s)
    else:
        conversation.send(f"proposal/{rank}", proposal)
    # Rank 0 may itself start up to limit_s later than this rank, and then waits limit_s for the slowest.
    verdict = conversation.agree(Verdict, "verdict", decided, 2 * limit_s)
    if verdict.agreed is None:
        raise Disagreement(verdict.problem, help=verdict.help, status=verdict.status)
    return verdict.agreed


def _decide(conversation: Conversation, own: Proposal, world_size: int, limit_s: float) -> Verdict:
    waits_s = min(limit_s, NOTHING_TO_WAIT_FOR_S) if own.problem else limit_s
    heard = {0: own, **conversation.gather(Proposal, "proposal", lambda: range(1, world_size), waits_s)}
    try:
        return Verdict(agreed=judge([heard[rank] for rank in sorted(heard)], world_size, limit_s))
    except UserError as error:
        return Verdict(agreed=None, problem=error.message, help=error.help, status=error.status)


def judge(proposals: Sequence[Proposal], world_size: int, limit_s: float) -> Agreed:
    """Return what all ranks do, or raise ``UserError``. ``proposals`` are of the ranks that came, in rank order."""
    _check_problems(proposals, world_size)
    _check_differences(proposals)
    missing = sorted(set(range(world_size)) - {one.member.rank for one in proposals})
    if missing:
        raise UserError(
            f"{rank_list(missing)} did not come within {limit_s:g} s",
            help="Start the command on every rank; --timeout gives the slowest more time.",
            status=ExitStatus.INCONCLUSIVE,
        )
    settings = proposals[0].settings
    assert settings is not None
    settings = replace(settings, backend=choose_backend(settings.backend, proposals))
    check_possible(settings)
    return Agreed(settings=settings, members=settle(proposals, settings.backend))


def choose_backend(asked: str, proposals: Sequence[Proposal]) -> str:
    """Return the user's choice, else NCCL if every rank has its own GPU, else Gloo. Raises ``UserError``."""
    gpus = {one.member.rank: one.gpu for one in proposals}
    if asked == AUTO:
        alone = all(count == 1 for count in count_sharers(gpus).values())
        return "nccl" if alone else "gloo"
    if asked == "nccl":
        check_backend(gpus)
    return asked


def settle(proposals: Sequence[Proposal], backend: str) -> tuple[Member, ...]:
    """Return the members with the devices that they use."""
    sharers = count_sharers({one.member.rank: one.gpu for one in proposals})
    return tuple(
        one.member
        if backend != "nccl" or one.gpu is None
        else replace(
            one.member,
            device=f"cuda:{one.gpu.index}",
            device_name=one.gpu.name,
            gpu_ranks=sharers[one.member.rank],
        )
        for one in proposals
    )


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
            "the ranks do not want the same: " + "; ".join(differences),
            help="Nothing was measured. Start every rank with the same command line and the same versions.",
        )


def find_differences(proposals: Sequence[Proposal]) -> list[str]:
    """Return the differences as text: "--max-size: 1 GiB on ranks 0 and 1, 64 MiB on rank 2"."""
    said = [_sayings(one) for one in proposals]
    hosts = {one.member.rank: one.member.host for one in proposals}
    found = []
    for name in said[0]:
        sides: dict[str, list[int]] = defaultdict(list)
        for one, sayings in zip(proposals, said, strict=True):
            sides[sayings[name]].append(one.member.rank)
        if len(sides) > 1:
            found.append(f"{name}: " + ", ".join(_side(value, ranks, hosts) for value, ranks in sides.items()))
    return found


def _side(value: str, ranks: list[int], hosts: dict[int, str]) -> str:
    """Return a value and its ranks. Add the host if all of them are on one of several hosts."""
    those = {hosts[rank] for rank in ranks}
    where = f" (host {hosts[ranks[0]]})" if len(those) == 1 < len(set(hosts.values())) else ""
    return f"{value} on {rank_list(ranks)}{where}"


def _sayings(proposal: Proposal) -> dict[str, str]:
    """Return what must be the same on all ranks, keyed by the name that the user knows."""
    assert proposal.settings is not None
    versions = {
        "the version of ddpdoctor": proposal.member.version,
        "the version of torch": proposal.member.torch.partition("+")[0],
        "the version of NCCL": ".".join((proposal.member.nccl or "none").split(".")[:2]),
    }
    return describe_settings(proposal.settings) | versions
