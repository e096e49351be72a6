"""DD306: no two ranks use the same GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.reading import known
from ddpdoctor.model.sides import grouped
from ddpdoctor.model.visible_devices import VARIABLE
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.devices import device_of, keys_of, sees_its_own, visible_to
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.gpus import Gpus
    from ddpdoctor.model.node import Fleet, Node, NodeProcess

NAMED = 4
"""How many shared devices are named one by one."""
SHARING_ALLOWED = "NCCL_MULTI_RANK_GPU_ENABLE"
HOST_ID = "NCCL_HOSTID"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A rank on a device."""

    node: Node
    process: NodeProcess
    device: str


@rule(
    "DD306", "dup-gpu", Severity.ERROR, "Several ranks use the same GPU",
    group=CheckGroup.GPUS, needs=("gpus",), reads="CUDA_VISIBLE_DEVICES, LOCAL_RANK, UUIDs of NVML",
)  # fmt: skip
def check_dup_gpu(fleet: Fleet) -> Answer:
    """Report ranks that use the same GPU."""
    if not fleet.gathered:
        return skipped("there is only one process")
    readings = fleet.each(lambda node: node.gpus)
    uses = [use for node, gpus in readings for use in _uses(node, gpus)]
    if not uses:
        return skipped("the GPUs of the ranks are unknown")
    by_device = grouped((use.device, use) for use in uses)
    shared = [those for those in by_device.values() if len(those) > 1]
    seen = f"{len(uses)} ranks on {len(by_device)} GPUs"
    return judged([_problem(shared)] if shared else [], seen)


def _uses(node: Node, gpus: Gpus) -> list[_Use]:
    values = {process.variables.get(VARIABLE) for process in node.processes}
    if values == {None} and len(gpus.devices) == 1:
        return []  # a machine with one GPU: gpu-count compares it with the ranks
    found = []
    for process in node.processes:
        device = device_of(process, gpus)
        if process.rank is not None and device is not None and _is_unmistakable(process, gpus):
            found.append(_Use(node=node, process=process, device=device))
    return found


def _is_unmistakable(process: NodeProcess, gpus: Gpus) -> bool:
    """Say whether a device that a process names means the same to the process that read NVML on its node."""
    if not sees_its_own(process):
        return True
    return all(not entry.isdecimal() for entry in visible_to(process, gpus).entries or ("0",))


def _problem(shared: list[list[_Use]]) -> Problem:
    ranks = tuple(sorted({use.process.rank for uses in shared for use in uses if use.process.rank is not None}))
    named = [f"{_rank_words(uses)} on {_device_words(uses[0])}" for uses in shared[:NAMED]]
    more = [f"and {len(shared) - NAMED} more GPUs"] if len(shared) > NAMED else []
    allowed = all(_is_allowed(uses) for uses in shared)
    first = shared[0][0].process
    refuses = "" if allowed else ", which NCCL does not allow"
    return Problem(
        summary=f"Several ranks use one GPU{refuses}: {'; '.join([*named, *more])}",
        evidence=(f"rank {first.rank}: {_reason(first)}: {shared[0][0].device}",),
        fix=f"set the same {VARIABLE} with all GPUs for every rank on a node, and call "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) in the script',
        severity=Severity.WARNING if allowed else None,
        ranks=ranks,
        hosts=tuple(dict.fromkeys(use.node.host for uses in shared for use in uses)),
    )


def _is_allowed(uses: list[_Use]) -> bool:
    """Say whether NCCL lets these ranks share: allowed by a variable, or disguised as ranks of different hosts."""
    if all(use.process.variables.get(SHARING_ALLOWED) == "1" for use in uses):
        return True
    hosts = {use.process.variables.get(HOST_ID) for use in uses}
    return None not in hosts and len(hosts) == len(uses)


def _reason(process: NodeProcess) -> str:
    return f"{VARIABLE}={process.variables.get(VARIABLE, '(not set)')}, local rank {process.local_rank}"


def _rank_words(uses: list[_Use]) -> str:
    return rank_list(use.process.rank for use in uses if use.process.rank is not None)


def _device_words(use: _Use) -> str:
    gpus = known(use.node.gpus)
    keys = keys_of(gpus) if gpus is not None else ()
    name = f"GPU {keys.index(use.device)}" if use.device in keys else use.device
    return f"{name} of {use.node.host}"
