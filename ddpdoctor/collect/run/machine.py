"""Saves facts about this machine's network and GPUs, which are read when a collective does not complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.run.evidence import save
from ddpdoctor.collect.system import ReadingPlan, System, read_node

if TYPE_CHECKING:
    from pathlib import Path

FILE = "machine.json"
SECTIONS = frozenset({
    "conf_files", "gpus", "kernel_log", "limits", "names", "network", "pci", "rdma", "stuck_processes",
})  # fmt: skip
"""The facts that decide how data travel between ranks. Reading them imports no torch and gives the GPUs no work."""
LIMIT_S = 6.0
"""Our choice: a healthy node takes one second to read. A section that hangs is reported as such."""


def save_machine(folder: Path, sections: frozenset[str] = SECTIONS) -> None:
    """Read these sections of this machine and write machine.json, whole or not at all; raises OSError."""
    system = System()
    node = read_node(system, ReadingPlan(sections=sections, limit_s=LIMIT_S), (read_process(system),))
    save(folder / FILE, node)
