"""DD233: every rank that the launcher should start is there exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.rank_words import first_names, name_list, rank_list
from ddpdoctor.model.rendezvous import text_of
from ddpdoctor.model.sides import grouped
from ddpdoctor.model.slurm import expand_counts, expand_hosts
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.progress.words import verb
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Fleet, Node, NodeProcess

_BY_BLOCKS = ("", "block", "block:block", "block:cyclic", "block:fcyclic")
"""Values of SLURM_DISTRIBUTION that give a node's tasks consecutive numbers (sbatch(1), --distribution)."""

SHOWN = 4
"""How many ranks are named."""


@rule(
    "DD233", "rank-set", Severity.ERROR, "A rank is missing or duplicated",
    after=("ws-same",),
    group=CheckGroup.LAUNCH, needs=(), reads="the ranks that answered, WORLD_SIZE, PET_NODE_RANK, SLURM_STEP_NODELIST",
)  # fmt: skip
def check_rank_set(fleet: Fleet) -> Answer:
    """Report ranks that did not answer, that two processes claim, or that are too high for the world size."""
    if not fleet.gathered:
        return skipped("no launcher was seen, so there is only one process")
    if fleet.world_size is None:
        return skipped("the launcher does not report the number of ranks")
    problems = [*_missing(fleet, fleet.world_size)]
    if fleet.launcher is Launcher.NNODES:  # it counts nodes, and RANK may be set all the same
        problems += misnumbered(fleet, fleet.world_size)
        return judged(problems, f"{len(fleet.nodes)} of {fleet.world_size} nodes answered")
    problems += [*_twice(fleet, fleet.world_size), *_too_high(fleet, fleet.world_size)]
    ranks = [process.rank for _, process in fleet.processes() if process.rank is not None]
    seen = f"{rank_list(ranks)} of {fleet.world_size} answered" if ranks else "no rank answered"
    return judged(problems, seen)


def _missing(fleet: Fleet, size: int) -> Iterator[Problem]:
    missing = sorted(fleet.missing)
    by_nodes = fleet.launcher is Launcher.NNODES
    if not missing and not by_nodes and sum(1 for _ in fleet.processes()) < size:
        missing = _unclaimed(fleet, size)
    if not missing:
        return
    hosts = () if by_nodes else _expected_hosts(fleet, missing)
    on = f" on {name_list(hosts)}" if hosts else ""
    who = rank_list(missing, "node" if by_nodes else "rank")
    yield Problem(
        summary=f"{who} of {size}{on} did not respond: all others would wait for {verb(missing, 'it', 'them')}",
        evidence=tuple(_whereabouts(fleet, hosts)),
        fix=_fix(hosts),
        ranks=tuple(missing),
        hosts=hosts,
    )


def _unclaimed(fleet: Fleet, size: int) -> list[int]:
    """Return the ranks that no process claims."""
    claimed = {process.rank for _, process in fleet.processes()}
    return [rank for rank in range(size) if rank not in claimed]


def _fix(hosts: tuple[str, ...]) -> str:
    if not hosts:
        return "check on each host that its launcher is running and can reach rank 0's host"
    return f"check that the launcher is running on {name_list(hosts)} and can reach rank 0's host: ssh {hosts[0]}"


def _whereabouts(fleet: Fleet, hosts: tuple[str, ...]) -> Iterator[str]:
    answered = {node.host for node in fleet.nodes}
    silent = [host for host in hosts if host not in answered]
    if silent:
        yield f"no message from {name_list(silent)}"
    if fleet.nodes:
        yield f"these answered: {name_list(tuple(node.host for node in fleet.nodes))}"
    yield from fleet.problems


def _expected_hosts(fleet: Fleet, ranks: list[int]) -> tuple[str, ...]:
    """Return the hosts on which ranks should be, or () if one is not known."""
    by_rank = _slurm_hosts(fleet)
    hosts = [by_rank.get(rank) or _host_between(fleet, rank) for rank in ranks]
    return tuple(dict.fromkeys(host for host in hosts if host is not None)) if None not in hosts else ()


def _slurm_hosts(fleet: Fleet) -> dict[int, str]:
    """Return the host of every task of the step, with the names that the nodes use for themselves."""
    first = next((process for _, process in fleet.processes()), None)
    if first is None or text_of(first, "SLURM_DISTRIBUTION") not in _BY_BLOCKS or "RANK" in first.variables:
        return {}
    try:
        hosts = expand_hosts(text_of(first, "SLURM_STEP_NODELIST"))
        counts = expand_counts(text_of(first, "SLURM_STEP_TASKS_PER_NODE") or text_of(first, "SLURM_TASKS_PER_NODE"))
    except ValueError:
        return {}
    if len(hosts) != len(counts):
        return {}
    known_as = {node.host.partition(".")[0]: node.host for node in fleet.nodes}
    each = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
    return {rank: known_as.get(host, host) for rank, host in enumerate(each)}


