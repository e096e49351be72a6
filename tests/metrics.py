"""Reads metrics as monitoring systems do: Prometheus text, OpenMetrics, OTLP."""

from collections.abc import Iterable
from pathlib import Path

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by the name of the metric and its labels, but for those of every sample."""
COMMON = {"run", "host"}


def parse(text: str) -> Values:
    """Parse a text as Prometheus and as OpenMetrics, which must be the same."""
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"gauge"}
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.timestamp is None for sample in samples)
    assert all(sample.labels.keys() >= COMMON for sample in samples)
    found = by_labels((sample.name, sample.labels, sample.value) for sample in samples)
    strict = [sample for family in openmetrics.text_string_to_metric_families(text) for sample in family.samples]
    assert by_labels((sample.name, sample.labels, sample.value) for sample in strict) == found
    return found


def read(path: Path) -> Values:
    return parse(path.read_text()) if path.exists() else {}


def decode(body: bytes) -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    request.ParseFromString(body)
    return request


def sent(request: ExportMetricsServiceRequest) -> Values:
    """Return what one OTLP request says."""
    found = []
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.gauge.data_points:
            labels = {one.key: one.value.string_value for one in point.attributes}
            value = point.as_double if point.HasField("as_double") else point.as_int
            found.append((metric.name, labels, value))
    return by_labels(found)


def by_labels(samples: Iterable[tuple[str, dict[str, str], float]]) -> Values:
    rows = list(samples)
    found = {(name, tuple(sorted((k, v) for k, v in labels.items() if k not in COMMON))): v for name, labels, v in rows}
    assert len(found) == len(rows), "a sample is double"
    return found


def value(values: Values, name: str, **labels: str) -> float | None:
    return values.get((f"ddpdoctor_{name}", tuple(sorted(labels.items()))))
