"""What ranks of a device mesh hold alike: differences are reported by its dimension, and DDP is not brought in."""

from ddpdoctor.model.consistency import Difference, StreamClock, TensorRow, TensorSplit, What
from tests.golden import table
from tests.rules.consistency import build as streams
from tests.rules.consistency.build import about, everywhere, stream

FREQ = "layers.12.rope.inv_freq"


def constants(*tensors, ranks=3, odd=None):
    """The one comparison of constants: the name of each that differs, its sides, its dtype and shape."""
    splits = tuple(
        TensorSplit(
            row=TensorRow(what=What.BUFFER, name=name, part=f"{dtype}{list(shape)}", shape=shape, dtype=dtype),
            sides=sides,
        )
        for name, sides, dtype, shape in tensors
    )
    found = Difference(what=What.BUFFER, number=2, last_equal=None, splits=splits, differing=len(splits), of=9)
    now = everywhere(ranks, 2, odd=odd, optimizer="", settings=())
    more = {"group": "mesh dp", "model": 2, "optimizer": 1, "kinds": (What.BUFFER,), "compared": 1}
    return stream(found, ranks=ranks, now=now, **more)


def buffer(sides, name=FREQ, dtype="float32", shape=(32,)):
    return name, sides, dtype, shape


def own(tensor, odd):
    """Judge a constant that ranks may have for themselves."""
    ranks = sum(map(len, tensor[1]))
    return about(constants(tensor, ranks=ranks, odd=odd), ranks=ranks)


# Models that no DDP holds: equal gradients, or a loss of their own, tell which are to be equal.


def unwrapped(*differences, last=16, now=None, **more):
    """A stream of a model that no DDP holds, with what ranks wrote at its last point."""
    points = {one.number: everywhere(2, one.number) for one in differences}
    points[last] = everywhere(2, last, **(now or {}))
    return stream(*differences, model=-1, last_number=last, values=tuple(sorted(points.items())), **more)


# Buffers, optimizers, stale optimizers and random states.


STALE = {"stray": 4, "unheld": 4, "steps": 0}


def stale(clock=StreamClock.FORWARD, unchanged=7, compared=8, steps=100, ranks=2, odd=None, **more):
    now = everywhere(ranks, 64, odd=odd, **{**STALE, **more})
    seen = stream(clock=clock, ranks=ranks, last_number=64, values=((64, now),), unchanged=unchanged, compared=compared)
    return about(seen, ranks=ranks, steps=steps)


test_rows = table("meshes", vars(streams), globals())
