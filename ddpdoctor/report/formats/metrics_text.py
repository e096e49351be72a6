"""Writes metrics as text for Prometheus: for the textfile collector of node_exporter, and valid as OpenMetrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.metrics import Sample

ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


def render_metrics(samples: Iterable[Sample]) -> str:
    """Return the text. Samples of one metric stand together, below its type, and have no time."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.metric.name, []).append(sample)
    lines = []
    for name, those in by_name.items():
        lines += [f"# HELP {name} {those[0].metric.help}", f"# TYPE {name} gauge"]
        lines += [_line(sample) for sample in those]
    return "\n".join([*lines, "# EOF", ""])


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sample.labels)
    return f"{sample.metric.name}{{{labels}}} {sample.value}"


def _escape(text: str) -> str:
    """Escape a label's value. What is not Unicode, as a file name may be, would make the whole file invalid."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(ESCAPES)
