"""The recipes of docs/acting.md under a real Slurm: excluded hosts, TaskProlog, Prolog, Epilog, and a restart by the
exit status."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvml_driver import compile_driver
from tests.scenarios.running import JOBS, wait_for, words_of

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
BIN = Path(sys.executable).parent
HOSTS = 3
LIMIT_S = 150
pytestmark = pytest.mark.timeout(600)


def test_a_task_prolog_tells_the_user_and_the_job_starts(slurm) -> None:
    command = ("srun", "--nodes=1", f"--task-prolog={EXAMPLES / 'slurm-task-prolog.sh'}", "echo", "it started")
    done = slurm.run(*command, PATH=f"{BIN}:{os.environ['PATH']}", NCCL_SOCKET_IFNAM="eth0")
    assert "DD111" in done.stdout
    assert done.stdout.endswith("it started\n")


@contextlib.contextmanager
def run_by_slurm(slurm, which: str, example: str, **variables: str) -> Iterator[None]:
    """Have all nodes run an example as their Prolog or Epilog, with these variables."""
    script = Path(slurm.folder) / f"{which}.sh"
    given = shlex.join([f"{name}={value}" for name, value in (variables | {"DDPDOCTOR_BIN": str(BIN)}).items()])
    script.write_text(f"#!/bin/sh\nexec env PATH=/usr/bin:/bin {given} {shlex.quote(str(EXAMPLES / example))}\n")
    script.chmod(0o755)
    conf = slurm.conf.read_text()
    slurm.conf.write_text(f"{conf}{which}={script}\nPrologFlags=Alloc\n")
    slurm.run("scontrol", "reconfigure")
    try:
        yield
    finally:
        slurm.conf.write_text(conf)
        slurm.run("scontrol", "reconfigure")
        for name in slurm.hosts.names:
            slurm.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
    assert wait_for(lambda: slurm.idle() == slurm.hosts.count, LIMIT_S)


def test_a_prolog_drains_a_node_that_is_not_fit(slurm) -> None:
    config = Path(slurm.folder) / "config" / "ddpdoctor" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[check-env]\nexpect-version = ["python>=99"]\n')
    with run_by_slurm(slurm, "Prolog", "slurm-prolog.sh", XDG_CONFIG_HOME=str(config.parents[1])):
        assert_only_the_first_node_is_drained(slurm)


def test_an_epilog_leaves_a_node_in_use_that_is_fit(slurm) -> None:
    with run_by_slurm(slurm, "Epilog", "slurm-epilog.sh"):
        slurm.run("sbatch", "--wait", "--nodelist=dd0", "--wrap", "true")
        assert wait_for(lambda: slurm.idle() == slurm.hosts.count, LIMIT_S), state_of(slurm, "dd0")


def test_an_epilog_drains_a_node_with_broken_gpus(slurm, tmp_path_factory) -> None:
    """The driver that answers has a GPU with memory errors."""
    driver = compile_driver(tmp_path_factory.mktemp("driver"))
    with run_by_slurm(slurm, "Epilog", "slurm-epilog.sh", LD_LIBRARY_PATH=str(driver), FAKE_NVML=""):
        assert_only_the_first_node_is_drained(slurm)


def assert_only_the_first_node_is_drained(slurm) -> None:
    job = slurm.run("sbatch", "--parsable", "--nodelist=dd0", "--wrap", "true").stdout.strip()
    try:
        assert wait_for(lambda: "drain" in state_of(slurm, "dd0"), LIMIT_S)
        assert "drain" not in state_of(slurm, "dd2")
    finally:
        slurm.run("scancel", job, check=False)


def state_of(slurm, node: str) -> str:
    return str(slurm.run("sinfo", "-h", "-n", node, "-o", "%T", check=False).stdout)


def test_a_fault_of_a_machine_starts_the_job_elsewhere_and_one_of_the_script_does_not(slurm) -> None:
    failed, given_up = (submit(slurm, kind) for kind in ("crash_hardware", "crash_exit_status"))
    assert wait_for(lambda: "Submitted batch job" in said(slurm, "crash_hardware"), LIMIT_S), said(slurm)
    again = said(slurm, "crash_hardware").rpartition("Submitted batch job ")[2].split()[0]
    try:
        assert "ExcNodeList=dd" in shown(slurm, again)
        assert wait_for(lambda: "ExitCode=75:0" in shown(slurm, failed), LIMIT_S), shown(slurm, failed)
    finally:
        slurm.run("scancel", again, check=False)
    assert wait_for(lambda: "JobState=FAILED" in shown(slurm, given_up), LIMIT_S), said(slurm)
    assert "ExitCode=70:0" in shown(slurm, given_up)
    assert "Submitted" not in said(slurm, "crash_exit_status")


def submit(slurm, kind: str) -> str:
    folder = Path(slurm.folder) / kind
    folder.mkdir()
    script, _ = words_of(kind)
    (folder / "train.py").write_text(f"import {Path(script).stem}\n\n{Path(script).stem}.{kind}()\n")
    done = slurm.run(
        "sbatch", "--parsable", "--nodes=1", "--output=out.txt", f"--chdir={folder}",
        str(EXAMPLES / "slurm-resubmit.sbatch"), PATH=f"{BIN}:{os.environ['PATH']}", NPROC="2", PYTHONPATH=str(JOBS),
    )  # fmt: skip
    return str(done.stdout.strip())


def shown(slurm, job: str) -> str:
    return str(slurm.run("scontrol", "show", "job", job, check=False).stdout)


def said(slurm, kind: str = "*") -> str:
    return "\n".join(path.read_text() for path in Path(slurm.folder).glob(f"{kind}/out.txt"))
