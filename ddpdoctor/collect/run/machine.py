"""Reads, when a collective does not complete, what this machine's network and GPUs look like; saves and loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.this_process import read_process
from ddpdoctor.collect.node import ReadingPlan, read_node
from ddpdoctor.collect.run.evidence import load, save
from ddpdoctor.collect.system import System
from ddpdoctor.model.node import Node

if TYPE_CHECKING:
    from pathlib import Path

FILE = "machine.json"
SECTIONS = frozenset({
    "conf_files", "gpus", "kernel_log", "limits", "names", "network", "pci", "rdma", "stuck_processes",
})  # fmt: skip
"""What decides how data get from rank to rank. Nothing of it imports torch or gives the GPUs work."""
LIMIT_S = 6.0
"""Ours: the job hangs already; to read a healthy node takes a second, and what hangs itself is said to."""


def save_machine(folder: Path) -> None:
    """Read this machine and write machine.json, whole or not at all; raises OSError."""
    system = System()
    node = read_node(system, ReadingPlan(sections=SECTIONS, limit_s=LIMIT_S), (read_process(system),))
    save(folder / FILE, node)


def load_machine(folder: Path) -> Node | None:
    """Return what was saved, or None where nothing was, or it cannot be read."""
    return load(Node, folder / FILE)
