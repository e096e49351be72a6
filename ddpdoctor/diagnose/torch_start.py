"""Starts the import of torch before anything else is loaded: it takes longest, and can run beside all the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.machine.torch_process import start_torch_child

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.child import Child

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")


def start_torch_early(env: Mapping[str, str]) -> Child | None:
    """Start it where this process will read the machine: alone, or as the first on its node. None elsewhere."""
    first = all(env.get(name, "0") == "0" for name in LOCAL_RANKS)
    if not first:
        return None
    try:
        return start_torch_child(env)
    except OSError:
        return None  # the collector tries again, and says what is wrong
