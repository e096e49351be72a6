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


@pytest.mark.gpu_job("watched_sleeper")
def test_watched(ran: Ran) -> None:
    """The same by ``ddpdoctor.watch`` in the script, under torchrun alone."""
    assert_blamed(ran("watched_sleeper"), "stuck", [1], "sleeper")


@pytest.mark.gpu_job("pending_oldest")
def test_pending_oldest(ran: Ran) -> None:
    """Rank 0 is 150 reductions ahead: the oldest pending one, number 1, is reported, and not one of the last."""
    verdict = assert_blamed(ran("pending_oldest"), "stuck", [1], "pending_oldest")
    assert any("all_reduce of float32[1]," in said for said in verdict["evidence"]), verdict["evidence"]


@pytest.mark.gpu_job("ddp_sleeper")
def test_ddp_sleeper(ran: Ran) -> None:
    """The pending reduction was begun by DDP's C++, and nothing of ours saw it but the flight recorder."""
    assert_blamed(ran("ddp_sleeper"), "stuck", [1], "ddp_sleeper")


@pytest.mark.gpu_job("compiled_allreduce")
def test_compiled_allreduce(ran: Ran) -> None:
    """The pending reduction is in compiled code, and nothing of ours saw it but the flight recorder."""
    assert_blamed(ran("compiled_allreduce"), "stuck", [1], "compiled_allreduce")


@pytest.mark.gpu_job("early_exit")
def test_early_exit(ran: Ran) -> None:
    """Rank 1 leaves with status 0. The hang timeout is longer than the job may take: it is reported without it."""
    assert_blamed(ran("early_exit"), "early-exit", [1], "early_exit")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in ("recv_without_send", "recv_without_send_detail")],
)
def test_recv_without_send(ran: Ran, name: str) -> None:
    """A message and a reduction that wait for each other are a circle of both ranks."""
    assert_blamed(ran(name), "deadlock", [0, 1], "recv_without_send")


@pytest.mark.gpu_job("subgroup_sleeper")
def test_subgroup(ran: Ran) -> None:
    """The pending reduction is one of a communicator that was split off another one."""
    assert_blamed(ran("subgroup_sleeper"), "stuck", [1], "subgroup")


@pytest.mark.gpu_job("nonblocking_sleeper")
def test_nonblocking(ran: Ran) -> None:
    """NCCL makes its communicators in the background."""
    assert_blamed(ran("nonblocking_sleeper"), "stuck", [1], "sleeper")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in ("watchdog", "watchdog_desync")],
)
def test_watchdog(ran: Ran, name: str, *, dry: bool) -> None:
    """torch's watchdog aborts rank 0 at the group's limit. That is a consequence: rank 1 is stuck. Its dump is kept.

    With TORCH_NCCL_DESYNC_DEBUG it also says which rank did not come.
    """
    done = ran(name)
    assert_blamed(done, "stuck", [1], "watchdog")
    kept = [path.name for path in (done.folder / "run" / "evidence").iterdir()]
    assert dry or any(".flight" in name for name in kept), kept


@pytest.mark.gpu_job("mixed_backend_objects")
def test_mixed_backend_objects(ran: Ran) -> None:
    """Of "cpu:gloo,cuda:nccl", calls over Gloo are counted by Gloo: rank 1 has not arrived at the second of two."""
    assert_blamed(ran("mixed_backend_objects"), "stuck", [1], "mixed_backend_objects")
