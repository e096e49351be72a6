"""allreduce-bench over NCCL: right data, true clocks, sizes that fit, and a report whatever happens to a rank."""

import pytest

from tests.gpu.judging import Ran, report_of

EXACT = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"}
OF_LINKS = {"DD402", "DD403", "DD404", "DD405"}
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv"}


@pytest.mark.gpu_job("bench_sum", "bench_prod", "bench_min", "bench_max", "bench_avg")
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_bench_one_gpu(ran: Ran, op: str) -> None:
    """One GPU by itself: every dtype, collective and operator gives right data, and no bus bandwidth."""
    report = report_of(ran(f"bench_{op}"))
    rows = report["data"]["results"]
    assert rows
    assert all(row["wrong"] == 0 and row["busbw_gb_s"] is None for row in rows), rows
    assert {row["dtype"] for row in rows} == (EXACT if op != "avg" else {name for name in EXACT if "float" in name})


@pytest.mark.gpu_job("bench_too_large")
def test_bench_too_large(ran: Ran) -> None:
    """A size that no GPU holds is left out by name, without an error of CUDA's."""
    done = ran("bench_too_large")
    report = report_of(done)
    assert done.status in {0, 1}, done.stderr
    assert {row["size_bytes"] for row in report["data"]["results"]} == {2**20}
    assert 2**40 in {size for one in report["data"]["left_out"] for size in one["sizes_bytes"]}, report["data"]
    assert "out of memory" not in done.stderr + done.stdout


@pytest.mark.gpu_job("event_stream")
def test_event_stream(ran: Ran) -> None:
    """A kernel of 10 ms, on the current stream or beside it: the device's clock and the host's agree on its length."""
    done = ran("event_stream")
    assert done.status == 0, done.stderr[-3000:]
    for where, spans in done.result.items():
        for kind, one in spans.items():
            device, host = sum(one["device_us"]), sum(one["host_us"])
            assert abs(host - device) <= 0.1 * host, (where, kind, one)
            assert min(one["device_us"]) > 1000, (where, kind, one)


@pytest.mark.gpu_job("bench_two")
def test_bench_two(ran: Ran) -> None:
    """Two ranks on one GPU move right data, over sockets; that is no measure of a link, and nothing says it is one."""
    report = report_of(ran("bench_two"))
    rows = report["data"]["results"]
    assert {row["collective"] for row in rows} == COLLECTIVES
    assert all(row["wrong"] == 0 for row in rows), rows
    assert not [one for one in report["findings"] if one["code"] in OF_LINKS], report["findings"]


@pytest.mark.gpu_job("bench_two")
def test_bench_two_transports(ran: Ran, *, dry: bool) -> None:
    """NCCL's own log says that they are sockets."""
    report = report_of(ran("bench_two"))
    if not dry:
        logs = report["data"]["nccl_logs"]
        assert [log["network"] for log in logs] == ["Socket"] * 2, logs
        assert all("NET/Socket" in log["transports"] for log in logs), logs


STOPS = {"bench_kill": ("failed", "killed"), "bench_stop": ("hung", "stopped")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in STOPS])
def test_bench_stops(ran: Ran, name: str) -> None:
    """A rank that is killed or stopped leaves what was measured: the report comes before NCCL ends the other."""
    ending, kind = STOPS[name]
    report = report_of(ran(name))
    assert report["data"]["stop"]["ending"] == ending
    assert [row["size_bytes"] for row in report["data"]["results"]] == [1024]
    found = [finding for finding in report["findings"] if finding["code"].startswith("DD6")]
    assert [(finding["kind"], finding["ranks"]) for finding in found] == [(kind, [1])], found
