"""A fault of a GPU is its rank's, if the evidence says which rank had it."""

from ddpdoctor.model.evidence import Seen, Spot, Trouble, Who
from ddpdoctor.rules.evidence.identity import resolve

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
