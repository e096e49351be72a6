"""Reads, when a collective does not complete, what this machine's network and GPUs look like; saves and loads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.this_process import read_process
from ddpdoctor.collect.node import ReadingPlan, read_node
from ddpdoctor.collect.run.evidence import DAMAGED, load_json
from ddpdoctor.collect.system import System
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.node import Node
from ddpdoctor.recorder.storage.files import write_whole

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
    write_whole(folder / FILE, json.dumps(encode(node)))


def load_machine(folder: Path) -> Node | None:
    """Return what was saved, or None where nothing was, or it cannot be read."""
    try:
        return decode(Node, load_json(folder / FILE))
    except DAMAGED:
        return None
