"""Which processes are ranks of which job, and what is said if the job that is meant cannot be told."""

import os
import subprocess
import sys

import pytest

from ddpdoctor.attach.find import choose_job, find_jobs
from ddpdoctor.attach.look import attach
from ddpdoctor.model.errors import ExitStatus, UserError
from tests.scenarios.attach.running import looks, running
from tests.scenarios.running import clean_environment

pytestmark = pytest.mark.usefixtures("preloaded_python")


def refusal(**options):
    with pytest.raises(UserError) as raised:
        attach(**options)
    assert raised.value.status == ExitStatus.WRONG_USE
    return raised.value


def test_of_several_jobs_one_must_be_named(tmp_path):
    with running("plain", tmp_path / "one") as one, running("plain", tmp_path / "two") as two:
        told = refusal(output=tmp_path)
        seen = attach(tmp_path, job=f"127.0.0.1:{two.port}", gap_s=0.1)
        of_launcher = choose_job(find_jobs(), pid=one.processes[0].pid)
        wrong = refusal(output=tmp_path, job="another")
        assert one.ends_well()
        assert two.ends_well()

    assert told.message.endswith("training jobs run on this machine: choose one")
    for job in (one, two):
        pids = f"pid {job.pids[0]} and {job.pids[1]}" if job.pids[0] < job.pids[1] else f"pid {job.pids[0]} and"
        assert f"--job 127.0.0.1:{job.port}: 2 ranks of 2 (0, 1), {pids}" in told.help
    assert {rank.pid for rank in seen.job.ranks} == set(two.pids)
    assert {rank.pid for rank in of_launcher.ranks} == set(one.pids)
    assert wrong.message == "no training job named another runs on this machine"
    assert not list(tmp_path.glob("ddpdoctor-attach-*/look_1/*_pid_" + str(one.pids[0]) + "*"))


def test_a_process_that_is_no_rank(tmp_path):
    lone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=clean_environment())
    try:
        told = refusal(output=tmp_path, pid=lone.pid)
    finally:
        lone.communicate()
    assert str(lone.pid) in told.message
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_told_before_the_look(tmp_path):
    (tmp_path / "file").touch()
    with running("plain", tmp_path / "job") as job:
        told = refusal(output=tmp_path / "file", pid=job.pids[0])
        assert job.ends_well()
    assert told.message.startswith(f"no folder can be made in {tmp_path}/file")


def test_the_secrets_of_a_command_are_not_saved(tmp_path):
    secret = "hf_" + "a1B2c3D4" * 4
    with running("plain", tmp_path / "job", "--hf-token", secret) as job:
        seen = job.attach(tmp_path)
        assert job.ends_well()

    assert "--hf-token ***" in looks(seen, 1)[0].rank.command
    assert not [path for path in seen.folder.rglob("*.json") if secret in path.read_text()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_job_of_another_user_is_named_with_the_way_to_see_it(tmp_path):
    with running("plain", tmp_path / "job") as job:
        told = job.attach_as_nobody(tmp_path)
        assert job.ends_well()

    assert told.startswith("2 1 process of a training job may not be read by this user\n")
    assert f'sudo -E env "PATH=$PATH" ddpdoctor attach --pid {job.pids[0]}\n' in told
    assert f"pid {job.pids[0]} of root, state S: " in told
