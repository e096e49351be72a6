"""All ranks look, rank 0 reports: under the real torchrun, on two hosts, and under a real Slurm."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from typing import Any

import jsonschema
import pytest

from ddpdoctor.exchange.clocks import KEY
from ddpdoctor.exchange.store import wait_for
from ddpdoctor.exchange.wire import NO_TOKEN, open_client
from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import SCHEMA, cell_of, clean_environment, free_port, grids_of
from tests.scenarios.slurm import Slurm

pytestmark = pytest.mark.usefixtures("preloaded_python")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
CHECK_ENV = (sys.executable, "-m", "ddpdoctor", "check-env", "--format", "json")
CHEAP = ("rank-set", "ws-same", "version-same", "clock", "mtu", "shm")
"""Checks of which the reading takes no time."""
LIMIT_S = 250


def read_report(stdout: str) -> dict[str, Any]:
    """Return the one report that there is to be on stdout."""
    report = json.loads(stdout)
    jsonschema.validate(report, SCHEMA)
    return dict(report)


def finding(report, kind):
    (found,) = [one for one in report["findings"] if one["kind"] == kind]
    return found


def outcome(report, kind):
    return next(check["outcome"] for check in report["checks"] if check["id"] == kind)


def torchrun(*arguments, script=("-m", "ddpdoctor"), **env):
    """Run check-env in two ranks on this machine."""
    command = [*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", *script, *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        env=clean_environment(**env),
    )  # fmt: skip


def test_two_ranks_make_one_report():
    done = torchrun("check-env", "--format", "json", *CHEAP, "--fail-on", "never")
    report = read_report(done.stdout)

    assert report["data"]["launcher"] == "torchrun"
    assert (report["data"]["world_size"], report["data"]["missing_ranks"]) == (2, [])
    assert len(report["data"]["hosts"]) == 1
    assert outcome(report, "rank-set") == outcome(report, "ws-same") == "passed"
    assert list(grids_of(report)["checks by host"].columns) == report["data"]["hosts"]
    assert done.returncode == 0, done.stderr


def test_ranks_with_different_environments(tmp_path):
    script = tmp_path / "rank.sh"
    # torchrun sends SIGTERM to rank 1's process group when rank 0 ends with 1.
    script.write_text(
        '#!/bin/sh\ntrap : TERM\n[ "$RANK" = 1 ] && export NCCL_ALGO=Ring\n'
        '"$PYTHON" -m ddpdoctor check-env --format json ws-same\n'
        'status=$?\necho "$status" >"$STATUSES/$RANK"\nexit "$status"\n'
    )
    script.chmod(0o755)
    done = torchrun(script=("--no-python", str(script)), PYTHON=sys.executable, STATUSES=str(tmp_path))
    report = read_report(done.stdout)

    found = finding(report, "ws-same")
    assert "NCCL_ALGO" in found["summary"]
    assert "Ring on rank 1" in found["summary"]
    assert done.returncode == 1
    # Rank 1 may still be on its way out then, and ends by itself.
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1\n", "0\n"], done.stderr


def test_a_second_time_in_one_job(tmp_path):
    script = tmp_path / "rank.sh"
    one = '"$PYTHON" -m ddpdoctor check-env --format json rank-set'
    script.write_text(f"#!/bin/sh\n{one} && {one}\n")
    script.chmod(0o755)
    done = torchrun(script=("--no-python", str(script)), PYTHON=sys.executable)

    decoder, text, reports = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        report, end = decoder.raw_decode(text)
        reports.append(report)
        text = text[end:].strip()
    assert [outcome(report, "rank-set") for report in reports] == ["passed", "passed"], done.stderr


def test_a_rank_that_is_interrupted_ends_at_once():
    """Rank 1 of 2 never comes; rank 0 waits for it and is interrupted."""
    command = [*CHECK_ENV, "--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--timeout", "600"]
    port = free_port()
    process = subprocess.Popen(
        [*command, "--master-port", str(port), "rank-set"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(),
    )  # fmt: skip
    # Another rank could see its clock: it waits.
    waits = open_client(("localhost",), port, NO_TOKEN, 100)
    assert wait_for(lambda: waits.get(f"fleet/0/{KEY}"), 100)
    assert waits.add("0/arrived", 0) == 0
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    assert (process.returncode, stdout) == (130, ""), stderr


def start_on_both(hosts: Hosts, launchers, *, second: tuple[str, ...] = (), **env: str):
    """Start a launcher on each host; ``second`` stands before that of the second host, and so does ``env``."""
    clean = clean_environment()
    return [
        hosts.start(0, *launchers[0], env=clean),
        hosts.start(1, *second, *launchers[1], env={**clean, **env}),
    ]


def finish(processes):
    """Return the report, the exit statuses and the second host's stderr."""
    ended = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert ended[0][0].strip(), ended[0][1]
    assert ended[1][0] == "", "only rank 0 reports"
    return read_report(ended[0][0]), [process.returncode for process in processes], ended[1][1]


