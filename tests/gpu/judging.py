"""What the tests ask of a job's report."""

import importlib.util
from collections.abc import Callable
from typing import Any

from tests.gpu.running import JOBS, Done
from tests.scenarios.running import hold_to_schema, marked_lines

Ran = Callable[[str], Done]


def report_of(done: Done) -> dict[str, Any]:
    """Return a job's report, held to the schema where the machine has what that takes."""
    report = done.report
    assert report, f"no report; exit status {done.status}\n{done.stderr[-3000:]}"
    if importlib.util.find_spec("jsonschema") is not None:
        hold_to_schema(report)
    return report


def assert_blamed(done: Done, kind: str, ranks: list[int], script: str, fault: str = "") -> dict[str, Any]:
    """Fail unless the verdict blames these ranks for this, each at a line that the script marks; return the verdict.

    A script with several faults marks each by its name.
    """
    verdict = report_of(done)["verdict"]
    assert verdict is not None, f"no verdict\n{done.stderr[-3000:]}"
    assert (verdict["kind"], verdict["ranks"]) == (kind, ranks), verdict
    marked = set(marked_lines(script, f"FAULT {fault}".rstrip(), JOBS))
    first = {place["rank"]: place["line"] for place in reversed(verdict["where"])}
    assert sorted(first) == ranks, verdict
    assert set(first.values()) <= marked, verdict
    return dict(verdict)


def assert_silent(done: Done) -> dict[str, Any]:
    """Fail unless the job finished, nothing was found, and no part of the recorder failed; return the report."""
    report = report_of(done)
    assert done.status == 0, done.stderr[-3000:]
    assert report["verdict"] is None, report["verdict"]
    assert report["job"]["status"] == "finished"
    assert_recorded(report)
    return report


def assert_recorded(report: dict[str, Any]) -> None:
    """Fail where a part of the recorder failed in some rank."""
    defects = [finding for finding in report["findings"] if finding["code"] == "DD901"]
    assert not defects, defects


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of each check."""
    return {check["id"]: check["outcome"] for check in report["checks"]}


def assert_looked_at(done: Done) -> None:
    """Fail unless the job was silent, and replicas and gradients were looked at."""
    found = outcomes(assert_silent(done))
    assert {found[kind] for kind in ("param-drift", "grad-drift", "nonfinite-grad", "optimizer-drift")} == {"passed"}, (
        found
    )
