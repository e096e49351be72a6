"""Starts a Python that imports torch. Imports next to nothing itself, so as to start at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.child import Child

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE = "ddpdoctor.probes.torch_facts"


def start_torch_child(env: Mapping[str, str]) -> Child:
    """Start the child, before heavy imports of one's own or when its facts are needed; raises OSError."""
    return Child(("-m", PROBE), env)
