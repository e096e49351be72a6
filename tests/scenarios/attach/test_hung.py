"""What is seen of jobs that hang, and of one that moves. Each job goes on and ends well afterwards."""

import subprocess
import sys

import pytest

from ddpdoctor.attach.find import choose_job, find_jobs
from ddpdoctor.model.attached import Movement, RankBy
from tests.scenarios.attach.running import SCRIPT, looks, main_lines, marked, running, started
from tests.scenarios.hosts import require
from tests.scenarios.running import clean_environment, free_port, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_a_hung_job_of_torchrun(tmp_path):
    with running("plain", tmp_path / "job") as job:
        seen = job.attach(tmp_path)
        assert job.ends_well()

    (first, second) = (looks(seen, number) for number in (1, 2))
    assert [(one.rank.rank, one.rank.pid) for one in first] == list(enumerate(job.pids))
    assert [(one.rank.launcher, one.rank.world_size, one.rank.local_rank) for one in first] == [
        ("torchrun", 2, 0), ("torchrun", 2, 1)
    ]  # fmt: skip
    assert (seen.job.job.master_port, seen.job.world_size, seen.job.unseen) == (job.port, 2, 0)
    assert seen.job.movement is Movement.STILL
    # No look has woken a thread that sleeps.
    assert [(one.main_slept, one.main_cpu_ticks) for one in seen.job.movements] == [(True, 0), (True, 0)]
    assert {"stack", "received", "slept"} <= set(seen.job.movements[0].evidence)
    for look in (first, second):
        assert ("main", marked("WAITS")) in main_lines(look[0])
        assert main_lines(look[0])[0][0] == "all_reduce"
        assert main_lines(look[1])[0] == ("wait_for_the_test", marked("FAULT"))
        assert not [refusal for one in look for refusal in one.refused]
    assert first[1].process.blocked.call == "openat"
    assert "pt_gloo_runloop" in {thread.name for thread in first[0].process.threads}
    assert second[0].monotonic_ns - first[0].monotonic_ns >= 0.3e9
    store = (seen.folder / "look_1" / "store.json").read_text()
    assert '"default_pg/0//cpu//0/1"' in store
    assert '"complete": true' in store
    assert sorted(seen.job.files) == sorted(
        str(path.relative_to(seen.folder)) for path in seen.folder.rglob("look_*/*")
    )


def test_a_held_gil_hides_no_stack(tmp_path):
    with running("gil", tmp_path / "job") as job:
        seen = job.attach(tmp_path)
        assert job.ends_well()

    rank = looks(seen, 1)[1]
    assert main_lines(rank)[0][0] == "hold_the_gil"
    assert [thread["owns_gil"] for thread in rank.stacks] == [True]
    assert seen.job.movement is Movement.STILL


def test_ranks_of_spawn_are_found_by_their_threads(tmp_path):
    with running("spawn", tmp_path / "job") as job:
        seen = job.attach(tmp_path, pid=job.processes[0].pid)
        assert job.ends_well()

    assert {rank.pid for rank in seen.job.ranks} == set(job.pids)
    assert {(rank.rank_by, rank.launcher, rank.world_size) for rank in seen.job.ranks} == {
        (RankBy.PID_ORDER, "mp.spawn", 2)
    }


def test_torchs_debug_server_is_found_in_the_store(tmp_path):
    with running("server", tmp_path / "job") as job:
        seen = job.attach(tmp_path)
        assert job.ends_well()

    for number in (1, 2):
        for rank, look in enumerate(looks(seen, number)):
            (name,) = look.files
            assert name == f"fr_trace_pid_{look.rank.pid}_rank_{rank}.json"
            assert '"profiling_name":"gloo:all_reduce"' in (seen.folder / f"look_{number}" / name).read_text() or rank
    assert {"stack", "flight recorder"} <= set(seen.job.movements[0].evidence)
    assert seen.job.movement is Movement.STILL


@pytest.mark.parametrize(("age", "name"), [("new", "ras.json"), ("old", "ras.txt")])
def test_ras_is_asked_where_a_rank_serves_it(tmp_path, age, name):
    with running(f"ras-{age}", tmp_path / "job", NCCL_RAS_ADDR=f"localhost:{free_port() + 1}") as job:
        seen = job.attach(tmp_path)
        assert job.ends_well()

    asked = (job.folder / "ras-asked").read_text().splitlines()
    assert asked == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "VERBOSE STATUS"] * 2
    for number in (1, 2):
        text = (seen.folder / f"look_{number}" / name).read_text()
        assert (
            text
            == {"new": '{"nccl_version": "2.29.7", "communicators": []}\n', "old": "Job summary\n===========\n"}[age]
        )
    assert not seen.job.refused


def test_a_dump_is_asked_for_through_the_pipe_that_a_rank_reads(tmp_path):
    folder = tmp_path / "job"
    named = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/dump_"}
    with running("pipe", folder, **named) as job:
        seen = attach_when_dumped(job, tmp_path)
        assert job.ends_well()

    reads, lacks = looks(seen, 2)
    assert (seen.folder / "look_2" / reads.files[0]).read_bytes() == b"dump of 0"
    assert reads.files == (f"fr_dump_pid_{reads.rank.pid}_rank_0",)
    assert lacks.files == ()
    assert [refusal.source for refusal in looks(seen, 1)[1].refused] == ["flight recorder"]


def attach_when_dumped(job, output):
    """Let the pause between the looks last until the rank has written its dump."""
    from ddpdoctor.attach.look import attach

    def pause(_seconds):
        assert wait_for((job.folder / "dump_0").exists)

    return attach(output, job.pids[1], pause=pause)


# Ranks of mpirun, and ranks among pids of their own.


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