def torchruns(hosts, *checks, options=()):
    port = free_port()
    return [
        (
            *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}", f"--master-addr={hosts.names[0]}",
            f"--master-port={port}", "-m", "ddpdoctor", "check-env", "--format", "json", *options, *checks,
        )
        for number in range(2)
    ]  # fmt: skip


@pytest.fixture
def small_mtu(hosts):
    hosts.ip(1, "link", "set", "eth0", "mtu", "1400")
    yield
    hosts.ip(1, "link", "set", "eth0", "mtu", "1500")


@pytest.fixture
def other_torch(tmp_path):
    """A folder in which a torch of another version is said to be installed."""
    installed = tmp_path / "torch-1.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    return tmp_path


@pytest.mark.usefixtures("small_mtu")
def test_two_hosts_that_differ_under_torchrun(hosts, other_torch):
    require("faketime")
    launchers = torchruns(hosts, *CHEAP, options=("--no-torch",))
    report, statuses, _ = finish(
        start_on_both(
            hosts, launchers, second=("faketime", "-f", "-20s"), NCCL_ALGO="Ring", PYTHONPATH=str(other_torch)
        )
    )

    assert report["data"]["hosts"] == ["dd0", "dd1"]
    assert report["data"]["missing_ranks"] == []
    clock = finding(report, "clock")
    assert clock["severity"] == "error"
    assert "dd1" in clock["hosts"]
    # A busy machine reads a clock some tenths late.
    assert re.search(r"clock of dd0 is (19\.[5-9]|20\.[0-5]) s ahead of the clock of dd1", clock["summary"])
    assert "NCCL_ALGO" in finding(report, "ws-same")["summary"]
    by_host = grids_of(report)["checks by host"]
    (row,) = (name for name in by_host.rows if name.endswith(" clock"))
    # It is not known which host is right, so that the finding names both.
    assert cell_of(by_host, row, "dd[0, 1]") == "error"
    mtu = finding(report, "mtu")
    assert "1500 on dd0, 1400 on dd1" in mtu["summary"]
    version = finding(report, "version-same")
    assert f"torch {metadata.version('torch')} on dd0, 1.0.0 on dd1" in version["summary"]
    assert statuses[0] == 1


def test_two_hosts_alike_under_torchruns_own_rendezvous(hosts):
    port = free_port()
    command = (
        *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=dd0:{port}",
        "--rdzv-id=job", "-m", "ddpdoctor", "check-env", "--format", "json", *CHEAP, "--fail-on", "never",
    )  # fmt: skip
    processes = start_on_both(hosts, [command, command])
    ended = [process.communicate(timeout=LIMIT_S) for process in processes]
    # Which of the two hosts has rank 0 is torchrun's to choose.
    (stdout,) = [stdout for stdout, _ in ended if stdout.strip()]
    report = read_report(stdout)

    assert sorted(report["data"]["hosts"]) == ["dd0", "dd1"]
    assert {kind: outcome(report, kind) for kind in ("rank-set", "ws-same", "version-same", "mtu")} == {
        "rank-set": "passed", "ws-same": "passed", "version-same": "passed", "mtu": "passed",
    }  # fmt: skip
    assert [process.returncode for process in processes] == [0, 0], ended


