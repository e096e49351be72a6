"""Calls of NCCL's logs, compared between ranks, and which rank and host a line is about."""

from ddpdoctor.model.evidence import Called, Differ, Operation, Seen, Spot, Trouble, Who
from ddpdoctor.rules.evidence.calls import compare_calls
from ddpdoctor.rules.evidence.state import resolve


def call(rank: int | None, number: int, op: str = "all_reduce", count: int = 64, group: str = "comm 0x6e") -> Called:
    operation = Operation(op=op, group=group, seq=number, numel_in=count, dtype="float32")
    return Called(who=Who(rank=rank), spot=Spot(source=f"{rank}.log", line=number + 1), operation=operation)


def compare(*called: Called) -> list[Differ]:
    return list(compare_calls(called))


def test_another_operation_at_one_number_is_a_mismatch_of_the_minority() -> None:
    alike = [call(rank, 1) for rank in range(4)]
    (found,) = compare(*alike, *(call(rank, 2, "all_gather" if rank == 2 else "all_reduce") for rank in range(4)))
    assert (found.odd, found.aspect) == ((2,), "operation")
    assert [(ranks, operation.op) for ranks, operation in found.sides] == [
        ((0, 1, 3), "all_reduce"),
        ((2,), "all_gather"),
    ]


def test_another_size_is_a_mismatch_of_shapes_and_of_two_nobody_is_odd() -> None:
    (found,) = compare(call(0, 7, count=64), call(1, 7, count=65))
    assert (found.odd, found.aspect) == (None, "shape")


def test_the_first_number_counts() -> None:
    (found,) = compare(
        *(call(rank, number, "broadcast" if rank else "reduce") for rank in range(3) for number in (9, 4))
    )
    assert {operation.seq for _, operation in found.sides} == {4}


def test_equal_calls_and_numbers_that_only_some_have_are_well() -> None:
    assert compare(call(0, 1), call(1, 1), call(0, 2)) == []
    assert compare(call(0, 1), call(1, 1, "all_gather", group="comm 0x7f")) == []
    assert compare(call(None, 1), call(1, 1, "all_gather")) == []


def test_calls_of_one_group_call_may_come_in_any_order() -> None:
    ops = ("all_reduce", "all_gather")
    assert compare(*(call(0, 1, op) for op in ops), *(call(1, 1, op) for op in reversed(ops))) == []
    assert compare(call(0, 1), call(1, 1), call(1, 1, "all_gather")) == []


def test_communicators_that_share_a_number_are_not_compared() -> None:
    group = "comm no. 0 of 2 ranks"
    assert compare(*(call(rank, 1, "reduce" if rank < 2 else "broadcast", group=group) for rank in range(4))) == []


# A fault of a GPU is its rank's, if the evidence says which rank had it.


SPOT = Spot(source="log", line=1)


def seen(rank: int, gpu: str, host: str = "g7") -> Seen:
    return Seen(who=Who(rank=rank, host=host), spot=SPOT, gpu=gpu)


def rank_of(*others: Seen) -> int | None:
    fault = Trouble(who=Who(host="g7"), spot=SPOT, kind="xid", problem="it had Xid 79", gpu="4e:00")
    return resolve([*others, fault], None)[-1].who.rank


def test_the_rank_on_the_gpu_is_named() -> None:
    assert rank_of(seen(1, "1a:00"), seen(2, "4e:00")) == 2


def test_another_hosts_gpu_and_a_gpu_of_several_ranks_are_nobodys() -> None:
    assert rank_of(seen(2, "4e:00", host="g8")) is None
    assert rank_of(seen(2, "4e:00"), seen(3, "4e:00"), seen(2, "4e:00")) is None


def test_the_host_of_a_rank_is_that_of_its_other_lines_if_they_agree() -> None:
    def host_of(*others: Seen) -> str:
        fault = Trouble(who=Who(rank=2), spot=SPOT, kind="xid", problem="it had Xid 79")
        return resolve([*others, fault], None)[-1].who.host

    assert host_of(seen(1, "1a:00", host="g6"), seen(2, "4e:00")) == "g7"
    assert host_of(seen(1, "1a:00")) == ""
    assert host_of(seen(2, "4e:00"), seen(2, "4e:00", host="g8")) == ""
