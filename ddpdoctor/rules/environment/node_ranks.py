"""What is wrong with the numbers of nodes that were numbered by hand: claimed twice, or too high."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.majority import host_list
from ddpdoctor.rules.progress.words import verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Fleet

NODE_RANK = "PET_NODE_RANK"
"""What torchrun takes --node-rank from, and what stands for that option here."""


def claimed_numbers(fleet: Fleet) -> dict[int, list[str]]:
    """Return the hosts that say of themselves to be each number, by number; those that say none are left out."""
    claims: dict[int, list[str]] = {}
    for node in fleet.nodes:
        number = node.first.number(NODE_RANK) if node.processes else None
        if number is not None:
            claims.setdefault(number, []).append(node.host)
    return dict(sorted(claims.items()))


def misnumbered(fleet: Fleet, size: int) -> Iterator[Problem]:
    """Yield numbers that several nodes claim, and those for which there is no place among ``size``."""
    claims = claimed_numbers(fleet)
    doubled = {number: hosts for number, hosts in claims.items() if len(hosts) > 1}
    if doubled:
        nobody = [number for number in range(size) if number not in claims]
        yield Problem(
            summary=f"{_numbers(doubled)} {verb(doubled, 'is', 'are')} claimed by more than one host: "
            "they take each other's place, and the job hangs or fails",
            evidence=(
                *(f"node {number}: {host_list(tuple(hosts))}" for number, hosts in doubled.items()),
                *([f"nobody is {_numbers(nobody)}"] if nobody else []),
            ),
            fix=f"give each host a number of its own, --node-rank 0 to {size - 1}; in a Slurm step, $SLURM_NODEID",
            ranks=tuple(doubled),
            hosts=tuple(dict.fromkeys(host for hosts in doubled.values() for host in hosts)),
        )
    outside = {number: hosts for number, hosts in claims.items() if not 0 <= number < size}
    if outside:
        yield Problem(
            summary=f"{_numbers(outside)} {verb(outside, 'has', 'have')} no place among {size}: "
            f"nodes are numbered from 0 to {size - 1}",
            fix="number the nodes from 0, or raise --nnodes on all of them",
            ranks=tuple(outside),
            hosts=tuple(dict.fromkeys(host for hosts in outside.values() for host in hosts)),
        )


def _numbers(numbers: dict[int, list[str]] | list[int]) -> str:
    return rank_list(numbers, "node")
