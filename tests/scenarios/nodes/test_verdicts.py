"""Jobs over hosts: whichever node reports, the culprit on another one is named, with its host; one report of all."""

import json
import shutil
import signal
from functools import partial

import pytest

from tests.scenarios.hosts import Hosts, require
from tests.scenarios.nodes.running import DDPDOCTOR, ENDLESS, IMPATIENT, JOB, Running
from tests.scenarios.running import finish, free_port, has_called, job_pids, start, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")

HOSTS = 3
job_of = partial(Running, world=HOSTS, shares=True, ranks=True)
"""A job of one rank a host, which have the same --report-dir."""


def line_of(fault: str) -> list[int]:
    lines = JOB.read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith(f"# FAULT {fault}")]


FAULTS = {"deadlock": (2, [0, 1], 124), "exit-hang": (2, [1], 0)}
"""By kind, which is also what the job is reported to do wrong: nodes, ranks to blame, exit status of the first."""


@pytest.mark.parametrize("kind", FAULTS)
def test_the_culprit_on_another_node_is_named(hosts, tmp_path, kind):
    world, blamed, status = FAULTS[kind]
    options = IMPATIENT[:2] if kind == "deadlock" else IMPATIENT
    first, *others = job_of(hosts, tmp_path, kind, 40, world=world, options=options).finish()

    assert first.named == (kind, blamed, [f"dd{number}" for number in blamed]), first.verdict
    assert "on dd" in first.verdict["summary"]
    places = {place["line"] for place in first.verdict["where"]}
    assert not line_of(kind) or places & set(line_of(kind)), first.verdict
    # On a busy machine the first rank is not at its end when the job is stopped.
    assert first.status in {status, *((124,) if kind == "exit-hang" else ())}, first.stderr
    rows = [(row["rank"], row["host"]) for row in first.report["ranks"]]
    assert rows == [(number, f"dd{number}") for number in range(world)]
    # What the first node found is reported to all.
    assert all(other.named == first.named for other in others)


def test_a_network_that_loses_everything_between_two_nodes_is_no_fault_of_a_rank(hosts, tmp_path):
    require("nft")
    job = job_of(hosts, tmp_path, "nothing", ENDLESS)
    job.wait_until_it_trains()
    with hosts.filtered(1, f"ip saddr {hosts.address(2)} drop"):
        first, *others = job.finish()

    assert first.named == ("transport", [0, 1, 2], ["dd0", "dd1", "dd2"]), first.verdict
    seen = " ".join(first.verdict["evidence"])
    assert "data from rank 1 to rank 2 is not acknowledged" in seen or "data from rank 2 to rank 1" in seen, seen
    assert "no interface has that address" not in seen, seen
    assert first.verdict["fix"].startswith("packets between "), first.verdict
    assert [other.status for other in others] == [124, 124]


def isolate(hosts: Hosts, number: int) -> None:
    hosts.run(number, "nft", "add table inet dd; add chain inet dd in { type filter hook input priority 0; }; "
              "add chain inet dd out { type filter hook output priority 0; }; "
              "add rule inet dd in iif != lo drop; add rule inet dd out oif != lo drop")  # fmt: skip


def test_a_node_that_is_cut_off_while_it_trains(hosts, tmp_path):
    require("nft")
    job = job_of(hosts, tmp_path, "nothing", ENDLESS)
    job.wait_until_it_trains()
    job.wait_until_nodes_know_each_other()
    isolate(hosts, 1)
    try:
        first, cut_off, other = job.finish()
    finally:
        hosts.run(1, "nft", "delete table inet dd")

    assert first.named == ("killed", [1], ["dd1"]), first.verdict
    assert "dd1 died or was cut off" in first.verdict["summary"]
    assert other.named == first.named
    # Of three nodes the one that reaches none of the others knows that it is itself.
    assert (cut_off.verdict["kind"], cut_off.verdict["hosts"]) == ("killed", ["dd1"]), cut_off.verdict
    assert "this node (dd1) is cut off: dd0 and dd2 do not respond" in cut_off.verdict["summary"]
    assert [member.status for member in (first, cut_off, other)] == [124, 124, 124]


# Hosts without a common folder make one report, which is drawn again offline.


def test_a_rank_that_stands_still_on_the_other_host(hosts, tmp_path):
    job = Running(hosts, tmp_path, "stuck", 40)
    first, other = job.finish()
    assert (first.status, other.status, first.named) == (124, 124, ("stuck", [1], ["dd1"]))
    assert (first.report["job"]["nnodes"], [row["host"] for row in first.report["ranks"]]) == (2, ["dd0", "dd1"])
    assert "DD601 stuck, rank 1 on dd1" in first.stderr
    # The other host has its own ranks, the verdict on all, and says in a line where the rest is.
    assert other.verdict == first.verdict
    assert [row["rank"] for row in other.report["ranks"]] == [1]
    own_lines = [line for line in other.stderr.splitlines() if line.startswith("ddpdoctor: ")]
    assert len(own_lines) == 1, own_lines
    assert f"dd0:{job.folders[0]}" in own_lines[0]
    assert not (job.folders[1] / "report.json").exists()

    # What the first gathered is all it takes to judge again, elsewhere.
    shutil.rmtree(job.folders[1])
    kept = job.folders[0].rename(tmp_path / "kept")
    (kept / "report.json").unlink()
    again = json.loads(hosts.run(0, *DDPDOCTOR, "report", "--format", "json", str(kept)))
    assert (again["verdict"]["kind"], again["verdict"]["hosts"]) == ("stuck", ["dd1"])
    assert [row["host"] for row in again["ranks"]] == ["dd0", "dd1"]


@pytest.mark.parametrize("shares", [True, False], ids=["a shared folder", "the job's store"])
def test_another_way_is_taken_where_the_port_is_closed(hosts, tmp_path, shares):
    port = free_port()
    with hosts.filtered(0, f"tcp dport {port + 1} drop"):
        job = Running(hosts, tmp_path, "stuck", 40, shares=shares, port=port)
        first, other = job.finish()
    assert (first.status, other.status, first.named) == (124, 124, ("stuck", [1], ["dd1"]))
    assert [row["host"] for row in first.report["ranks"]] == ["dd0", "dd1"]
    assert other.verdict == first.verdict
    assert f"dd0:{job.folders[0]}" in other.stderr


def test_a_report_is_there_before_a_job_that_takes_its_time_has_ended(tmp_path):
    process = start("ignores_sigterm", tmp_path, "--hang-timeout", "200", ranks=2)
    assert wait_for(lambda: has_called(tmp_path, "barrier"))
    process.send_signal(signal.SIGTERM)
    # torchrun gives its ranks half a minute.
    assert wait_for((tmp_path / "report.json").exists)
    assert len(job_pids(tmp_path)) >= 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["job"]["status"] == "interrupted"
    assert len(report["ranks"]) == 2
    process.send_signal(signal.SIGTERM)
    assert finish(process, tmp_path).report["job"]["status"] == "interrupted"
