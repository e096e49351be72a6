"""Metrics of a job over two hosts that share a folder: no sample is double."""

import pytest

from tests import metrics
from tests.metrics import value
from tests.scenarios.nodes.test_basic import Running

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_each_host_writes_its_own_ranks_and_the_first_the_job(hosts, tmp_path):
    wanted = ("--metrics-file", str(tmp_path / "job.prom"), "--metrics-every", "200ms")
    job = Running(hosts, tmp_path, "stuck", 40, shares=True, torchrun=wanted)
    (status, _, report), _ = job.finish(0), job.finish(1)
    first, second = (tmp_path / name for name in ("job.prom", "job-node-1.prom"))
    seen = metrics.read(first)

    assert sorted(tmp_path.glob("*.prom*")) == [second, first]
    assert (status, report["job"]["status"]) == (124, "hung")
    assert value(seen, "job_status", status="hung") == 1
    assert value(seen, "job_exit_status") == 124
    assert value(seen, "findings", code="DD601", kind="stuck", severity="error") == 1
    assert [value(seen, "rank_up", rank=rank) for rank in "01"] == [0, None]
    assert {dict(labels).get("rank") for _, labels in metrics.read(second)} == {"1"}
    runs = {text.split('run="')[1].split('"')[0] for text in (first.read_text(), second.read_text())}
    assert runs == {str(job.folders[0])}
