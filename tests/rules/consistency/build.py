"""Makes facts of replicas: streams, first differences, and what ranks wrote beside their tensors."""

from dataclasses import replace

from ddpdoctor.model.consistency import (
    Consistency,
    Difference,
    Stream,
    StreamClock,
    TensorRow,
    TensorSplit,
    Values,
    What,
)
from ddpdoctor.rules.engine import order_findings
from tests.rules import build
from tests.rules.build import judge_about

SETTINGS = (("lr", "0.1"), ("weight_decay", "0"))
KINDS = {
    StreamClock.STEP: (What.PARAMETER, What.GRADIENT, What.STATE),
    StreamClock.FORWARD: (What.PARAMETER,),
    StreamClock.SYNC: (What.BUFFER,),
    StreamClock.END: (What.PARAMETER,),
}


def values(rank, number=50, **more):
    """What a rank writes in a healthy training, at step ``number``."""
    fields = {
        "steps": number, "reductions": number, "forwards": 1, "unreduced_forwards": 0, "settings": SETTINGS,
        "optimizer": "SGD", "random": f"r{rank}", "site": build.line(30),
    }  # fmt: skip
    fields.update(more)
    return Values(rank=rank, **fields)


def everywhere(ranks=2, number=50, odd=None, **more):
    """What all ranks write; ``odd`` has what one writes otherwise, by rank."""
    odd = odd or {}
    return tuple(values(rank, number, **{**more, **odd.get(rank, {})}) for rank in range(ranks))


def split(name="0.weight", *sides, part="", what=What.PARAMETER, absent_on=()):
    return TensorSplit(row=TensorRow(what=what, name=name, part=part, shape=(4, 4), dtype="float32"), sides=sides,
                 absent_on=absent_on)  # fmt: skip


def apart(ranks=2):
    """Sides where no two ranks are equal."""
    return tuple((rank,) for rank in range(ranks))


def against(odd, ranks=3):
    """Sides where one rank stands against all others."""
    return (tuple(rank for rank in range(ranks) if rank != odd), (odd,))


def difference(what, number=50, last_equal=32, *, names=("0.weight",), sides=((0,), (1,)), part="", absent_on=()):
    splits = tuple(split(name, *sides, part=part, what=what, absent_on=absent_on) for name in names)
    return Difference(what=what, number=number, last_equal=last_equal, splits=splits, differing=len(names), of=6)


def stream(*differences, clock=StreamClock.STEP, ranks=2, now=None, before=None, **more):
    """A stream of which ``now`` is written at the first difference or, without any, at the last point."""
    last = max((one.number for one in differences), default=100)
    number = min((one.number for one in differences), default=last)
    earlier = differences[0].last_equal if differences else None
    points = {number: everywhere(ranks, number) if now is None else now}
    if earlier is not None:
        points[earlier] = everywhere(ranks, earlier) if before is None else before
    fields = {
        "group": "0", "model": 1, "optimizer": 1 if clock is StreamClock.STEP else 0, "ranks": tuple(range(ranks)),
        "compared": 8, "last_number": last, "kinds": KINDS[clock], "values": tuple(sorted(points.items())),
    }  # fmt: skip
    fields.update(more)
    return Stream(clock=clock, differences=differences, **fields)


def job(*streams, ranks=2, steps=100, **more):
    members = [build.ended(rank, ranks, steps=steps) for rank in range(ranks)]
    made = build.job(*members, ended=True, launcher_status=0, **more)
    return replace(made, consistency=Consistency(check_every=50, streams=streams))


def about(*streams, **more):
    """Ask all rules about these streams; the verdict is the first finding."""
    asked = judge_about("consistency", job(*streams, **more))
    return replace(asked, findings=tuple(order_findings(asked.findings)))
