"""Before anything is measured: all ranks have come, want the same, and have the same versions, or all end.

Keys, below the round: ``come/RANK`` (how many say they are this rank), ``came`` (how many ranks have come so far),
``proposal/RANK``, and ``verdict`` of rank 0.
"""

from __future__ import annotations

import time
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

    from ddpdoctor.model.bandwidth import Member, Settings
    from ddpdoctor.probes.bandwidth.room import Room

AUTO = "auto"
"""A proposal's backend where the user chose none."""
LOOK_EVERY_S = 0.02
NOTHING_TO_WAIT_FOR_S = 3.0
"""Ours: how long rank 0 waits for the others where its own command line is wrong already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank wants, and what it is."""

    member: Member
    settings: Settings | None
    """None: its command line is wrong."""
    gpu: Gpu | None = None
    """What it would use; None where NCCL cannot be had."""
    problem: str = ""
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks do."""

    settings: Settings
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What rank 0 tells the others."""

    agreed: Agreed | None
    problem: str = ""
    help: str = ""
    status: int = ExitStatus.WRONG_USE


class Disagreement(UserError):  # noqa: N818 - says what it is
    """No bench takes place. Rank 0 tells the user; the others know, end with the same status, and say nothing."""


def agree(room: Room, proposal: Proposal, world_size: int, limit_s: float) -> Agreed:
    """Return what all do; raises ``Disagreement`` on every rank where they do not want the same, ``StoreError``."""
    rank = proposal.member.rank
    if room.add(f"come/{rank}", 1) > 1:
        raise UserError(f"another process says that it is rank {rank}", help="Give each a RANK of its own.")
    room.add("came", 1)
    if rank == 0:
        verdict = _lead(room, proposal, world_size, limit_s)
        room.send("verdict", verdict)
    else:
        room.send(f"proposal/{rank}", proposal)
        # Rank 0 may start as late as this one may, and then waits as long for the slowest.
        verdict = room.receive(Verdict, "verdict", 2 * limit_s, "rank 0")
    if verdict.agreed is None:
        raise Disagreement(verdict.problem, help=verdict.help, status=verdict.status)
    return verdict.agreed


def _lead(room: Room, own: Proposal, world_size: int, limit_s: float) -> Verdict:
    heard = {0: own, **_hear(room, world_size, min(limit_s, NOTHING_TO_WAIT_FOR_S) if own.problem else limit_s)}
    try:
        return Verdict(agreed=judge([heard[rank] for rank in sorted(heard)], world_size, limit_s))
    except UserError as error:
        return Verdict(agreed=None, problem=error.message, help=error.help, status=error.status)


def _hear(room: Room, world_size: int, limit_s: float) -> dict[int, Proposal]:
    """Return the proposals of the other ranks that have come within the limit."""
    heard: dict[int, Proposal] = {}
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + limit_s
    while waiting:
        for rank in sorted(waiting):
            found = room.look_for(Proposal, f"proposal/{rank}", f"rank {rank}")
            if found is not None:
                heard[rank] = found
        waiting -= heard.keys()
        if waiting and time.monotonic() > deadline:
            break
        if waiting:
            time.sleep(LOOK_EVERY_S)
    return heard


def judge(proposals: Sequence[Proposal], world_size: int, limit_s: float) -> Agreed:
    """Return what all ranks do; raises ``UserError``. ``proposals`` are of those who came, in the order of ranks."""
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
    """Return NCCL where every rank has a GPU of its own, unless the user chose. Raises ``UserError``."""
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
    """Return who differs, in what, with which values: "--max-size: 1 GiB on ranks 0 and 1, 64 MiB on rank 2"."""
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
    """Name the host too where it is one of several."""
    those = {hosts[rank] for rank in ranks}
    where = f" (host {hosts[ranks[0]]})" if len(those) == 1 < len(set(hosts.values())) else ""
    return f"{value} on {rank_list(ranks)}{where}"


def _sayings(proposal: Proposal) -> dict[str, str]:
    """Return what must be the same on all ranks, by what the user knows it as."""
    assert proposal.settings is not None
    versions = {
        "the version of ddpdoctor": proposal.member.version,
        "the version of torch": proposal.member.torch.partition("+")[0],
        "the version of NCCL": ".".join((proposal.member.nccl or "none").split(".")[:2]),
    }
    return describe_settings(proposal.settings) | versions
