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
from tests.scenarios.check_env.running import CHECK_ENV, Seen
from tests.scenarios.check_env.test_variables import LAUNCH_CHECKS
from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import SCHEMA, cell_of, clean_environment, free_port, grids_of
from tests.scenarios.slurm import Slurm

pytestmark = pytest.mark.usefixtures("preloaded_python")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
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


def test_two_hosts_that_differ_under_torchrun(hosts, tmp_path):
    """The second one has a small MTU, a clock that is behind, and says that torch of another version is installed."""
    require("faketime")
    installed = tmp_path / "torch-1.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    command = (
        *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--master-addr=dd0", f"--master-port={free_port()}",
    )  # fmt: skip
    checks = ("-m", "ddpdoctor", "check-env", "--format", "json", "--no-torch", *CHEAP)
    launchers = [(*command, f"--node-rank={number}", *checks) for number in range(2)]
    hosts.ip(1, "link", "set", "eth0", "mtu", "1400")
    try:
        first, second = start_on_both(
            hosts, launchers, second=("faketime", "-f", "-20s"), NCCL_ALGO="Ring", PYTHONPATH=str(tmp_path)
        )
        (stdout, stderr), (nothing, _) = [one.communicate(timeout=LIMIT_S) for one in (first, second)]
    finally:
        hosts.ip(1, "link", "set", "eth0", "mtu", "1500")
    assert nothing == "", "only rank 0 reports"
    report = read_report(stdout)

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
    assert first.returncode == 1, stderr


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


def srun(slurm: Slurm, *words: str, **env: str) -> Seen:
    drop = {name: "" for name in os.environ if name.startswith(("DDPDOCTOR_", "SLURM_"))}
    done = slurm.run("srun", "-N2", *words, check=False, **drop, **env)
    return Seen(done.stdout, done.stderr, done.returncode)


def test_a_slurm_step(slurm):
    checks = (*CHECK_ENV, "--no-torch", *LAUNCH_CHECKS, "version-same")
    seen = srun(slurm, "--ntasks-per-node=2", *checks, MASTER_ADDR="dd0", MASTER_PORT="29500")

    assert (seen.report["data"]["launcher"], seen.report["data"]["world_size"]) == ("slurm", 4)
    assert (seen.report["data"]["hosts"], seen.report["data"]["missing_ranks"]) == (["dd0", "dd1"], [])
    assert (seen.status, seen.findings) == (0, [])
    assert {seen.outcomes[kind] for kind in ("rank-set", "slurm-shape", "version-same")} == {"passed"}


def test_a_slurm_step_with_a_master_that_is_wrong(slurm):
    """What is to be found out does not keep the ranks from meeting."""
    seen = srun(slurm, "--ntasks-per-node=1", *CHECK_ENV, "rank-set", MASTER_ADDR="localhost")

    assert (seen.report["data"]["hosts"], seen.outcomes) == (["dd0", "dd1"], {"rank-set": "passed"})


def test_torchrun_on_each_node_of_a_slurm_step(slurm):
    meet = ("--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=dd0:29400", "--rdzv-id=7")
    seen = srun(slurm, "--ntasks-per-node=1", *TORCHRUN, *meet, "--no-python", *CHECK_ENV, "--no-torch", *LAUNCH_CHECKS)

    assert seen.findings == []
    ran = {kind for kind, outcome in seen.outcomes.items() if outcome == "passed"}
    assert ran >= {"env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "master-loopback"}
