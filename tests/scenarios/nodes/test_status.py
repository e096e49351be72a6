"""``status`` over two hosts: what one of them can see of the other, with a common folder and without."""

import json

import pytest

from tests.scenarios.nodes.test_basic import DDPDOCTOR, ENDLESS, Running
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
