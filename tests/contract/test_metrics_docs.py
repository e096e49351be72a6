"""The page of metrics and the dashboard have the metrics of the code."""

import json
import re
from pathlib import Path
from typing import Any

from ddpdoctor.diagnose.metrics import STATUSES
from ddpdoctor.model.metrics import COMMON_LABELS, METRICS

DOCS = Path(__file__).parents[2] / "docs"
UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio", "": ""}
LABELS = {*COMMON_LABELS, *(label for one in METRICS for label in one.labels)}


def test_the_page_has_each_metric_with_its_labels_and_meaning() -> None:
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(ddpdoctor_\w+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(one.name, ", ".join(f"`{label}`" for label in one.labels), one.help) for one in METRICS]
    assert all(f"`{status.value}`" in page for status in STATUSES)


def test_names_have_the_prefix_and_end_with_their_unit() -> None:
    assert all(one.name.startswith("ddpdoctor_") and one.name.endswith(UNITS[one.unit]) for one in METRICS)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    dashboard: dict[str, Any] = json.loads((DOCS / "examples" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"ddpdoctor_\w+", query)}
    assert asked == {one.name for one in METRICS}
    legends = "".join(target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"])
    assert set(re.findall(r"{{(\w+)}}", legends)) <= LABELS
    by = ", ".join(re.findall(r"(?:by|on) \(([^)]*)\)", " ".join(queries)))
    assert set(by.split(", ")) <= LABELS
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
