"""Ranks of other launchers, and ranks in a network or among pids of their own."""

import subprocess
import sys

from ddpdoctor.attach.find import choose_job, find_jobs
from tests.scenarios.attach.running import SCRIPT, looks, main_lines, marked, started
from tests.scenarios.hosts import require
from tests.scenarios.running import clean_environment, free_port


def begin(command, port, **env):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        command, env=clean_environment(**shared, **env), stdin=subprocess.DEVNULL, start_new_session=True
    )


def test_ranks_of_mpirun(tmp_path):
    require("mpirun")
    folder, port = tmp_path / "job", free_port()
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
    command = ["mpirun", *options, sys.executable, str(SCRIPT), "plain", str(folder)]
    with started(folder, port, lambda: [begin(command, port)]) as job:
        seen = job.attach(tmp_path)
        of_mpirun = choose_job(find_jobs(), pid=job.processes[0].pid)
        assert job.ends_well()

    assert [(rank.pid, rank.rank, rank.launcher, rank.world_size) for rank in seen.job.ranks] == [
        (job.pids[0], 0, "mpirun", 2), (job.pids[1], 1, "mpirun", 2)
    ]  # fmt: skip
    assert {rank.pid for rank in of_mpirun.ranks} == set(job.pids)


def test_ranks_among_pids_of_their_own(tmp_path):
    """As in a container, seen from the host: pids are others inside."""
    require("unshare")
    folder, port = tmp_path / "job", free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command = ["unshare", "--pid", "--fork", "--mount-proc", *torchrun, str(SCRIPT), "plain", str(folder)]
    with started(folder, port, lambda: [begin(command, port)], inside=True) as job:
        inside = [int((folder / f"at_{rank}").read_text()) for rank in range(2)]
        seen = job.attach(tmp_path)
        assert job.ends_well()

    assert [(rank.pid, rank.namespace_pid) for rank in seen.job.ranks] == list(zip(job.pids, inside, strict=True))
    assert job.pids != inside
    assert main_lines(looks(seen, 2)[1])[0] == ("wait_for_the_test", marked("FAULT"))
