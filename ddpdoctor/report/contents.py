"""Which data of a report is shown by what: a verb names what turns its data into blocks here, once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Content

JOB = "ddpdoctor.report.job:job_content"
CHECKS = "ddpdoctor.report.checklist:checklist_content"
BUILDERS = {
    "results": "ddpdoctor.report.bandwidth.content:bandwidth_content",
    "trial": "ddpdoctor.report.trial:trial_content",
    "diff": "ddpdoctor.report.saved_files:diff_content",
    "rendezvous": "ddpdoctor.report.rendezvous:rendezvous_content",
    "shares": "ddpdoctor.report.shares:shares_content",
    "drawn": "ddpdoctor.report.shares:drawn_content",
    "files": "ddpdoctor.report.checkpoints:checkpoint_content",
    "nodes": CHECKS,
}
"""By the key in ``Report.data``, the first that it has: the module and the function, loaded when they are needed."""


def read_content(report: Report) -> Content:
    """Return what there is to show of a report. Raises ``UserError`` where its data is damaged."""
    key = next((key for key in BUILDERS if key in report.data), "")
    path = BUILDERS.get(key) or (CHECKS if report.job is None else JOB)
    module, _, name = path.partition(":")
    build: Callable[[Report], Content] = getattr(import_module(module), name)
    try:
        return build(report)
    except WrongValue as error:
        problem = f"the report cannot be read: data.{key}.{error}"
        raise UserError(problem, help="The file is damaged: run the check again.") from error
