"""The recorder on a GPU: where waits are read, how gradients and replicas are judged, and that nobody waits."""

import math

import pytest

from tests.gpu.catalog import DRIFTS
from tests.gpu.judging import Ran, assert_looked_at, assert_recorded, assert_silent, outcomes, report_of
from tests.scenarios.test_consistency import PARAMETERS, SYNCHRONIZATION, check


@pytest.mark.gpu_job("flight_source")
def test_flight_source(ran: Ran, *, dry: bool) -> None:
    """A recorder of this build has NCCL's 8 reductions; ours tells the oldest of them while they are pending."""
    done = ran("flight_source")
    assert_silent(done)
    pending, completed = done.result["pending"], done.result["completed"]
    sources = {name: reported.get("reductions") for name, reported in pending["torch"].items()}
    if dry:  # Gloo's are never distinguished: none is pending, and ours leaves them out
        assert sources["any"] == completed["torch"]["any"]["reductions"] == 8
        return
    assert 8 in sources.values(), pending["torch"]
    oldest = pending["ours"]["entries"][0]
    assert (oldest["collective_seq_id"], oldest["state"]) == (1, "scheduled"), pending["ours"]
    assert [entry for entry in completed["ours"]["entries"] if entry["state"] != "completed"] == [], completed["ours"]


@pytest.mark.gpu_job("maxima_dtypes")
def test_maxima_dtypes(ran: Ran, *, dry: bool) -> None:
    """One batch of tensors of each dtype, with NaN, inf, nothing, or the largest number in them, is reported right."""
    done = ran("maxima_dtypes")
    assert done.status == 0, done.stderr[-3000:]
    assert done.result
    values = {tuple(name.split()): float(text) for name, text in done.result.items()}
    assert all(math.isnan(value) for (_, kind), value in values.items() if kind == "nan"), done.result
    assert all(math.isinf(value) for (_, kind), value in values.items() if kind == "inf"), done.result
    assert all(value == 0.0 for (_, kind), value in values.items() if kind == "empty"), done.result
    if not dry:  # on a CPU these are sums
        assert all(value == 3.0 for (_, kind), value in values.items() if kind == "finite"), done.result
        huge = {dtype: value for (dtype, kind), value in values.items() if kind == "huge"}
        assert all(math.isfinite(value) for dtype, value in huge.items() if "complex" not in dtype), done.result


@pytest.mark.gpu_job("fingerprints")
def test_fingerprints(ran: Ran) -> None:
    """Fingerprints of all dtypes, complex and fp8 among them, are those of the CPU; a capture is left alone."""
    done = ran("fingerprints")
    assert done.status == 0, done.stderr[-3000:]
    assert done.result["differ"] == []
    assert done.result["unknown"] == []
    assert done.result["fp8"]
    assert done.result["captured"] == {"unknown": True, "right": True}


@pytest.mark.gpu_job("no_sync")
def test_no_sync(ran: Ran, *, dry: bool) -> None:
    """In a step that is not looked at, the host gets through while the device is still in a kernel of half a second."""
    done = ran("no_sync")
    assert_looked_at(done)
    for steps in done.result.values():
        quiet = [step for step in steps if step["ran_ahead"] is not None]
        assert len(quiet) == (0 if dry else 4)
        assert all(step["ran_ahead"] for step in quiet), steps


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu_job(name)) for name in ("straggler", "straggler_device")]
)
def test_straggler(ran: Ran, name: str) -> None:
    """A rank that is late to each step is reported by the times of NCCL's kernels, where torch takes them."""
    report = report_of(ran(name))
    found = [finding for finding in report["findings"] if finding["kind"] == "straggler"]
    assert [finding["ranks"] for finding in found] == [[1]], report["checks"]
    assert report["job"]["status"] == "finished"


GRADIENTS = ("bucket_view", "gradients_gloo")


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.gpu_job(f"{one}_nan")) for one in GRADIENTS])
def test_gradients_nan(ran: Ran, name: str) -> None:
    """The NaN of rank 1 is found: with gradients that are views of DDP's buckets before it is mixed, over NCCL; and
    with gradients on a GPU that are reduced over Gloo.
    """
    report = report_of(ran(f"{name}_nan"))
    verdict = report["verdict"]
    assert verdict is not None, report
    assert (verdict["kind"], verdict["ranks"], verdict["tensor"]) == ("nonfinite-grad", [1], "2.weight"), verdict
    assert_recorded(report)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.gpu_job(f"{one}_healthy")) for one in GRADIENTS])
def test_gradients_healthy(ran: Ran, name: str) -> None:
    """The same without NaN is silent, and was looked at."""
    assert_looked_at(ran(f"{name}_healthy"))


REPLICAS = {"drift": {"DD501", "DD503", "DD505"}, "alike": {"DD502", "DD508"}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu_job(f"replicas_{name}")) for name in REPLICAS]
)
def test_replicas(ran: Ran, name: str) -> None:
    """Three ranks over NCCL: what is not reduced and what differs is found as over Gloo, with the same causes.

    "alike": statistics that are each rank's own, and an optimizer of parameters that are no longer the model's.
    """
    report = report_of(ran(f"replicas_{name}"))
    check(report, [row for row in (*SYNCHRONIZATION, *PARAMETERS) if row[0] in DRIFTS and name == "drift"])
    assert {found["code"] for found in report["findings"]} == REPLICAS[name], report["findings"]
    assert_recorded(report)


@pytest.mark.gpu_job("replicas_healthy")
def test_replicas_healthy(ran: Ran) -> None:
    """The same done right."""
    found = outcomes(assert_silent(ran("replicas_healthy")))
    assert {found[kind] for kind in ("buffer-drift", "grad-drift", "stale-optimizer", "param-drift")} == {"passed"}


DROPOUT = {"alike": [("DD507", "info", [0, 1])], "apart": []}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu_job(f"dropout_{name}")) for name in DROPOUT])
def test_dropout(ran: Ran, name: str) -> None:
    """Ranks that are seeded alike drop the same units, which is said and is no fault; with seeds of their own not."""
    report = assert_silent(ran(f"dropout_{name}"))
    found = [(one["code"], one["severity"], one["ranks"]) for one in report["findings"]]
    assert found == DROPOUT[name], found
    assert found or outcomes(report)["same-random"] == "passed"