def test_a_rank_that_never_answers_is_named(hosts, tmp_path):
    """Rank 3 is stopped before it says a word; torchrun stays until it goes on."""
    script = tmp_path / "rank.sh"
    script.write_text(
        f'#!/bin/sh\n[ "$RANK" = 3 ] && {{ echo $$ > {tmp_path}/pid; kill -STOP $$; exit 0; }}\n'
        'exec "$PYTHON" -m ddpdoctor check-env --format json --timeout 20 rank-set version-same\n'
    )
    script.chmod(0o755)
    port = free_port()
    launchers = [
        (
            *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}", "--master-addr=dd0",
            f"--master-port={port}", "--no-python", str(script),
        )
        for number in range(2)
    ]  # fmt: skip
    clean = clean_environment(PYTHON=sys.executable)
    processes = [hosts.start(number, *launcher, env=clean) for number, launcher in enumerate(launchers)]
    stdout, stderr = processes[0].communicate(timeout=LIMIT_S)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
    processes[1].communicate(timeout=LIMIT_S)
    report = read_report(stdout)

    assert report["data"]["missing_ranks"] == [3], stderr
    found = finding(report, "rank-set")
    assert found["ranks"] == [3]
    assert "rank 3" in found["summary"]
    assert report["data"]["hosts"] == ["dd0", "dd1"]
    assert outcome(report, "version-same") == "passed"


def test_two_hosts_by_hand(hosts):
    port = free_port()
    launchers = [
        (*CHECK_ENV, "--nnodes", "2", "--node-rank", str(n), "--master-addr", "dd0", "--master-port", str(port), *CHEAP)
        for n in range(2)
    ]
    report, statuses, stderr = finish(start_on_both(hosts, launchers))

    assert report["data"]["launcher"] == "nnodes"
    assert report["data"]["hosts"] == ["dd0", "dd1"]
    assert (statuses[1], stderr) == (0, "")


def test_a_host_behind_a_firewall_is_missing_and_says_why(hosts):
    require("nft")
    port = free_port()
    hosts.run(0, "nft", "add table inet dd; add chain inet dd in { type filter hook input priority 0; }; "
              "add rule inet dd in iif lo accept; "
              f"add rule inet dd in tcp dport {port} drop")  # fmt: skip
    launchers = [
        (
            *CHECK_ENV, "--nnodes", "2", "--node-rank", str(number), "--master-addr", "dd0",
            "--master-port", str(port), "--timeout", "3", "rank-set",
        )
        for number in range(2)
    ]  # fmt: skip
    processes = start_on_both(hosts, launchers)
    (stdout, _), (nothing, stderr) = [process.communicate(timeout=LIMIT_S) for process in processes]
    hosts.run(0, "nft", "delete table inet dd")

    assert read_report(stdout)["data"]["missing_ranks"] == [1]
    assert (processes[1].returncode, nothing) == (4, "")
    assert f"rank 1 cannot reach rank 0 at dd0:{port}" in stderr
    assert "no answer; a firewall may drop the packets" in stderr


def srun(slurm: Slurm, *options: str, check_env=CHECK_ENV, **env: str):
    drop = {name: "" for name in os.environ if name.startswith(("DDPDOCTOR_", "SLURM_"))}
    return slurm.run("srun", *options, *check_env, check=False, **drop, **env)


def test_a_slurm_step(slurm):
    done = srun(slurm, "-N2", "--ntasks-per-node=2", check_env=(*CHECK_ENV, *CHEAP, "--fail-on", "never"))
    report = read_report(done.stdout)

    assert report["data"]["launcher"] == "slurm"
    assert report["data"]["world_size"] == 4
    assert report["data"]["hosts"] == ["dd0", "dd1"]
    assert report["data"]["missing_ranks"] == []
    assert outcome(report, "version-same") == "passed"
    assert done.returncode == 0, done.stderr


def test_a_slurm_step_with_a_master_that_is_wrong(slurm):
    """What is to be found out does not keep the ranks from meeting."""
    done = srun(slurm, "-N2", "--ntasks-per-node=1", check_env=(*CHECK_ENV, "rank-set"), MASTER_ADDR="localhost")
    report = read_report(done.stdout)

    assert report["data"]["hosts"] == ["dd0", "dd1"]
    assert outcome(report, "rank-set") == "passed"


def test_a_slurm_task_alone_gathers_nothing(slurm):
    report = read_report(srun(slurm, "-N1", "-n1", check_env=(*CHECK_ENV, "rank-set")).stdout)
    assert report["data"]["launcher"] == "none"


def test_torchrun_within_a_slurm_step(slurm):
    inner = (
        *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=dd0:{free_port()}",
        "-m", "ddpdoctor", "check-env", "--format", "json", "rank-set",
    )  # fmt: skip
    done = srun(slurm, "-N2", "--ntasks-per-node=1", check_env=inner)
    report = read_report(done.stdout)

    assert report["data"]["launcher"] == "torchrun"
    assert report["data"]["world_size"] == 4
    assert sorted(report["data"]["hosts"]) == ["dd0", "dd1"]
