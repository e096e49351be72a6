"""Findings of real jobs in the logs that their scripts wrote: TensorBoard, W&B, MLflow."""

import json
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import metrics
from tests.metrics import value
from tests.needs import need_module
from tests.scenarios.running import PATIENT, Ran, finish, kill_job, run, start, wait_for
from tests.web import Receiver

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning"),
]
FILES_ALLOWED = {"MLFLOW_ALLOW_FILE_STORE": "true"}
"""A server would need MLflow's large package."""


def fail(tmp_path: Path, *loggers: str, options: tuple[str, ...] = ("--log-findings",), **env: str) -> Ran:
    """Run the job that logs and fails."""
    for logger in loggers:
        need_module(logger, extra=logger)
    ran = run(
        "logs_and_fails", tmp_path / "run", *PATIENT, *options, ranks=2, args=(str(tmp_path / "logs"), *loggers),
        **FILES_ALLOWED, **env,
    )  # fmt: skip
    assert ran.report["verdict"]["code"] == "DD604"
    return ran


def test_the_report_is_a_text_beside_the_scripts_own_events(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ran = fail(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    assert "--log-findings" not in ran.stderr
    (ours,) = logs.glob("*.ddpdoctor")
    seen = EventAccumulator(str(logs))
    seen.Reload()
    assert [event.step for event in seen.Scalars("loss")] == [0, 1, 2]
    assert seen.Tags()["tensors"] == ["ddpdoctor/report/text_summary"] or seen.Tags()["tensors"] == ["ddpdoctor/report"]
    (event,) = seen.Tensors(seen.Tags()["tensors"][0])
    text = event.tensor_proto.string_val[0].decode()
    assert "DD604 crash, rank 1" in text
    page = markdown_to_safe_html(text)
    assert "example.org) sample" in page
    assert "<b>" not in page
    assert 'href="https://example.org' not in page
    assert ours.stat().st_size < 100_000


def read_wandb(folder: Path) -> tuple[dict[str, str], int]:
    """Return the summary that a run's file in offline mode has of us, and the run's exit status."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    records = [Record.FromString(record) for record in read_leveldb_log(file.read_bytes()[7:], 7)]
    updates = [item for record in records for item in record.summary.update if item.key.startswith("ddpdoctor/")]
    (status,) = [record.exit.exit_code for record in records if record.HasField("exit")]
    return {item.key: json.loads(item.value_json) for item in updates}, status


def read_leveldb_log(data: bytes, offset: int) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format, in which W&B keeps its own; ``offset``: where the data begin."""
    block, header, first_and_last = 32768, struct.Struct("<IHB"), {1, 4}
    at, record = 0, b""
    while at + header.size <= len(data):
        left = block - (at + offset) % block
        if left < header.size:
            at += left
            continue
        _, size, kind = header.unpack_from(data, at)
        record += data[at + header.size : at + header.size + size]
        at += header.size + size
        if kind in first_and_last:
            yield record
            record = b""


def test_the_report_is_in_the_runs_of_wandb_and_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    ran = fail(tmp_path, "wandb", "mlflow")
    assert "--log-findings" not in ran.stderr
    verdict = ran.report["verdict"]["summary"] + " (DD604)"

    (theirs, ours) = sorted((tmp_path / "logs" / "wandb").glob("offline-run-*-run7*"), key=os.path.getmtime)
    assert (read_wandb(theirs), read_wandb(ours)) == (({}, 0), ({"ddpdoctor/verdict": verdict}, 1))
    (file,) = (ours / "files" / "media" / "html" / "ddpdoctor").iterdir()
    page = file.read_text()
    assert "DD604 crash, rank 1" in page
    assert ("&lt;b&gt;no" in page, "<b>" in page) == (True, False)

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "logs" / "mlflow").as_uri())
    (tracked,) = client.search_runs(["0"])
    assert (tracked.data.tags["ddpdoctor.verdict"], tracked.info.status) == (verdict, "FINISHED")
    report = Path(client.download_artifacts(tracked.info.run_id, "ddpdoctor/report.md"))
    assert "DD604 crash, rank 1" in report.read_text()


