"""The flight recorder tells what a rank waits for on the device: entries of torch 2.6, 2.13 and 2.15."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.collect.rank.flight import Recorded, device_times, pending_on_device, read_flight
from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import Call, DeviceState, GroupState
from ddpdoctor.model.stacks import Frame
from ddpdoctor.recorder.storage.flight_entries import chosen

DATA = Path(__file__).parents[2] / "data" / "flight-recorder"
SITE = Frame(file="train.py", line=7, function="main", user=True)
GROUPS = (
    GroupState(name="0", ranks=(0, 1, 2, 3), backend="nccl", enqueued=9),
    GroupState(name="1", ranks=(1, 3), backend="nccl", enqueued=2),
)
WALL = 1_795_000_000_000_000_000
"""Where CLOCK_REALTIME is when CLOCK_MONOTONIC is 0."""


def entry(seq: int, state: str = "completed", *, name: str = "nccl:all_reduce", group: str = "0", **more: Any) -> Any:
    """Return an entry of ProcessGroupNCCL's own recorder in torch 2.6 or 2.13, by form: both builds need a GPU for it.

    The keys are those that FlightRecorder.cpp and FlightRecorderDetail.hpp write; Gloo's real entries have them too.
    """
    return {
        "record_id": seq, "pg_id": 0, "process_group": [group, "default_pg"], "collective_seq_id": seq,
        "p2p_seq_id": 0, "op_id": seq, "profiling_name": name, "time_created_ns": WALL + seq, "input_sizes": [[68]],
        "input_dtypes": ["Float"], "output_sizes": [[68]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": state == "completed",
        "timeout_ms": 600000, "is_p2p": False, **more,
    }  # fmt: skip


def p2p(number: int, name: str, state: str = "scheduled", **more: Any) -> Any:
    return entry(
        4, state, name=f"nccl:{name}", is_p2p=True, p2p_seq_id=number, time_created_ns=WALL + 10 + number, **more
    )


def call(seq: int, op: str = "all_reduce", **more: Any) -> Call:
    fields: dict[str, Any] = {"seq": seq, "peer": None, "redop": "SUM", "started_ns": seq, "ended_ns": seq + 1, **more}
    return Call(
        index=seq, op=op, api=op, group="0", dtype="torch.float32", shape=(4,), tensors=1, site=SITE, is_async=False,
        failed=False, thread_is_main=True, **fields,
    )  # fmt: skip


def pending(entries: list[Any], *calls: Call, timed: bool = False) -> tuple[Call, ...]:
    """Return what a reader finds in a rank's answer, in which the rank itself has chosen the entries."""
    answer = {"flight_recorder": {"wall_ns": WALL + 5, "at": 5, "timed": int(timed), "entries": chosen(entries)}}
    return pending_on_device(read_flight(answer), pack_calls(calls), GROUPS)


def test_a_rank_waits_for_its_oldest_collective_that_has_not_completed() -> None:
    (found,) = pending([entry(1), entry(2, "started"), entry(3, "scheduled")], call(1), call(2), call(3))
    assert (found.seq, found.site, found.ended_ns, found.is_async, found.native) == (2, SITE, None, False, False)
    assert found.index > 3
    assert found.started_ns == 2


def test_durations_of_what_is_done_hide_nothing_that_is_pending() -> None:
    """Under TORCH_NCCL_ENABLE_TIMING, and under DETAIL."""
    timed = [entry(seq, duration_ms=0.5) for seq in (1, 2)]
    (found,) = pending([*timed, entry(3, "started"), entry(4, "scheduled")])
    assert (found.seq, found.device_state) == (3, DeviceState.STARTED)
    (found,) = pending([*timed, entry(3, "scheduled")])
    assert found.device_state is DeviceState.SCHEDULED


def test_a_host_that_ran_far_ahead_still_waits_for_the_first() -> None:
    (found,) = pending([entry(1), *(entry(seq, "scheduled") for seq in range(2, 2000))])
    assert found.seq == 2


def test_a_collective_of_the_reducer_has_no_site_and_the_dtype_that_a_peers_own_record_has() -> None:
    (found,) = pending([entry(5, "scheduled")], call(4))
    assert (found.op, found.site, found.shape, found.dtype) == ("all_reduce", None, (68,), "torch.float32")
    assert found.native
    assert found.started_ns == 5


def test_of_several_groups_the_oldest_pending_is_the_innermost_call() -> None:
    entries = [entry(9, "scheduled", time_created_ns=WALL + 70), entry(2, "scheduled", group="1")]
    found = pending(entries)
    assert [(one.group, one.seq) for one in found] == [("1", 2), ("0", 9)]
    assert max(found, key=lambda one: one.index).group == "1"


