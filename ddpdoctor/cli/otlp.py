"""Sends metrics over OTLP with the OpenTelemetry SDK, which is loaded only if ``--otlp`` is given."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.live import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.live import Metric, Sample

PARTS = ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http")
DEFAULT_ENDPOINT = "http://localhost:4318"
"""That of the SDK."""


def check_otlp(env: Mapping[str, str]) -> None:
    """Raise ``UserError`` if the SDK is missing, or if the variables ask for a protocol that is not sent."""
    if not all(map(_is_installed, PARTS)):
        raise UserError("--otlp needs OpenTelemetry, which is not installed", help="pip install 'ddpdoctor[otlp]'")
    protocol = _read(env, "PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        raise UserError(
            f"--otlp sends http/protobuf, and OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol}",
            help="Unset it, and give the endpoint for HTTP, which mostly has port 4318.",
        )
    try:
        address = urlsplit(_read(env, "ENDPOINT") or DEFAULT_ENDPOINT)
        is_url = address.scheme in {"http", "https"} and bool(address.hostname) and address.port != 0
    except ValueError:  # such as a port that is no number
        is_url = False
    if not is_url:
        raise UserError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is not a URL that begins with http:// or https://",
            help="Give the URL of the collector, such as http://localhost:4318.",
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _read(env: Mapping[str, str], name: str) -> str:
    return env.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}") or env.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


class OtlpSender:
    """Sends samples to the endpoint that the OTEL_* variables name."""

    def __init__(self, host: str, version: str) -> None:
        """Make the instruments. Nothing is sent before the first call of ``send``."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource
        from requests import Session

        _silence_log()
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        attributes = {"host.name": host, **({} if named else {"service.name": "ddpdoctor"})}
        self._samples: tuple[Sample, ...] = ()
        # Of its own, requests follows a redirect with a GET that carries no metrics, and calls its answer a success.
        session = None if any(name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ) else Session()
        if session is not None:
            session.max_redirects = 0
        self._exporter = OTLPMetricExporter(session=session)
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], resource=Resource.create(attributes), shutdown_on_exit=False)
        meter = provider.get_meter("ddpdoctor", version)
        for metric in METRICS:
            meter.create_observable_gauge(
                metric.name, [partial(self._observe, metric)], unit=metric.unit, description=metric.help
            )

    def send(self, samples: tuple[Sample, ...]) -> str:
        """Send all samples. Return what went wrong, without headers and paths (they may be secrets), or ""."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._samples = samples
        data = self._reader.get_metrics_data()
        with contextlib.suppress(Exception):  # the SDK passes some errors of requests on, with the URL in their text
            if data is None or self._exporter.export(data) is MetricExportResult.SUCCESS:
                return ""
        address = urlsplit(_read(os.environ, "ENDPOINT") or DEFAULT_ENDPOINT)
        where = address.hostname if address.port is None else f"{address.hostname}:{address.port}"
        return f"--otlp: metrics could not be sent to {where}; ddpdoctor goes on trying"

    def _observe(self, metric: Metric, _options: object) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        return [Observation(one.value, dict(one.labels)) for one in self._samples if one.metric is metric]


def _silence_log() -> None:
    """Keep the SDK's own messages off stderr: it has one for each try."""
    log = logging.getLogger("opentelemetry")
    log.addHandler(logging.NullHandler())
    log.propagate = False
