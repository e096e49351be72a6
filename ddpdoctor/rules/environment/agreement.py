"""DD234 and DD235: variables that must be equal on all ranks, and on all nodes before torchrun starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known
from ddpdoctor.model.rendezvous import is_loopback, text_of
from ddpdoctor.model.variables import must_agree
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.majority import Split, Voice, compare, describe
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.node import Fleet, Node, NodeProcess

WORLD = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HANG = frozenset({"NCCL_ALGO", "NCCL_PROTO"})
"""Each rank chooses the algorithm and protocol of a collective from its own variables. Ranks that choose differently
wait for each other."""
RENDEZVOUS = (
    "TORCHELASTIC_RUN_ID", "PET_RDZV_ID", "PET_NNODES", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)  # fmt: skip
UNSET = ""
MANY_SIDES = 4
"""Up to this many different values are all shown. If there are more, only the first two are."""


@rule(
    "DD234", "ws-same", Severity.WARNING, "A variable differs between ranks but must be equal",
    after=("rdzv-id-same",),
    group=CheckGroup.LAUNCH, needs=("names", "conf_files"),
    reads="WORLD_SIZE, MASTER_ADDR, MASTER_PORT, variables of NCCL and torch that must agree, NCCL's files",
)  # fmt: skip
def check_ws_same(fleet: Fleet) -> Answer:
    """Report variables on which the ranks disagree, and which ranks differ from the majority."""
    processes = list(fleet.processes())
    if not fleet.gathered:
        return skipped("no launcher was seen, so there is only one process")
    if len(processes) < 2:
        return skipped("only one process answered")
    names = (*WORLD, *sorted(must_agree() - set(WORLD)))
    splits = {name: compare(_voice(node, process, name) for node, process in processes) for name in names}
    problems = [_differs(fleet, name, split) for name, split in splits.items() if split is not None]
    world = ", ".join(
        f"{name}={processes[0][1].variables[name]}" for name in WORLD if name in processes[0][1].variables
    )
    return judged(
        [problem for problem in problems if problem is not None],
        f"{len(names)} variables of {len(processes)} ranks" + (f"; {world}" if world else ""),
    )


def _voice(node: Node, process: NodeProcess, name: str) -> Voice[str]:
    """Return a rank's value of a variable. A value that NCCL reads from a file counts as set."""
    value = text_of(process, name)
    if not value and name.startswith("NCCL_"):
        files = known(node.conf_files) or ()
        value = next((file.variables[name] for file in files if file.variables.get(name)), UNSET)
    ranks = (process.rank,) if process.rank is not None else ()
    return Voice(host=node.host, ranks=ranks, value=value)


def _differs(fleet: Fleet, name: str, split: Split[str]) -> Problem | None:
    values = {side.value for side in split.sides}
    if name == "MASTER_ADDR" and _same_host(fleet, values - {UNSET}):
        return None
    return Problem(
        summary=f"{_who_has_what(name, split, by_rank=True)}: {_consequence(name)}",
        evidence=tuple(_files(fleet, name)),
        fix=_fix(name, split),
        severity=_severity(name, values),
        confidence=split.confidence,
        ranks=split.ranks,
        hosts=split.hosts,
    )


def _severity(name: str, values: set[str]) -> Severity:
    if name == "TORCH_DISTRIBUTED_DEBUG":
        return Severity.ERROR if "DETAIL" in {value.upper() for value in values} else Severity.INFO
    return Severity.ERROR if name in WORLD or name in HANG else Severity.WARNING


def _consequence(name: str) -> str:
    if name == "WORLD_SIZE":
        return "the ranks wait for different numbers of ranks"
    if name in WORLD:
        return "the ranks look for different stores"
    if name in HANG:
        return "ranks that choose differently hang in a collective"
    return "it must be the same on all ranks"


def _who_has_what(name: str, split: Split[str], *, by_rank: bool) -> str:
    sides = len(split.sides)
    if sides <= MANY_SIDES:
        return describe(split, name, words=_word, by_rank=by_rank, sign=" is ")
    two = describe(
        replace(split, majority=None, minorities=split.minorities[:2]), "such as", words=_word, by_rank=by_rank
    )
    return f"{name} has {sides} different values, {two}"


def _word(value: str) -> str:
    return value or "unset"


def _fix(name: str, split: Split[str], everywhere: str = "ranks") -> str:
    majority = split.majority.value if split.majority is not None else None
    if majority == UNSET:
        return f"unset {name} on all {everywhere}"
    value = majority or next(side.value for side in reversed(split.minorities) if side.value)
    return f"export {name}={value} on all {everywhere}"


def _files(fleet: Fleet, name: str) -> Iterable[str]:
    for node in fleet.nodes:
        for file in known(node.conf_files) or ():
            if name in file.variables:
                yield f"{file.path} of {node.host} sets {name}"


def _same_host(fleet: Fleet, spellings: set[str]) -> bool:
    """Say whether all spellings of MASTER_ADDR resolve to one host. Each host resolves only its own spelling."""
    if len(spellings) < 2:
        return False
    if all(_means_first(fleet, node, process) for node, process in fleet.processes()):
        return True
    found: list[set[str]] = []
    for node, process in fleet.processes():
        names, host = known(node.names), text_of(process, "MASTER_ADDR")
        if names is None or names.master is None or names.master.name != host:
            return False
        found.append(set(names.master.addresses))
    return bool(set.intersection(*found))


def _means_first(fleet: Fleet, node: Node, process: NodeProcess) -> bool:
    """Say whether MASTER_ADDR is localhost on the first node, or the first node's name on any node."""
    host, first = text_of(process, "MASTER_ADDR"), fleet.nodes[0]
    names = known(first.names)
    called = {first.host, *((names.hostname, names.fqdn, *names.own.addresses) if names is not None else ())}
    return host in called or (node is first and is_loopback(host))


@rule(
    "DD235", "rdzv-id-same", Severity.ERROR, "Nodes have different rendezvous settings",
    after=("port-free", "tcp-store"),
    group=CheckGroup.LAUNCH, needs=(), reads="TORCHELASTIC_RUN_ID, PET_RDZV_ID, PET_NNODES, PET_RDZV_ENDPOINT",
)  # fmt: skip
def check_rdzv_id_same(fleet: Fleet) -> Answer:
    """Report nodes whose torchrun would join a different rendezvous, or wait for a different number of nodes."""
    if not fleet.gathered:
        return skipped("no launcher was seen, so there is only one process")
    processes = list(fleet.processes())
    met = any("TORCHELASTIC_RUN_ID" in process.variables for _, process in processes)
    names = [name for name in RENDEZVOUS[:1] if met] or [
        name for name in RENDEZVOUS if any(text_of(process, name) for _, process in processes)
    ]
    if not names:
        return skipped("torchrun's options are not set by variables (PET_RDZV_ID, PET_NNODES, PET_RDZV_ENDPOINT)")
    splits = {name: compare(_voice(node, process, name) for node, process in processes) for name in names}
    problems = [_other_rendezvous(name, split) for name, split in splits.items() if split is not None]
    first = processes[0][1]
    return judged(problems, ", ".join(f"{name}={text_of(first, name) or 'unset'}" for name in names))


def _other_rendezvous(name: str, split: Split[str]) -> Problem:
    return Problem(
        summary=f"{_who_has_what(name, split, by_rank=False)}: these nodes never meet, and each waits without an error",
        fix=_fix(name, split, "nodes"),
        confidence=split.confidence,
        ranks=split.ranks,
        hosts=split.hosts,
    )
