"""Reads the facts of a node. Collectors read the sections in parallel, each with a time limit."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.model.node import Node
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Collection

    from ddpdoctor.collect.child import ChildProcess
    from ddpdoctor.collect.system import System
    from ddpdoctor.model.node import NodeProcess

LIMIT_S = 20.0
"""Our choice: what can hang has a shorter limit of its own. On a machine with twenty processes per core, reading a few
files took eight seconds."""
TORCH_LIMIT_S = 60.0
"""Our choice: a cold import from a network file system takes this long on a busy cluster."""
TRIAL_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """What to read, and how."""

    sections: frozenset[str]
    deep: bool = False
    use_torch: bool = True
    """If False, torch is not imported, and versions come from package metadata."""
    head: str | None = None
    """The full name of rank 0's host, if known."""
    torch_child: ChildProcess | None = None
    """A child that was started earlier; if None, the collector starts one."""
    limit_s: float | None = None
    """Upper limit for every section; if None, each section has only its own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Names the function that reads a section; it takes the system and the plan, and returns the section.

    It raises ``NotRead`` if the section is absent or denied. Any other exception is a bug and becomes an ``Unread``.
    """

    module: str
    function: str
    limit_s: float = LIMIT_S
    alone: bool = False
    """Whether it runs after all others have ended, because they would disturb it."""


COLLECTORS = {
    "conf_files": Collector(module="ddpdoctor.collect.software", function="read_conf_files"),
    "software": Collector(module="ddpdoctor.collect.software", function="read_software"),
    "torch": Collector(module="ddpdoctor.collect.software", function="read_torch", limit_s=TORCH_LIMIT_S),
    "limits": Collector(module="ddpdoctor.collect.limits", function="read_limits"),
    "clock": Collector(module="ddpdoctor.collect.limits", function="read_clock"),
    "names": Collector(module="ddpdoctor.collect.network", function="read_names"),
    "network": Collector(module="ddpdoctor.collect.network", function="read_network"),
    "gpus": Collector(module="ddpdoctor.collect.gpus", function="read_gpus", limit_s=45.0),
    "kernel_log": Collector(module="ddpdoctor.collect.kernel", function="read_kernel_log"),
    "stuck_processes": Collector(module="ddpdoctor.collect.kernel", function="read_stuck"),
    "gpu_trial": Collector(module="ddpdoctor.collect.gpus", function="read_gpu_trial", limit_s=TRIAL_LIMIT_S),
    "pci": Collector(module="ddpdoctor.collect.kernel", function="read_pci"),
    "rdma": Collector(module="ddpdoctor.collect.rdma", function="read_rdma"),
    "load": Collector(module="ddpdoctor.collect.limits", function="read_load", alone=True),
}
"""The collectors by section. Each has shorter limits for its own look-ups, commands and children, so that a dead server
costs one fact and not the whole section."""


SECTIONS_FOR_BENCH = frozenset({
    "conf_files", "gpus", "limits", "load", "names", "network", "pci", "rdma", "software",
})  # fmt: skip
"""The facts that can explain a low bandwidth. Reading them imports no torch and gives the GPUs no work."""


def read_node(system: System, plan: ReadingPlan, processes: tuple[NodeProcess, ...]) -> Node:
    """Read the planned sections of a node; a section that does not answer in time becomes an ``Unread``."""
    together = [name for name in plan.sections if not COLLECTORS[name].alone]
    found = _read(system, plan, together)
    for name in sorted(plan.sections.difference(together)):
        found |= _read(system, plan, [name])
    return Node(host=system.calls.hostname(), processes=processes, **found)


def _read(system: System, plan: ReadingPlan, sections: Collection[str]) -> dict[str, Any]:
    """Read sections in parallel, the slowest first: those with child processes run while we read the others."""
    most_s = math.inf if plan.limit_s is None else plan.limit_s
    limits = {name: min(COLLECTORS[name].limit_s, most_s) for name in sections}
    ordered = sorted(sections, key=lambda name: -COLLECTORS[name].limit_s)
    replies = ask_side_by_side({name: partial(_read_section, name, system, plan) for name in ordered}, limits)
    return {
        name: Unread(why=Why.TIMEOUT, reason=f"{name} did not answer within {limits[name]:.0f} s")
        if reply.timed_out
        else reply.value
        for name, reply in replies.items()
    }


def _read_section(name: str, system: System, plan: ReadingPlan) -> Any:
    collector = COLLECTORS[name]
    try:
        return getattr(importlib.import_module(collector.module), collector.function)(system, plan)
    except NotRead as missing:
        return missing.unread
    except Exception as error:  # noqa: BLE001 - one failing collector must not stop the others
        return Unread(why=Why.ERROR, reason=f"{name}: {type(error).__name__}: {error}")
