"""Metrics of jobs that are made up: how they are written and sent, and what is refused."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.cli.metrics import MetricExport, MetricOptions, OtlpSender, check_metrics, file_of
from ddpdoctor.diagnose.live import JobLabels, read_samples
from ddpdoctor.launch.run_folder import write_run_file
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Finding, JobStatus, JobSummary, Report, Severity
from ddpdoctor.model.live import METRICS, JobNow, Liveness, RankNow, ReplicasNow
from ddpdoctor.report.formats import render_metrics
from tests.metrics import decode, parse, read, sent, value
from tests.scenarios.running import clean_environment
from tests.unit.launch.test_session import options
from tests.web import Receiver

RANK = RankNow(
    rank=0, host="a", pid=1, lives=True, trains=True, state="trains", since_s=None, where=None, step=12, step_ms=250.0,
    waits_share=0.25, epoch=2, batch=13, memory_bytes=1024,
)  # fmt: skip
NOW = JobNow(
    run="record", state=Liveness.RUNNING, host="a", started_at="1970-01-01T00:01:00+00:00", running_s=1.0,
    exit_status=None, attempt=1, world_size=2,
    ranks=(RANK, replace(RANK, rank=1, trains=False, since_s=9.5, step_ms=None, waits_share=None)), waits=(),
    waited_for=(), replicas=ReplicasNow(equal_up_to=8, at="optimizer step", compared=4), unseen=(), reported="",
)  # fmt: skip
FINDING = Finding(
    code="DD610", kind="straggler", severity=Severity.WARNING, confidence=Confidence.HIGH, summary="rank 1 is slow"
)
ENDED = Report(
    command=("wrap",), started_at="", ended_at="",
    job=JobSummary(world_size=2, nnodes=1, status=JobStatus.FINISHED, exit_status=0), verdict=FINDING,
    findings=(FINDING, FINDING), checks=(), ranks=(),
)  # fmt: skip
MEASURED = JobLabels(run="/runs/1", script="train.py", version="1", is_first=True)


def test_a_job_that_runs_has_all_metrics_but_those_of_its_end() -> None:
    found = parse(render_metrics(read_samples(NOW, None, MEASURED)))
    assert {name for name, _ in found} == {one.name for one in METRICS} - {
        "ddpdoctor_findings", "ddpdoctor_job_exit_status",
    }  # fmt: skip
    assert value(found, "rank_steps", rank="0") == 12
    assert value(found, "rank_step_time_seconds", rank="0") == 0.25
    assert value(found, "rank_step_time_seconds", rank="1") is None
    assert [value(found, "rank_idle_seconds", rank=rank) for rank in "01"] == [0, 9.5]
    assert [value(found, "job_status", status=status) for status in ("running", "finished")] == [1, 0]
    assert value(found, "job_start_time_seconds") == 60
    assert value(found, "replicas_equal_up_to_step") == 8
    assert value(found, "replicas_differ") == 0


def test_at_its_end_there_are_findings_and_a_status() -> None:
    found = parse(render_metrics(read_samples(NOW, ENDED, MEASURED)))
    assert {name for name, _ in found} == {one.name for one in METRICS}
    assert value(found, "findings", code="DD610", kind="straggler", severity="warning") == 2
    assert [value(found, "job_status", status=status) for status in ("running", "finished")] == [0, 1]
    assert value(found, "job_exit_status") == 0


def test_a_further_node_writes_only_its_ranks_and_a_file_of_its_own(tmp_path: Path) -> None:
    found = read_samples(NOW, ENDED, replace(MEASURED, is_first=False))
    assert {sample.metric.name.startswith("ddpdoctor_rank_") for sample in found} == {True}
    assert file_of(Path("m/a.prom"), tmp_path / "report.json") == Path("m/a.prom")
    assert file_of(Path("m/a.prom"), tmp_path / "node-3.json") == Path("m/a-node-3.prom")


@pytest.mark.parametrize("name", ['a "b"', "a\\b", "a\nb", "a}b # EOF", "\udcff.py", "\x1b[0m"])
def test_a_name_from_the_job_cannot_damage_the_text(name: str) -> None:
    found = parse(render_metrics(read_samples(NOW, None, replace(MEASURED, script=name))))
    shown = name.encode("utf-8", "replace").decode()
    assert value(found, "job_info", script=shown, version="1") == 1


def test_the_same_is_sent_over_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver(read=decode) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=s3cret")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
        sender = OtlpSender("a", "1")
        samples = read_samples(NOW, ENDED, MEASURED)
        assert sender.send(samples[:1]) == ""
        assert sender.send(samples) == ""
    assert receiver.headers[0]["x-key"] == "s3cret"
    first, second = receiver.received
    assert len(sent(first)) == 1
    assert sent(second) == parse(render_metrics(samples))
    resource = {one.key: one.value.string_value for one in second.resource_metrics[0].resource.attributes}
    assert (resource["service.name"], resource["host.name"], resource["team"]) == ("ddpdoctor", "a", "vision")
    units = {one.name: one.unit for one in second.resource_metrics[0].scope_metrics[0].metrics}
    assert units["ddpdoctor_rank_memory_bytes"] == "By"


def test_a_collector_that_refuses_is_named_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Receiver(answers=(403,), read=decode) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{receiver.base}/s3cret")
        said = OtlpSender("a", "1").send(read_samples(NOW, None, MEASURED))
    address = receiver.base.partition("//")[2]
    assert said == f"--otlp: metrics could not be sent to {address}; ddpdoctor goes on trying"
    assert capfd.readouterr() == ("", "")


def test_a_redirect_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as inner, Receiver(answers=(302,), read=decode, location=inner.url) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.base)
        said = OtlpSender("a", "1").send(read_samples(NOW, None, MEASURED))
    assert "metrics could not be sent" in said
    assert (len(receiver.received), inner.gotten) == (1, 0)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "asks for grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "is not a URL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:s3cret/"}, "is not a URL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[localhost/"}, "is not a URL"),
    ],
)
def test_variables_that_cannot_work_are_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_metrics(MetricOptions(otlp=True), variables)


def test_a_pipe_is_refused_because_it_would_be_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no regular file"):
        check_metrics(MetricOptions(metrics_file=tmp_path / "pipe"), {})


def test_a_collector_that_never_answers_does_not_cost_the_file_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, file = options(tmp_path, "train.py"), tmp_path / "job.prom"
    write_run_file(tmp_path, job, "2026-01-02T03:04:05+00:00", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        export = MetricExport(options=MetricOptions(metrics_file=file, otlp=True), job=job, end_limit_s=0.1)
        export.start(tmp_path)
        with silent.accept()[0]:
            assert value(read(file), "job_status", status="running") == 1
            export.finish(tmp_path, lambda: ENDED)
            assert value(read(file), "job_status", status="finished") == 1
    assert export._thread is not None
    export._thread.join(20)


def test_without_opentelemetry_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("")
    (tmp_path / "train.py").write_text("open('started', 'w')")
    command = [sys.executable, "-m", "ddpdoctor", "wrap", "--otlp", "train.py"]
    environment = clean_environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'ddpdoctor[otlp]'" in done.stderr
    assert not (tmp_path / "started").exists()
