"""Small reports, and what a document draws of them."""

from ddpdoctor.model.findings import Confidence, Finding, JobStatus, JobSummary, Report, Severity
from ddpdoctor.report.blocks import Grid, read_content

FINISHED = JobSummary(world_size=4, nnodes=1, status=JobStatus.FINISHED, exit_status=0)


def report(*findings, job=None, checks=(), **data):
    return Report(
        command=("ddpdoctor",), started_at="2026-01-02T03:04:05.000+00:00", ended_at="2026-01-02T03:04:07.500+00:00",
        job=job, verdict=findings[0] if findings else None, findings=findings, checks=tuple(checks), ranks=(),
        data=data, tool_version="1.2.3",
    )  # fmt: skip


def finding(code, kind="", severity=Severity.ERROR, **more):
    return Finding(code=code, kind=kind, severity=severity, confidence=Confidence.HIGH, summary=f"{code} it is", **more)


def pictures(one):
    return list(read_content(one).pictures)


def texts(grid):
    """The names of the columns, then each row with its name."""
    return [
        grid.columns,
        *((name, *(cell.text for cell in row)) for name, row in zip(grid.rows, grid.cells, strict=True)),
    ]


def only(one):
    (grid,) = pictures(one)
    assert isinstance(grid, Grid)
    assert all(len(row) == len(grid.columns) for row in grid.cells)
    return grid
