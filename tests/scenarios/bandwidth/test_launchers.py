"""`allreduce-bench` in steps of a real Slurm, and ranks that outlive who started them."""

import json
import os
import signal
import sys

import jsonschema
import psutil
import pytest

from tests.scenarios.bandwidth.running import BENCH, QUICK, finish, start
from tests.scenarios.running import SCHEMA, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_tasks_of_a_step_are_ranks(slurm):
    step = ("srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "ddpdoctor", "allreduce-bench")
    done = slurm.run(*step, *QUICK, "--format", "json", check=False, OMP_NUM_THREADS="1")

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    data = report["data"]
    assert data["hosts"] == ["dd0", "dd1"]
    assert [member["local_rank"] for member in data["members"]] == [0, 0]
    assert len(data["results"]) == 6

    wrong = slurm.run(*step, "--min-size", "2KiB", "--max-size", "1KiB", check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("--min-size 2 KiB is above --max-size 1 KiB") == 1


@pytest.mark.cold  # a forked Python has one more child
def test_ranks_end_with_the_ddpdoctor_that_started_them():
    process = start(*BENCH, "--nproc-per-node", "2", "--budget", "600s", "--max-size", "1KiB")
    ranks = []

    def has_ranks():
        ranks[:] = psutil.Process(process.pid).children()
        return len(ranks) == 2 and all("allreduce-bench" in rank.cmdline() for rank in ranks)

    try:
        assert wait_for(has_ranks)
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=200)
        assert alive == []
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        finish(process)
