"""Maps the data of a report to the function that turns it into blocks. Each command has one entry."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Content

JOB = "ddpdoctor.report.verbs.job:job_content"
CHECKS = "ddpdoctor.report.verbs.checks:checklist_content"
# Module and function by key in ``Report.data``. The first key that the report has counts. Modules load on demand.
BUILDERS = {
    "scaling": "ddpdoctor.report.verbs.tuning:scaling_content",
    "tune": "ddpdoctor.report.verbs.tuning:tune_content",
    "results": "ddpdoctor.report.bandwidth.content:bandwidth_content",
    "trial": "ddpdoctor.report.verbs.trial:trial_content",
    "diff": "ddpdoctor.report.verbs.checks:diff_content",
    "rendezvous": "ddpdoctor.report.verbs.rendezvous:rendezvous_content",
    "shares": "ddpdoctor.report.verbs.data:shares_content",
    "drawn": "ddpdoctor.report.verbs.data:drawn_content",
    "files": "ddpdoctor.report.verbs.checks:checkpoint_content",
    "comparison": "ddpdoctor.report.verbs.speed:comparison_content",
    "run_differences": "ddpdoctor.report.verbs.speed:run_diff_content",
    "evidence": "ddpdoctor.report.verbs.job:evidence_content",
    "nodes": CHECKS,
}


def read_content(report: Report) -> Content:
    """Return the content of a report. Raises ``UserError`` if its data is damaged."""
    key = next((key for key in BUILDERS if key in report.data), "")
    path = BUILDERS.get(key) or (CHECKS if report.job is None else JOB)
    module, _, name = path.partition(":")
    build: Callable[[Report], Content] = getattr(import_module(module), name)
    try:
        return build(report)
    except WrongValue as error:
        problem = f"the report cannot be read: data.{key}.{error}"
        raise UserError(problem, help="The file is damaged: run the check again.") from error
