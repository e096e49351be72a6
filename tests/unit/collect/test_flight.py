"""The flight recorder tells which collective of NCCL a rank waits for on the device."""

from __future__ import annotations

from typing import Any

from ddpdoctor.collect.flight import pending_on_device
from ddpdoctor.model.facts import Call, Frame

SITE = Frame(file="train.py", line=7, function="main", user=True)


def entry(seq: int, state: str = "completed", *, name: str = "nccl:all_reduce", group: str = "0", **more: Any) -> Any:
    return {
        "process_group": [group, "default_pg"], "collective_seq_id": seq, "profiling_name": name, "state": state,
        "retired": state == "completed", "is_p2p": False, "input_sizes": [[68]], "input_dtypes": ["Float"], **more,
    }  # fmt: skip


def call(seq: int) -> Call:
    return Call(
        index=seq, op="all_reduce", api="all_reduce", group="0", seq=seq, dtype="torch.float32", shape=(4,), tensors=1,
        peer=None, redop="SUM", site=SITE, started_ns=seq, ended_ns=seq + 1, is_async=False, failed=False,
        thread_is_main=True,
    )  # fmt: skip


def test_a_rank_waits_for_its_oldest_collective_that_has_not_completed() -> None:
    entries = [entry(1), entry(2, "started"), entry(3, "scheduled")]
    (pending,) = pending_on_device(entries, (call(1), call(2), call(3)))
    assert (pending.seq, pending.site, pending.ended_ns, pending.is_async) == (2, SITE, None, False)
    assert pending.index > 3


def test_a_collective_of_the_reducer_has_no_site_and_its_own_shape() -> None:
    (pending,) = pending_on_device([entry(5, "scheduled")], (call(4),))
    assert (pending.op, pending.site, pending.shape) == ("all_reduce", None, (68,))


def test_each_group_counts_for_itself() -> None:
    found = pending_on_device([entry(9, "started"), entry(2, "started", group="1")], ())
    assert {(pending.group, pending.seq) for pending in found} == {("0", 9), ("1", 2)}


def test_what_is_complete_or_of_another_backend_is_nothing() -> None:
    entries = [entry(1), entry(2, "scheduled", name="gloo:all_reduce"), entry(3, "scheduled", is_p2p=True), {}]
    assert pending_on_device(entries, ()) == ()