def _host_between(fleet: Fleet, rank: int) -> str | None:
    """Return the host whose ranks lie on both sides of a rank, because launchers number node by node."""
    for node in fleet.nodes:
        if node.ranks and node.ranks[0] < rank < node.ranks[-1]:
            return node.host
    return None


def _twice(fleet: Fleet, size: int) -> Iterator[Problem]:
    """Yield one problem for all ranks that several processes claim."""
    claims = grouped((process.rank, (node, process)) for node, process in fleet.processes() if process.rank is not None)
    doubled = {rank: those for rank, those in sorted(claims.items()) if len(those) > 1}
    if not doubled:
        return
    unclaimed = [rank for rank in _unclaimed(fleet, size) if rank not in fleet.missing]
    hosts = tuple(dict.fromkeys(node.host for those in doubled.values() for node, _ in those))
    yield Problem(
        summary=f"{rank_list(doubled)} {verb(doubled, 'is', 'are')} used by more than one process, so the job hangs",
        evidence=(*_claims(doubled), *([f"no process has {rank_list(unclaimed)}"] if unclaimed else [])),
        fix="give each process its own rank: use torchrun, or set RANK=$SLURM_PROCID in each srun task",
        ranks=tuple(doubled),
        hosts=hosts,
    )


def _claims(doubled: dict[int, list[tuple[Node, NodeProcess]]]) -> Iterator[str]:
    """Yield which processes claim the first few ranks, a few for each."""
    for rank, those in list(doubled.items())[:SHOWN]:
        yield f"rank {rank}: {first_names([f'process {process.pid} on {node.host}' for node, process in those])}"


def _too_high(fleet: Fleet, size: int) -> Iterator[Problem]:
    outside = [(node, rank) for node in fleet.nodes for rank in node.ranks if not 0 <= rank < size]
    if outside:
        ranks = [rank for _, rank in outside]
        yield Problem(
            summary=f"{rank_list(ranks)} {verb(ranks, 'is', 'are')} out of range: ranks range from 0 to {size - 1}",
            fix="number the ranks from 0, or raise WORLD_SIZE on all ranks",
            ranks=tuple(sorted(set(ranks))),
            hosts=tuple(dict.fromkeys(node.host for node, _ in outside)),
        )


NODE_RANK = "PET_NODE_RANK"
"""torchrun reads --node-rank from this variable. It stands for that option here too."""


def claimed_numbers(fleet: Fleet) -> dict[int, list[str]]:
    """Return the hosts that claim each node number, by number. Hosts without a number are left out."""
    numbers = ((node.first.number(NODE_RANK), node.host) for node in fleet.nodes if node.processes)
    return dict(sorted(grouped((number, host) for number, host in numbers if number is not None).items()))


def misnumbered(fleet: Fleet, size: int) -> Iterator[Problem]:
    """Yield node numbers that several nodes claim, and numbers that are not below ``size``."""
    claims = claimed_numbers(fleet)
    doubled = {number: hosts for number, hosts in claims.items() if len(hosts) > 1}
    if doubled:
        nobody = [number for number in range(size) if number not in claims]
        yield Problem(
            summary=(
                f"{_numbers(doubled)} {verb(doubled, 'is', 'are')} used by more than one host, so the job hangs or "
                "fails"
            ),
            evidence=(
                *(f"node {number}: {name_list(tuple(hosts))}" for number, hosts in doubled.items()),
                *([f"no host has {_numbers(nobody)}"] if nobody else []),
            ),
            fix=f"give each host its own number, --node-rank 0 to {size - 1}; in a Slurm step, $SLURM_NODEID",
            ranks=tuple(doubled),
            hosts=tuple(dict.fromkeys(host for hosts in doubled.values() for host in hosts)),
        )
    outside = {number: hosts for number, hosts in claims.items() if not 0 <= number < size}
    if outside:
        yield Problem(
            summary=f"{_numbers(outside)} {verb(outside, 'is', 'are')} out of range: nodes range from 0 to {size - 1}",
            fix="number the nodes from 0, or raise --nnodes on all nodes",
            ranks=tuple(outside),
            hosts=tuple(dict.fromkeys(host for hosts in outside.values() for host in hosts)),
        )


def _numbers(numbers: dict[int, list[str]] | list[int]) -> str:
    return rank_list(numbers, "node")
