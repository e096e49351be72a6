"""Builds the report of `check-checkpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.reports import check_report
from ddpdoctor.model.checkpoint import Checkpoints, ReadState
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from ddpdoctor.model.checkpoint import FileSeen
    from ddpdoctor.model.findings import Report

VERB = "check-checkpoint"


def checkpoint_report(seen: Checkpoints, command: tuple[str, ...], started_at: str) -> Report:
    """Judge checkpoints and return the report."""
    data = {"verb": VERB, "files": [*map(_about, seen.files)]}
    return check_report(rules_of("checkpoints"), {Checkpoints: [seen]}, data, command, started_at)


def _about(one: FileSeen) -> dict[str, Any]:
    """Return a file's data for the report, without digests and without the list of its tensors."""
    contents = one.contents
    return {
        "path": one.path,
        "size_bytes": one.size_bytes,
        "form": one.form.value,
        "state": "damaged" if one.damaged and one.state is ReadState.WHOLE else one.state.value,
        "checksums": one.checksums.value,
        "tensors": None if contents is None else len(contents.tensors),
        "parts": [] if contents is None else [part.value for part in contents.parts],
        "weights": []
        if contents is None
        else [{"key": one.where, "tensors": len(one.tensors)} for one in contents.weights],
        "values_looked_at": one.values is not None,
        "not_finite": None if one.values is None else len(one.values),
    }
