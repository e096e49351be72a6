"""What a check was about, as lines that stand before its findings: shares of data, checkpoint files, nodes that met."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.checkpoints import checkpoint_lines, is_checkpoints
from ddpdoctor.report.rendezvous import is_rendezvous, rendezvous_lines
from ddpdoctor.report.sharing import is_sharing, sharing_lines

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report


def subject_lines(report: Report) -> list[str]:
    """Return the lines for a report of a verb that has some; none for others."""
    if is_checkpoints(report):
        return checkpoint_lines(report)
    if is_rendezvous(report):
        return rendezvous_lines(report)
    return sharing_lines(report) if is_sharing(report) else []
