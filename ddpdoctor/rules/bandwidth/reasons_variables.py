"""Variables that could explain a low bandwidth, from the environment and from NCCL's own files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.launch import find_variable
from ddpdoctor.model.reading import known
from ddpdoctor.rules.bandwidth.reasons import Effect, Weighed, weigh
from ddpdoctor.rules.rdma_ports import label, network_ports, words
from ddpdoctor.rules.settings import find_setting
from ddpdoctor.rules.variable_flaws import find_danger, find_wrong_value, read_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import NodeProcess
    from ddpdoctor.rules.bandwidth.reasons import BenchNode, BenchView
    from ddpdoctor.rules.settings import Setting


_Harm = tuple[Effect, str, str, "Setting"]
"""How much a setting explains, in words, with its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableEffect:
    """What a variable affects."""

    effect: Effect
    inside: bool = True
    """Whether it affects data within a host."""
    between: bool = True
    """Whether it affects data between hosts."""
    gloo: bool = False


_SMALL = VariableEffect(effect=Effect.SMALL)
DANGERS = {
    "NCCL_P2P_DISABLE": VariableEffect(effect=Effect.OTHER_WAY, between=False),
    "NCCL_P2P_LEVEL": VariableEffect(effect=Effect.OTHER_WAY, between=False),
    "NCCL_SHM_DISABLE": VariableEffect(effect=Effect.OTHER_WAY, between=False),
    "NCCL_ALGO": VariableEffect(effect=Effect.LIMIT),
    "NCCL_PROTO": VariableEffect(effect=Effect.LIMIT),
    "NCCL_NET_GDR_LEVEL": VariableEffect(effect=Effect.LIMIT, inside=False),
    "NCCL_MULTI_RANK_GPU_ENABLE": VariableEffect(effect=Effect.LIMIT),
    "TORCH_DISTRIBUTED_DEBUG": VariableEffect(effect=Effect.LIMIT, gloo=True),
    "TORCH_NCCL_NAN_CHECK": VariableEffect(effect=Effect.LIMIT),
    "NCCL_NVLS_ENABLE": VariableEffect(effect=Effect.SMALL, between=False),
    "CUDA_LAUNCH_BLOCKING": _SMALL,
    "TORCH_NCCL_BLOCKING_WAIT": _SMALL,
    "NCCL_CHECK_POINTERS": _SMALL,
    "NCCL_DEBUG": _SMALL,
}
"""Variables with a value that harms what the bench measures (the column ``danger`` of model/variables.tsv). The check
ib-disabled covers NCCL_IB_DISABLE and NCCL_NET, except for what it leaves to nccl-conf."""
CHANNEL_LIMITS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_RINGS", "NCCL_MAX_CTAS")
FEW_CHANNELS = 8
"""Our choice: on NVLink NCCL opens 12 channels (V100) or more; over a few network cards it may need no more than
this."""


def variable_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield variables with a value that slows the bench, for each rank that has it."""
    for place in view.places:
        for process in place.node.processes:
            ranks = () if process.rank is None else (process.rank,)
            for effect, text, source, setting in _judge(view, place, process):
                yield weigh(effect, place, text, source, fix=setting.removal, ranks=ranks)


def _judge(view: BenchView, place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    measured = read_context(place.node, process)
    for name, bearing in DANGERS.items():
        setting, variable = find_setting(place.node, process, name), find_variable(name)
        if setting is None or variable is None or not _bears(bearing, view, place):
            continue
        flaw = find_danger(variable, setting.value, measured)
        if flaw is not None:
            yield bearing.effect, flaw.summary, _source(setting), setting
    if view.nccl:
        yield from _few_channels(place, process)
        yield from _misread(place, process)
    if view.nccl and view.between_hosts:
        yield from _off_in_a_file(place, process)


def _bears(bearing: VariableEffect, view: BenchView, place: BenchNode) -> bool:
    inside, between = len(place.members) > 1, view.between_hosts
    return (view.nccl or bearing.gloo) and ((bearing.inside and inside) or (bearing.between and between))


def _off_in_a_file(place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    setting, rdma = find_setting(place.node, process, "NCCL_IB_DISABLE"), known(place.node.rdma)
    if setting is None or setting.path is None or not setting.number or rdma is None:
        return
    ports = [label(device, port) for device, port in network_ports(place.node, rdma)]
    if ports:
        text = f"{setting} disables the RDMA network on {words(ports)}: NCCL will use TCP sockets"
        yield Effect.OTHER_WAY, text, _source(setting), setting


def _few_channels(place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    for name in CHANNEL_LIMITS:
        setting = find_setting(place.node, process, name)
        if setting is not None and setting.number is not None and 0 < setting.number < FEW_CHANNELS:
            text = f"{setting}: NCCL can open at most {setting.number} channels, but normally opens 12 to 32 on NVLink"
            yield Effect.LIMIT, text, _source(setting), setting


def _misread(place: BenchNode, process: NodeProcess) -> Iterator[_Harm]:
    """Yield tuning values that NCCL misreads: it takes NCCL_BUFFSIZE=4M as 4 bytes."""
    measured = read_context(place.node, process)
    for name in process.variables:
        variable, setting = find_variable(name), find_setting(place.node, process, name)
        if variable is None or setting is None or (variable.component, variable.kind) != ("nccl", "tune"):
            continue
        flaw = find_wrong_value(variable, setting.value, measured)
        if flaw is not None:
            yield Effect.LIMIT, flaw.summary, "DD112 env-value", setting


def _source(setting: Setting) -> str:
    return f"DD115 nccl-conf ({setting.path})" if setting.path else "DD114 env-danger"
