"""Metrics of real jobs: a file for Prometheus and OTLP, while the job runs and at its end."""

import socket
import stat
from pathlib import Path

import pytest

from tests import metrics
from tests.metrics import value
from tests.scenarios.running import PATIENT, finish, kill_job, run, start, wait_for
from tests.web import Receiver

pytestmark = pytest.mark.usefixtures("preloaded_python")


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
    assert ran.stderr.count(f"--otlp: metrics could not be sent to 127.0.0.1:{port}; ddpdoctor goes on trying") == 1
    assert ran.stderr.count("--log-findings: the script did not log to TensorBoard, W&B or MLflow") == 1
    assert "opentelemetry" not in ran.stderr.lower()
    assert ran.report["verdict"]["code"] == "DD604"
    assert value(seen, "job_status", status="failed") == 1
    assert value(seen, "job_exit_status") == ran.status != 0
    assert value(seen, "findings", code="DD604", kind="crash", severity="error") == 1
