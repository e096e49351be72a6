"""Exports the metrics of a wrapped job, as ``ddpdoctor status`` reads them. A failure here only prints a message."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ddpdoctor import __version__
from ddpdoctor.cli.output import check_writable, say
from ddpdoctor.launch.run_folder import REPORT_NAME
from ddpdoctor.model.errors import UserError, install_command
from ddpdoctor.model.live import METRICS
from ddpdoctor.recorder.storage.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.launch.placement import WrapOptions
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.live import Metric, Sample

    Send = Callable[[tuple[Sample, ...]], str]  # returns what went wrong, or an empty string

PARTS = ("opentelemetry.sdk.metrics", "opentelemetry.exporter.otlp.proto.http")
DEFAULT_ENDPOINT = "http://localhost:4318"  # that of the SDK
# A pause is at least this many times as long as the reading took, so that reading takes 5 % of a core at most.
LEAST_PAUSE = 20
# Our choice: how long the end of ``wrap`` waits for the last samples to leave. One try to send takes 10 s at most.
END_LIMIT_S = 15.0
READABLE = 0o644  # node_exporter runs as another user


def check_metrics(path: Path | None, env: Mapping[str, str], *, otlp: bool) -> None:
    """Raise ``UserError`` for a file that cannot be written, or if the SDK or the variables rule out sending."""
    if path is not None:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"--metrics-file {path} is not a regular file", help="Choose another file.")
        check_writable(path, "--metrics-file")
        check_writable(path.with_name(path.name + ".part"), "--metrics-file")
    if not otlp:
        return
    try:
        is_installed = all(map(find_spec, PARTS))
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise UserError("--otlp needs OpenTelemetry, which is not installed", help=install_command("otlp"))
    protocol = _otlp_setting(env, "PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        what = f"--otlp sends http/protobuf, and OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol}"
        raise UserError(what, help="Unset it, and give the endpoint for HTTP, usually on port 4318.")
    try:
        address = urlsplit(_otlp_setting(env, "ENDPOINT") or DEFAULT_ENDPOINT)
        is_url = address.scheme in {"http", "https"} and bool(address.hostname) and address.port != 0
    except ValueError:  # such as a port that is no number
        is_url = False
    if not is_url:
        what = "OTEL_EXPORTER_OTLP_ENDPOINT is not a URL that begins with http:// or https://"
        raise UserError(what, help="Give the URL of the collector, such as http://localhost:4318.")


def _otlp_setting(env: Mapping[str, str], name: str) -> str:
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

        # Keep the SDK's own messages off stderr: it has one for each try.
        log = logging.getLogger("opentelemetry")
        log.addHandler(logging.NullHandler())
        log.propagate = False
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
            observed = [partial(self._observe, metric)]
            meter.create_observable_gauge(metric.name, observed, unit=metric.unit, description=metric.help)

    def send(self, samples: tuple[Sample, ...]) -> str:
        """Send all samples. Return what went wrong, without headers and paths (they may be secrets), or ""."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._samples = samples
        data = self._reader.get_metrics_data()
        with contextlib.suppress(Exception):  # the SDK passes some errors of requests on, with the URL in their text
            if data is None or self._exporter.export(data) is MetricExportResult.SUCCESS:
                return ""
        address = urlsplit(_otlp_setting(os.environ, "ENDPOINT") or DEFAULT_ENDPOINT)
        where = address.hostname if address.port is None else f"{address.hostname}:{address.port}"
        return f"--otlp: metrics could not be sent to {where}; ddpdoctor keeps trying"

    def _observe(self, metric: Metric, _options: object) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        return [Observation(sample.value, dict(sample.labels)) for sample in self._samples if sample.metric is metric]


def file_of(path: Path, report_file: Path) -> Path:
    """Return the file of one ``wrap``. All but the first of a job add their number, as they may share a folder."""
    return path if report_file.name == REPORT_NAME else path.with_name(f"{path.stem}-{report_file.stem}{path.suffix}")


@dataclass(slots=True, kw_only=True)
class MetricExport:
    """Exports the metrics of one job."""

    job: WrapOptions
    metrics_file: Path | None = None
    metrics_every_s: float = 15.0
    otlp: bool = False
    end_limit_s: float = END_LIMIT_S
    _folder: Path | None = None
    _report: Report | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _said: set[str] = field(default_factory=set)

    def start(self, folder: Path) -> None:
        """Begin to export what is recorded in a folder, in the background."""
        if self.metrics_file is None and not self.otlp:
            return
        self._folder = folder
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, folder: Path, make_report: Callable[[], Report]) -> None:
        """Export a last time, with the report of the job's end."""
        if self._thread is None:
            return
        self._folder = folder
        try:
            self._report = make_report()
        except Exception as error:  # noqa: BLE001 - metrics must not cost the job its exit status
            self._say("report", f"the last metrics lack the end of the job: {error}")
        self._ended.set()
        self._thread.join(self.end_limit_s)
        if self._thread.is_alive() and self.metrics_file is not None:
            self._export({"file": self._write})  # a collector that does not answer must not cost the file its end

    def _run(self) -> None:
        sends: dict[str, Send] = {}
        try:
            if self.metrics_file is not None:
                sends["file"] = self._write
            if self.otlp:
                sends["otlp"] = OtlpSender(socket.gethostname(), __version__).send
        except Exception as error:  # noqa: BLE001 - metrics must not cost the job or its report
            self._say("", f"no metrics: {type(error).__name__}: {error}")
            return
        is_last = False
        while not is_last:
            is_last = self._ended.is_set()
            took_s = self._export(sends)
            if not is_last:
                self._ended.wait(max(self.metrics_every_s, took_s * LEAST_PAUSE))

    def _export(self, sends: dict[str, Send]) -> float:
        """Export once. Return the seconds of CPU time that reading took."""
        began_s = time.thread_time()
        try:
            samples = self._read()
        except Exception as error:  # noqa: BLE001 - see above
            self._say("read", f"the metrics of this job could not be read: {error}")
            return time.thread_time() - began_s
        took_s = time.thread_time() - began_s
        for name, send in sends.items():
            try:
                problem = send(samples)
            except Exception as error:  # noqa: BLE001 - see above
                problem = f"metrics could not be exported: {type(error).__name__}: {error}"
            if problem:
                self._say(name, problem)
        return took_s

    def _read(self) -> tuple[Sample, ...]:
        from ddpdoctor.diagnose.live import read_samples, read_status

        assert self._folder is not None
        file = self.job.report_file.resolve()
        return read_samples(
            read_status(self._folder, with_others=False), self._report, run=str(file.parent),
            script=self.job.split.script, version=__version__, is_first=file.name == REPORT_NAME,
        )  # fmt: skip

    def _write(self, samples: tuple[Sample, ...]) -> str:
        from ddpdoctor.report.formats import render_metrics

        assert self.metrics_file is not None
        path = file_of(self.metrics_file, self.job.report_file)
        try:
            write_whole(path, render_metrics(samples), mode=READABLE)
        except OSError as error:
            return f"--metrics-file: {path} could not be written: {error.strerror}"
        return ""

    def _say(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            say(sys.stderr, text)
