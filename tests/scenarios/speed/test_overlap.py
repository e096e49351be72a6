"""At 1 Gbit/s DDP's default buckets leave the reduction to run alone, and smaller ones are hidden by backward."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import JOBS, PATIENT, clean_environment, free_port, hold_to_schema

pytestmark = pytest.mark.usefixtures("preloaded_python")

RATE = "1gbit"
HOSTS = 2


@pytest.fixture(scope="module")
def slow_hosts(hosts: Hosts) -> Hosts:
    """Return hosts that send at 1 Gbit/s at most. The burst is several segments as the kernel hands them on."""
    require("tc")
    for number in range(HOSTS):
        where = ("tc", "-n", hosts.namespace(number), "qdisc", "replace", "dev", "eth0", "root")
        subprocess.run([*where, "tbf", "rate", RATE, "burst", "256kb", "latency", "100ms"], check=True, timeout=20)
    return hosts


def run_on(hosts: Hosts, folder: Path, way: str) -> dict[str, Any]:
    """Run a way of the job with buckets, one rank a host, and return the report of the first host."""
    port = free_port()
    started = [
        hosts.start(
            number, sys.executable, "-m", "ddpdoctor", "wrap", "--speed", *PATIENT, "--nnodes", "2", "--node-rank",
            str(number), "--master-addr", "dd0", "--master-port", str(port), "--nproc-per-node", "1",
            "--report-dir", str(folder / f"n{number}"), str(JOBS / "speed" / "buckets.py"), way,
            env=clean_environment(),
        )
        for number in range(HOSTS)
    ]  # fmt: skip
    for process in started:
        _, stderr = process.communicate(timeout=250)
        print(stderr)
        assert process.returncode == 0, stderr
    report = json.loads((folder / "n0" / "report.json").read_text())
    hold_to_schema(report)
    return dict(report)


def test_buckets_that_leave_when_backward_is_over(slow_hosts: Hosts, tmp_path: Path) -> None:
    report = run_on(slow_hosts, tmp_path, "default")
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == ("bucket-size", [0, 1]), verdict
    assert "bucket_cap_mb=" in verdict["fix"]
    assert {Path(place["file"]).name for place in verdict["where"]} == {"accelerator.py"}


def test_buckets_that_leave_while_backward_computes(slow_hosts: Hosts, tmp_path: Path) -> None:
    report = run_on(slow_hosts, tmp_path, "of_1_mib")
    assert report["verdict"] is None, report["verdict"]
