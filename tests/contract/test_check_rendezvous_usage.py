"""Wrong use of check-rendezvous, an interrupted one, and a node that nobody joins: statuses, and what is said."""

import json
import signal
import socket
import subprocess
import sys
import time

import jsonschema
import pytest

from tests import forking
from tests.scenarios.running import SCHEMA, clean_environment, free_port

COMMAND = (sys.executable, "-m", "ddpdoctor", "check-rendezvous")
LIMIT_S = 250
WRONG = {
    "nothing says which nodes": ([], "nothing says which nodes belong to the job"),
    "no number of this node": (["--nnodes", "2", "--master-addr", "node0"], "needs --node-rank"),
    "no place to meet": (["--nnodes", "2", "--node-rank", "0"], "needs --master-addr or --rdzv-endpoint"),
    "not a number of nodes": (
        ["--nnodes", "two", "--node-rank", "0", "--master-addr", "a"],
        "is not a number of nodes",
    ),
    "no range of ports": (["--port-range", "9"], "--port-range 9 is not a range of ports"),
    "not a duration": (["--timeout", "soon"], "--timeout"),
}


def run(*arguments):
    return forking.run("-m", "ddpdoctor", "check-rendezvous", *arguments, env=clean_environment())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name):
    arguments, words = WRONG[name]
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    done = run("--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--report-dir", str(taken))
    assert done.returncode == 2
    assert str(taken) in done.stderr


def by_hand(port):
    return ["--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port", str(port)]


def test_it_ends_at_once_when_it_is_interrupted():
    own = free_port()
    process = subprocess.Popen(
        [*COMMAND, *by_hand(free_port()), "--exchange-port", str(own), "--timeout", "600s"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean_environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    wait_for_listener(own)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    # Python dies of the signal itself where it came while a dataclass was made; a shell says 130 of that too.
    assert process.returncode in {130, -signal.SIGINT}, stderr
    assert stdout == ""
    assert "Traceback" not in stderr


def wait_for_listener(port):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail(f"nobody listens on port {port}")


def test_a_node_that_nobody_joins_names_who_is_absent(tmp_path):
    more = ("--exchange-port", str(free_port()))
    done = run(*by_hand(free_port()), *more, "--timeout", "1s", "--format", "json", "--report-dir", str(tmp_path))
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    # By hand all nodes have the same options: an address that means each host itself is why nobody comes.
    assert report["verdict"]["kind"] == "master-loopback"
    (absent,) = [found for found in report["findings"] if found["kind"] == "rank-set"]
    assert absent["ranks"] == [1]
    assert done.returncode == 1, done.stderr
    assert json.loads((tmp_path / "report.json").read_text()) == report
