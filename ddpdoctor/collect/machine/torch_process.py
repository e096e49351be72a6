"""Starts a Python that imports torch. This module imports almost nothing, so that the child starts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.child import Child

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE = "ddpdoctor.probes.torch_facts"


def start_torch_child(env: Mapping[str, str]) -> Child:
    """Start the child; callers do this before their own heavy imports, or when they need the facts. Raises OSError."""
    return Child(("-m", PROBE), env)
