"""A bench that cannot go on ends with what it had measured, and names who is to blame; a healthy one is left alone."""

import os
import signal

import pytest

from tests.scenarios.bandwidth.running import BENCH, FAULTS, QUICK, ROOT, Ran, bench, finish, start
from tests.scenarios.hosts import lent_hosts, require
from tests.scenarios.running import clean_environment, free_port, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")

OPTIONS = (*QUICK, "--mode", "latency", "--format", "json")
HANG = ("--hang-timeout", "5s")


class Held:
    """A bench of which one rank is held up at its second size."""

    def __init__(self, folder, rank, *options, ranks=2):
        self.file = folder / "held"
        own = (*BENCH, "--nproc-per-node", str(ranks))
        self.process = start(*own, *OPTIONS, *options, **held_by(self.file, rank, "sleep"))

    def end(self):
        return finish(self.process)


def held_by(file, rank, how):
    return {"PYTHONPATH": str(FAULTS), "HELD_FILE": str(file), "HELD_RANK": str(rank), "HELD_HOW": how}


def line(mark):
    lines = (FAULTS / "sitecustomize.py").read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(mark))


def check_partial(done: Ran, status: str, exit_status: int):
    """Hold what every bench has that stopped at its second size; return the findings about who is to blame."""
    report = done.report
    assert done.status == exit_status, done.stderr
    assert report["job"]["status"] == report["data"]["stop"]["ending"] == status
    assert [one["size_bytes"] for one in report["data"]["results"]] == [1024]
    return [finding for finding in report["findings"] if finding["code"].startswith("DD6")]


def test_a_rank_that_never_calls_is_named_with_its_line(tmp_path):
    done = Held(tmp_path, 1, *HANG, ranks=3).end()

    (finding,) = check_partial(done, "hung", 1)
    assert (finding["kind"], finding["ranks"], finding["confidence"]) == ("stuck", [1], "high")
    assert [(place["rank"], place["line"]) for place in finding["where"]] == [(1, line("# HELD"))]
    assert [row["state"] for row in done.report["ranks"]] == [
        "in all_reduce", "on its way into all_reduce", "in all_reduce",
    ]  # fmt: skip
    assert done.report["verdict"] == finding


def test_ctrl_c_leaves_what_was_measured(tmp_path):
    held = Held(tmp_path, 1)
    assert wait_for(held.file.exists)
    held.process.send_signal(signal.SIGINT)
    done = held.end()

    assert check_partial(done, "interrupted", 130) == []
    assert done.report["data"]["stop"]["signal"] == "SIGINT"
    assert done.stderr == ""


@pytest.mark.cold  # the level of torch's own warnings is read once
def test_a_network_that_drops_what_is_sent_is_distinguished_from_a_late_rank(tmp_path):
    require("iptables")
    file, port = tmp_path / "held", str(free_port())
    with lent_hosts(2) as hosts:
        started = []
        for number in range(2):
            variables = held_by(file, 1, "wait") | {"PYTHONPATH": f"{FAULTS}{os.pathsep}{ROOT}"}
            variables |= {"RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": hosts.names[0]}
            env = clean_environment(**variables, MASTER_PORT=port, GLOO_SOCKET_IFNAME="eth0")
            started.append(hosts.start(number, *BENCH, *OPTIONS, *HANG, env=env, start_new_session=True))
        assert wait_for(file.exists)
        # What the ranks say to each other over the server still arrives, as where a firewall knows its port alone.
        for way in ("--sport", "--dport"):
            hosts.run(1, "iptables", "-A", "INPUT", "-p", "tcp", way, port, "-j", "ACCEPT")
        hosts.run(1, "iptables", "-A", "INPUT", "-s", hosts.address(0), "-j", "DROP")
        file.unlink()
        done = [finish(process) for process in started]

    (finding,) = check_partial(done[0], "hung", 1)
    assert (finding["kind"], finding["ranks"], finding["hosts"]) == ("transport", [0, 1], list(hosts.names))
    assert "all_reduce float32 2 KiB" in finding["summary"]
    assert (done[1].status, done[1].stdout, done[1].stderr) == (1, "", "")


@pytest.mark.nightly
def test_a_healthy_bench_is_left_alone_however_little_patience_there_is():
    options = ("--collective", "all", "--pairs", "--by-node", "--hang-timeout", "20s", "--format", "json")
    done = bench(*QUICK, *options, ranks=3)

    assert done.report["job"]["status"] == "finished"
    assert done.report["data"]["stop"] is None
    assert [one for one in done.report["findings"] if one["code"].startswith("DD6")] == []
