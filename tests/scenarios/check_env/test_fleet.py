"""All ranks look, rank 0 reports: under the real torchrun, on two hosts, and under a real Slurm."""

import os
import re
import signal
import sys
from importlib import metadata

import pytest

from ddpdoctor.exchange.conversation import CLOCK_KEY
from ddpdoctor.exchange.store import wait_for
from ddpdoctor.exchange.wire import NO_TOKEN, open_client
from tests.scenarios.check_env.running import CHECK_ENV, Seen
from tests.scenarios.check_env.test_variables import LAUNCH_CHECKS
from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import begin, cell_of, clean_environment, free_port, grids_of, python
from tests.scenarios.slurm import Slurm

pytestmark = pytest.mark.usefixtures("preloaded_python")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
VERB = CHECK_ENV[3:]
CHEAP = ("rank-set", "ws-same", "version-same", "clock", "mtu", "shm")
"""Checks of which the reading takes no time."""
LIMIT_S = 250


def two_ranks() -> tuple[str, ...]:
    """Return how Python starts torchrun for two ranks on this machine."""
    return (*TORCHRUN[1:], "--nproc-per-node=2", f"--master-port={free_port()}")


def test_two_ranks_make_one_report():
    done = python(*two_ranks(), "-m", "ddpdoctor", *VERB, *CHEAP, "--fail-on", "never")
    seen = Seen(done.stdout, done.stderr, done.returncode)

    assert (seen.data["launcher"], seen.data["world_size"], seen.data["missing_ranks"]) == ("torchrun", 2, [])
    assert len(seen.data["hosts"]) == 1
    assert seen.outcomes["rank-set"] == seen.outcomes["ws-same"] == "passed"
    assert list(grids_of(seen.report)["checks by host"].columns) == seen.data["hosts"]
    assert seen.status == 0, seen.stderr


def test_ranks_with_different_environments(tmp_path):
    script = tmp_path / "rank.sh"
    # torchrun sends SIGTERM to rank 1's process group when rank 0 ends with 1.
    script.write_text(
        '#!/bin/sh\ntrap : TERM\n[ "$RANK" = 1 ] && export NCCL_ALGO=Ring\n'
        '"$PYTHON" -m ddpdoctor check-env --format json ws-same\n'
        'status=$?\necho "$status" >"$STATUSES/$RANK"\nexit "$status"\n'
    )
    script.chmod(0o755)
    done = python(*two_ranks(), "--no-python", script, PYTHON=sys.executable, STATUSES=str(tmp_path))
    found = Seen(done.stdout, done.stderr, done.returncode).found["ws-same"]

    assert "NCCL_ALGO" in found["summary"]
    assert "Ring on rank 1" in found["summary"]
    assert done.returncode == 1
    # Rank 1 may still be on its way out then, and ends by itself.
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1\n", "0\n"], done.stderr


def test_a_rank_that_is_interrupted_ends_at_once():
    """Rank 1 of 2 never comes; rank 0 waits for it and is interrupted."""
    port = free_port()
    process = begin(
        *CHECK_ENV, "--nnodes", 2, "--node-rank", 0, "--master-addr", "localhost", "--master-port", port,
        "--timeout", 600, "rank-set",
    )  # fmt: skip
    # Another rank could see its clock: it waits.
    waits = open_client(("localhost",), port, NO_TOKEN, 100)
    assert wait_for(lambda: waits.get(f"fleet/0/{CLOCK_KEY}"), 100)
    assert waits.add("0/arrived", 0) == 0
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    assert (process.returncode, stdout) == (130, ""), stderr


def start_on_both(hosts: Hosts, launchers, *, second: tuple[str, ...] = (), **env: str):
    """Start a launcher on each host; ``second`` stands before that of the second host, and so does ``env``."""
    clean = clean_environment()
    return [hosts.start(0, *launchers[0], env=clean), hosts.start(1, *second, *launchers[1], env={**clean, **env})]


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
    seen = Seen(stdout, stderr, first.returncode)

    assert (seen.data["hosts"], seen.data["missing_ranks"]) == (["dd0", "dd1"], [])
    clock = seen.found["clock"]
    assert clock["severity"] == "error"
    assert "dd1" in clock["hosts"]
    # A busy machine reads a clock some tenths late.
    assert re.search(r"clock of dd0 is (19\.[5-9]|20\.[0-5]) s ahead of the clock of dd1", clock["summary"])
    assert "NCCL_ALGO" in seen.found["ws-same"]["summary"]
    by_host = grids_of(seen.report)["checks by host"]
    (row,) = (name for name in by_host.rows if name.endswith(" clock"))
    # It is not known which host is right, so that the finding names both.
    assert cell_of(by_host, row, "dd[0, 1]") == "error"
    assert "1500 on dd0, 1400 on dd1" in seen.found["mtu"]["summary"]
    versions = f"torch {metadata.version('torch')} on dd0, 1.0.0 on dd1"
    assert versions in seen.found["version-same"]["summary"]
    assert seen.status == 1, stderr


def test_a_host_behind_a_firewall_is_missing_and_says_why(hosts):
    port = free_port()
    launchers = [
        (
            *CHECK_ENV, "--nnodes", "2", "--node-rank", str(number), "--master-addr", "dd0",
            "--master-port", str(port), "--timeout", "3", "rank-set",
        )
        for number in range(2)
    ]  # fmt: skip
    with hosts.filtered(0, f"tcp dport {port} drop"):
        processes = start_on_both(hosts, launchers)
        (stdout, said), (nothing, stderr) = [process.communicate(timeout=LIMIT_S) for process in processes]

    assert Seen(stdout, said, 1).data["missing_ranks"] == [1]
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

    assert (seen.data["launcher"], seen.data["world_size"]) == ("slurm", 4)
    assert (seen.data["hosts"], seen.data["missing_ranks"]) == (["dd0", "dd1"], [])
    assert (seen.status, seen.findings) == (0, [])
    assert {seen.outcomes[kind] for kind in ("rank-set", "slurm-shape", "version-same")} == {"passed"}


def test_a_slurm_step_with_a_master_that_is_wrong(slurm):
    """What is to be found out does not keep the ranks from meeting."""
    seen = srun(slurm, "--ntasks-per-node=1", *CHECK_ENV, "rank-set", MASTER_ADDR="localhost")

    assert (seen.data["hosts"], seen.outcomes) == (["dd0", "dd1"], {"rank-set": "passed"})


def test_torchrun_on_each_node_of_a_slurm_step(slurm):
    meet = ("--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=dd0:29400", "--rdzv-id=7")
    seen = srun(slurm, "--ntasks-per-node=1", *TORCHRUN, *meet, "--no-python", *CHECK_ENV, "--no-torch", *LAUNCH_CHECKS)

    assert seen.findings == []
    ran = {kind for kind, outcome in seen.outcomes.items() if outcome == "passed"}
    assert ran >= {"env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "master-loopback"}
