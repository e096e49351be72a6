"""Two ranks over NCCL, one of which commits a fault: the right rank is blamed at its line, with DETAIL and without."""

import pytest

from tests.gpu.judging import Ran, assert_blamed, assert_recorded, report_of


@pytest.mark.gpu_job("sleeper_off")
def test_sleeper_off(ran: Ran) -> None:
    """Rank 1 sleeps, rank 0 stands in item(): without DETAIL the wait is read from NCCL's flight recorder."""
    done = ran("sleeper_off")
    assert_blamed(done, "stuck", [1], "sleeper")
    assert done.status == 124
    assert "withdrawn" not in done.stderr
    assert_recorded(report_of(done))


@pytest.mark.gpu_job("sleeper_detail")
def test_sleeper_detail(ran: Ran) -> None:
    """The same with DETAIL, under which the wait is in torch's comparison of the collectives."""
    assert_blamed(ran("sleeper_detail"), "stuck", [1], "sleeper")


@pytest.mark.gpu_job("pending_oldest")
def test_pending_oldest(ran: Ran) -> None:
    """Rank 0 is 150 reductions ahead: the oldest pending one, number 1, is reported, and not one of the last."""
    verdict = assert_blamed(ran("pending_oldest"), "stuck", [1], "pending_oldest")
    assert any("all_reduce of float32[1]," in said for said in verdict["evidence"]), verdict["evidence"]


@pytest.mark.gpu_job("compiled_allreduce")
def test_compiled_allreduce(ran: Ran) -> None:
    """The pending reduction is in compiled code, and nothing of ours saw it but the flight recorder."""
    assert_blamed(ran("compiled_allreduce"), "stuck", [1], "compiled_allreduce")


BLAMED = {
    "watched_sleeper": ("stuck", [1], "sleeper"), "ddp_sleeper": ("stuck", [1], "ddp_sleeper"),
    "early_exit": ("early-exit", [1], "early_exit"),
    "recv_without_send": ("deadlock", [0, 1], "recv_without_send"),
    "recv_without_send_detail": ("deadlock", [0, 1], "recv_without_send"),
    "subgroup_sleeper": ("stuck", [1], "subgroup"), "nonblocking_sleeper": ("stuck", [1], "sleeper"),
    "mixed_backend_objects": ("stuck", [1], "mixed_backend_objects"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in BLAMED])
def test_blamed(ran: Ran, name: str) -> None:
    """A job that ``ddpdoctor.watch`` in the script sees; a reduction that was begun by DDP's C++, and nothing of ours
    saw it but the flight recorder; a rank that leaves with status 0, reported before the hang timeout; a message and a
    reduction that wait for each other, a circle of both ranks; a communicator that was split off another one, and one
    that NCCL makes in the background. Of "cpu:gloo,cuda:nccl", calls over Gloo are counted by Gloo.
    """
    assert_blamed(ran(name), *BLAMED[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in ("watchdog", "watchdog_desync")]
)
def test_watchdog(ran: Ran, name: str, *, dry: bool) -> None:
    """torch's watchdog aborts rank 0 at the group's limit. That is a consequence: rank 1 is stuck. Its dump is kept.

    With TORCH_NCCL_DESYNC_DEBUG it also says which rank did not come.
    """
    done = ran(name)
    assert_blamed(done, "stuck", [1], "watchdog")
    kept = [path.name for path in (done.folder / "run" / "evidence").iterdir()]
    assert dry or any(".flight" in name for name in kept), kept
