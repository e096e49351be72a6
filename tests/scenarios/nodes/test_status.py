"""``status`` over two hosts: what one of them can see of the other, with a common folder and without."""

import json

import pytest

from tests import metrics
from tests.metrics import value
from tests.scenarios.nodes.running import DDPDOCTOR, ENDLESS, IMPATIENT, Running
from tests.scenarios.running import wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")


def until(hosts, folder, condition):
    """Ask on the first host until the status is as wanted, and return it."""
    seen = {}

    def holds():
        seen.update(status_of(hosts, 0, folder))
        return condition(seen)

    assert wait_for(holds), seen
    return seen


def status_of(hosts, number, folder, *options):
    return json.loads(hosts.run(number, *DDPDOCTOR, "status", str(folder), "--format", "json", *options))


def test_without_a_common_folder_the_first_host_knows_what_the_others_wrap_says(hosts, tmp_path):
    job = Running(hosts, tmp_path, "nothing", ENDLESS)
    job.wait_until_it_trains()
    seen = until(hosts, job.folders[0], lambda seen: any(one["alive"] for one in seen["unseen"]))

    assert [(rank["rank"], rank["host"], rank["lives"]) for rank in seen["ranks"]] == [(0, "dd0", True)]
    (node,) = seen["unseen"]
    assert (node["number"], node["host"], node["presence"], node["ranks"], node["alive"]) == (1, "dd1", "here", [1], 1)
    assert (seen["world_size"], seen["state"]) == (2, "running")
    shown = hosts.run(0, *DDPDOCTOR, "status", str(job.folders[0]))
    assert "rank 1 on node 1 (dd1) cannot be seen from here: run `ddpdoctor status` there; its `wrap` says: 1 " in shown
    assert "rank 0 cannot be seen from here" in hosts.run(1, *DDPDOCTOR, "status", str(job.folders[1]))

    report = status_of(hosts, 0, job.folders[0], "--dump")
    assert [(row["rank"], row["host"], bool(row["stack"])) for row in report["ranks"]] == [
        (0, "dd0", True), (1, "dd1", True),
    ]  # fmt: skip
    assert all(process.poll() is None for process in job.processes)


def test_in_a_common_folder_all_ranks_are_seen(hosts, tmp_path):
    job = Running(hosts, tmp_path, "nothing", ENDLESS, shares=True)
    job.wait_until_it_trains()
    seen = until(hosts, job.folders[0], lambda seen: len(seen["ranks"]) == 2 and not seen["unseen"])

    assert [(rank["host"], rank["lives"], rank["memory_bytes"] is not None) for rank in seen["ranks"]] == [
        ("dd0", True, True), ("dd1", True, False),
    ]  # fmt: skip


# Metrics of a job over two hosts that share a folder: no sample is double.


def test_each_host_writes_its_own_ranks_and_the_first_the_job(hosts, tmp_path):
    wanted = ("--metrics-file", str(tmp_path / "job.prom"), "--metrics-every", "200ms")
    job = Running(hosts, tmp_path, "stuck", 40, shares=True, options=(*IMPATIENT, *wanted))
    member, _ = job.finish()
    first, second = (tmp_path / name for name in ("job.prom", "job-node-1.prom"))
    seen = metrics.read(first)

    assert sorted(tmp_path.glob("*.prom*")) == [second, first]
    assert (member.status, member.report["job"]["status"]) == (124, "hung")
    assert value(seen, "job_status", status="hung") == 1
    assert value(seen, "job_exit_status") == 124
    assert value(seen, "findings", code="DD601", kind="stuck", severity="error") == 1
    assert [value(seen, "rank_up", rank=rank) for rank in "01"] == [0, None]
    assert {dict(labels).get("rank") for _, labels in metrics.read(second)} == {"1"}
    runs = {text.split('run="')[1].split('"')[0] for text in (first.read_text(), second.read_text())}
    assert runs == {str(job.folders[0])}
