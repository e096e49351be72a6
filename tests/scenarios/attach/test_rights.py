"""What is seen without the right to trace a rank, without py-spy, and as another user."""

import json
import os
from pathlib import Path

import pytest

from ddpdoctor.model.attached import AttachedJob, Movement
from ddpdoctor.model.codec import decode
from tests.scenarios.attach.running import looks, marked, running

pytestmark = pytest.mark.usefixtures("preloaded_python")

NOBODY = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)"
REFUSED = """#!/bin/sh
echo "Permission Denied: Try running again with elevated permissions by going 'sudo env \\"PATH=\\$PATH\\" !!'" >&2
exit 1
"""
"""What py-spy 0.4.3 does where yama or a container's profile refuses, which this machine's kernel may not have."""


class Seen:
    """A folder that another Python has saved."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.job = decode(AttachedJob, json.loads((self.folder / "attach.json").read_text()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_job_of_another_user_is_named_with_the_way_to_see_it(tmp_path):
    with running("plain", tmp_path / "job") as job:
        told = job.attach_elsewhere(tmp_path, NOBODY)
        assert job.ends_well()

    assert told.startswith("2 1 process of a training job may not be read by this user\n")
    assert f'sudo -E env "PATH=$PATH" ddpdoctor attach --pid {job.pids[0]}\n' in told
    assert f"pid {job.pids[0]} of root, state S: " in told


def test_without_the_right_to_trace_the_rest_is_seen(tmp_path, other_python):
    (tmp_path / "py-spy").write_text(REFUSED)
    (tmp_path / "py-spy").chmod(0o755)
    with running("plain", tmp_path / "job") as job:
        seen = Seen(job.attach_elsewhere(tmp_path, python=other_python, PATH=str(tmp_path)))
        assert job.ends_well()

    for look in looks(seen, 2):
        (refusal,) = look.refused
        assert (refusal.source, look.stacks) == ("py-spy", None)
        assert refusal.reason == "Permission Denied"
        assert "SYS_PTRACE" in refusal.remedy
        assert look.process is not None
        assert look.process.peers
    # Threads that slept throughout stayed where they were.
    assert seen.job.movement is Movement.STILL
    assert {one.evidence for one in seen.job.movements} == {("received", "slept")}


def test_a_worker_server_on_a_unix_socket_gives_stacks_where_there_is_no_py_spy(tmp_path, other_python):
    with running("plain", tmp_path / "job", by_hand=True) as job:
        seen = Seen(job.attach_elsewhere(tmp_path, python=other_python, PATH="/nowhere"))
        assert job.ends_well()

    assert {rank.launcher for rank in seen.job.ranks} == {"environment"}
    waiting, at_fault = looks(seen, 2)
    assert [refusal.remedy for refusal in waiting.refused] == ["pip install 'ddpdoctor[attach]'"]
    stacks = (seen.folder / "look_2" / f"stacks_pid_{at_fault.rank.pid}_rank_1.txt").read_text()
    assert f"line {marked('FAULT')} in wait_for_the_test" in stacks
    assert seen.job.movement is Movement.STILL
    assert all("stack" in one.evidence for one in seen.job.movements)