@pytest.mark.parametrize(
    ("state", "timed", "name", "expected"),
    [
        ("started", True, "nccl:all_reduce", DeviceState.STARTED),
        ("scheduled", True, "nccl:all_reduce", DeviceState.SCHEDULED),
        ("scheduled", False, "nccl:all_reduce", DeviceState.UNKNOWN),
        ("scheduled", True, "nccl2:all_reduce", DeviceState.UNKNOWN),
    ],
)
def test_queued_and_running_are_distinguished_only_where_torch_can(
    *, state: str, timed: bool, name: str, expected: DeviceState
) -> None:
    (found,) = pending([entry(3, state, name=name)], timed=timed)
    assert found.device_state is expected


def test_what_is_complete_or_of_another_backend_is_nothing() -> None:
    entries = [entry(1), entry(2, "scheduled", name="gloo:all_reduce"), {}, 7, entry(3, "scheduled", retired=True)]
    assert pending(entries) == ()


def test_what_is_older_than_a_completed_one_of_its_group_is_done() -> None:
    assert pending([entry(1, "scheduled"), entry(2)]) == ()


@pytest.mark.parametrize(
    ("name", "op", "peer"), [("recv 1<-0", "recv", 0), ("send 1->3", "send", 3), ("recv 1<-?", "recv", None)]
)
def test_point_to_point_is_recognized_by_its_name(name: str, op: str, peer: int | None) -> None:
    (found,) = pending([p2p(1, name)])
    assert (found.op, found.peer, found.seq, found.native) == (op, peer, None, True)


def test_a_peer_is_a_rank_of_the_job_and_not_of_the_group() -> None:
    (found,) = pending([p2p(1, "send 0->1", process_group=["1", ""])])
    assert found.peer == 3


def test_a_receive_has_the_line_of_its_own_call() -> None:
    calls = (call(6, "isend", peer=0), call(7, "irecv", peer=2), call(8, "irecv", peer=0), call(30, "irecv", peer=0))
    (found,) = pending([p2p(1, "recv 1<-0")], *calls)
    assert (found.op, found.site, found.native) == ("recv", SITE, False)


def test_the_parts_of_a_batch_are_as_far_as_the_entry_that_ends_it() -> None:
    parts = [p2p(1, "send 1->2"), p2p(1, "recv 1<-0")]
    assert pending([*parts, p2p(1, "coalesced", "completed")]) == ()
    found = pending([*parts, p2p(1, "coalesced", "started")])
    assert [(one.op, one.peer, one.device_state) for one in found] == [
        ("send", 2, DeviceState.STARTED), ("recv", 0, DeviceState.STARTED),
    ]  # fmt: skip


def test_a_batch_of_collectives_without_parts_is_pending_by_itself() -> None:
    (found,) = pending([entry(6, "scheduled", name="nccl:coalesced")], call(6, "all_gather"))
    assert (found.op, found.site) == ("all_gather", SITE)


def test_entries_of_nccl2_on_torch_2_15_show_groups_reducer_and_point_to_point() -> None:
    entries = json.loads((DATA / "nccl2-2.15.json").read_text())["entries"]
    found = pending(entries, call(1), call(2, "broadcast"))
    assert [(one.group, one.op, one.seq, one.peer, one.dtype, one.shape) for one in found] == [
        ("1", "all_reduce", 1, None, "torch.float32", (4,)),
        ("0", "all_reduce", 6, None, "torch.float32", (15,)),
        ("0", "recv", None, 2, None, None),
        ("1", "send", None, 3, "torch.float32", (4,)),
    ]
    assert all(one.native and one.device_state is DeviceState.UNKNOWN for one in found)
    assert all(one.started_ns > 0 for one in found)


def test_a_hooks_number_that_is_another_calls_lends_no_line() -> None:
    (found,) = pending([entry(2, "scheduled", name="nccl2:all_reduce")], call(2, "broadcast"))
    assert found.site is None


def test_the_answer_of_an_earlier_recorder_is_still_read() -> None:
    kept = ("process_group", "collective_seq_id", "profiling_name", "state", "retired", "is_p2p")
    old = [{name: value for name, value in entry(2, "started").items() if name in kept}]
    (found,) = pending_on_device(read_flight({"flight_recorder": old}), pack_calls((call(2),)), GROUPS)
    assert (found.seq, found.site, found.started_ns) == (2, SITE, 2)
    assert read_flight({}) == Recorded()


def test_durations_are_those_of_completed_collectives_that_torch_timed() -> None:
    entries = [
        entry(1, duration_ms=2.5),
        entry(2),
        entry(3, "started"),
        p2p(1, "send 1->0", "completed", duration_ms=1.0),
    ]
    answer = {"flight_recorder": {"wall_ns": 1, "at": 1, "timed": 1, "entries": entries}}
    assert [(one.group, one.seq, one.op, one.ran_ms) for one in device_times(read_flight(answer))] == [
        ("0", 1, "all_reduce", 2.5)
    ]


@pytest.mark.parametrize(
    "damage", [{"collective_seq_id": 2**80}, {"process_group": []}, {"state": 7}, {"profiling_name": None}]
)
def test_a_damaged_entry_is_left_out(damage: dict[str, Any]) -> None:
    assert pending([{**entry(2, "started"), **damage}]) == ()
