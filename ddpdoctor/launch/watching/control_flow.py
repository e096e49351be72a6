"""Reads how control flows through the user's files where ranks went different ways, and in no other job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Judgement

CODES = frozenset({"DD602", "DD603"})
"""The rules that have a use for it."""


def note_control_flow(folder: Path, judgement: Judgement) -> bool:
    """Save it where the judgement asks for it; return whether there is now more to judge by."""
    if not any(finding.code in CODES for finding in judgement.findings):
        return False
    from ddpdoctor.collect.run.control_flow import FILE, save_control_flow
    from ddpdoctor.collect.run.nodes import read_job
    from ddpdoctor.model.errors import UserError

    if (folder / FILE).exists():
        return False
    try:
        return save_control_flow(folder, read_job(folder))
    except UserError:
        return False
