"""Checks before anything is built: all ranks have come, with the same options and versions. Gives each its device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.trial import TrialSettings
from ddpdoctor.probes.bandwidth.agreement import AUTO, Proposal, choose_backend, settle
from ddpdoctor.probes.bandwidth.gpu_sharing import Gpu  # noqa: TC001 - what arrives is decoded by it
from ddpdoctor.probes.bandwidth.member import name_member, read_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one rank was asked to do, and on which device and versions."""

    member: Member
    gpu: Gpu | None
    settings: TrialSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Rank 0's decision for all ranks: what they do, or why they do nothing."""

    settings: TrialSettings | None
    members: tuple[Member, ...] = ()
    problem: str = ""
    help: str = ""
    status: int = ExitStatus.WRONG_USE


def wish_of(launch: Launch, env: Mapping[str, str], settings: TrialSettings) -> Wish:
    """Return this rank's wish. Imports torch."""
    import torch

    member = replace(name_member(launch), torch=str(torch.__version__))
    return Wish(member=member, gpu=read_gpu(launch.local_rank or 0, env), settings=settings)


def agree(ranks: Ranks, wish: Wish) -> Word:
    """Return rank 0's decision, the same on every rank. Raises ``StoreError`` if a rank does not come."""
    wishes = ranks.gather("wish", wish)
    return ranks.agree(Word, "word", None if wishes is None else judge(wishes))


def judge(wishes: Sequence[Wish]) -> Word:
    """Return the decision for these wishes, which are in rank order."""
    differences = _differences(wishes)
    if differences:
        return Word(
            settings=None,
            problem="the ranks do not want the same: " + "; ".join(differences),
            help="Nothing was run. Start every rank with the same command line and the same versions.",
        )
    proposals = [Proposal(member=one.member, settings=None, gpu=one.gpu) for one in wishes]
    try:
        backend = choose_backend(wishes[0].settings.backend or AUTO, proposals)
    except UserError as error:
        return Word(settings=None, problem=error.message, help=error.help, status=error.status)
    return Word(settings=replace(wishes[0].settings, backend=backend), members=settle(proposals, backend))


def _differences(wishes: Sequence[Wish]) -> list[str]:
    said = [_sayings(one) for one in wishes]
    found = []
    for name in said[0]:
        sides: dict[str, list[int]] = defaultdict(list)
        for one, sayings in zip(wishes, said, strict=True):
            sides[sayings[name]].append(one.member.rank)
        if len(sides) > 1:
            found.append(f"{name}: " + ", ".join(f"{value} on {rank_list(ranks)}" for value, ranks in sides.items()))
    return found


def _sayings(wish: Wish) -> dict[str, str]:
    """Return what must be the same on all ranks, keyed by the name that the user knows."""
    options: dict[str, Any] = {one.name: getattr(wish.settings, one.name) for one in fields(TrialSettings)}
    said = {_OPTIONS.get(name, f"--{name.replace('_', '-')}"): str(value) for name, value in options.items()}
    versions = {"the version of ddpdoctor": wish.member.version, "the version of torch": wish.member.torch}
    return said | versions


_OPTIONS = {"unused": "--find-unused-parameters", "allowed": "--allow-different", "limit_s": "--timeout"}