def test_a_job_without_findings_adds_nothing(tmp_path: Path) -> None:
    need_module("tensorboard", extra="tensorboard")
    logs = tmp_path / "logs"
    options = (*PATIENT, "--log-findings")
    ran = run("logs_and_fails", tmp_path / "run", *options, ranks=2, args=(str(logs), "healthy", "tensorboard"))
    assert (ran.status, ran.report["findings"], "--log-findings" in ran.stderr) == (0, [], False)
    assert len(list(logs.iterdir())) == 1


def test_without_the_options_nothing_is_added_written_or_sent(tmp_path: Path) -> None:
    with Receiver(read=metrics.decode) as receiver:
        fail(tmp_path, "tensorboard", options=(), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.base)
    assert len(list((tmp_path / "logs").iterdir())) == 1
    assert receiver.received == []
    assert not list(tmp_path.rglob("*.prom"))


# Metrics: a file for Prometheus and OTLP, while the job runs and at its end.


def test_a_job_that_trains_is_seen_in_the_file_and_by_the_collector(tmp_path: Path) -> None:
    file, run_dir = tmp_path / "job.prom", tmp_path / "run"
    with Receiver(read=metrics.decode) as receiver:
        process = start(
            "trains_until", run_dir, "--hang-timeout", "500", "--metrics-file", str(file), "--metrics-every", "300ms",
            "--otlp", ranks=2, args=(str(tmp_path),), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.base,
        )  # fmt: skip
        try:
            assert wait_for(lambda: (value(metrics.read(file), "rank_steps", rank="1") or 0) > 8)
            assert wait_for(lambda: value(metrics.read(file), "replicas_equal_up_to_step"))
            now = metrics.read(file)
            (tmp_path / "end").touch()
            ran = finish(process, run_dir)
        finally:
            kill_job(run_dir)
    assert value(now, "job_status", status="running") == 1
    assert value(now, "job_ranks") == 2
    for rank in "01":
        assert value(now, "rank_up", rank=rank) == 1
        assert (value(now, "rank_step_time_seconds", rank=rank) or 0) > 0.01
        assert 0 <= (value(now, "rank_waiting_ratio", rank=rank) or 0) <= 1
        assert (value(now, "rank_memory_bytes", rank=rank) or 0) > 50 * 2**20
    at_end = metrics.read(file)
    assert (ran.status, value(at_end, "job_exit_status")) == (0, 0)
    assert value(at_end, "job_status", status="finished") == 1
    assert [value(at_end, "rank_up", rank=rank) for rank in "01"] == [0, 0]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert not list(tmp_path.glob("*.part"))
    assert metrics.sent(receiver.received[-1]) == at_end
    assert len(receiver.received) > 2


def test_what_cannot_be_sent_or_logged_is_said_once_and_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "job.prom"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        ran = run(
            "crash_exit_status", tmp_path / "run", *PATIENT, "--metrics-file", str(file), "--metrics-every", "200ms",
            "--otlp", "--log-findings", ranks=2,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_TIMEOUT="1",
        )  # fmt: skip
    seen = metrics.read(file)
    assert ran.stderr.count(f"--otlp: metrics could not be sent to 127.0.0.1:{port}; ddpdoctor keeps trying") == 1
    assert ran.stderr.count("--log-findings: the script did not log to TensorBoard, W&B or MLflow") == 1
    assert "opentelemetry" not in ran.stderr.lower()
    assert ran.report["verdict"]["code"] == "DD604"
    assert value(seen, "job_status", status="failed") == 1
    assert value(seen, "job_exit_status") == ran.status != 0
    assert value(seen, "findings", code="DD604", kind="crash", severity="error") == 1
