"""Files that were compared: what is reported of them, and whom it concerns."""

from ddpdoctor.model.saved import Apart, DiffFacts, Kind, SavedFile, Unequal
from tests.golden import table

TWO = ((0,), (1,))
ODD = ((0, 2), (1,))


def file(number, rank=..., path=None, stripped=()):
    return SavedFile(
        path=path or f"/runs/ckpt_rank{number}.pt", rank=number if rank is ... else rank, size_bytes=100, tensors=3,
        values=2, stripped=stripped,
    )  # fmt: skip


def apart(file=1, against=0, **more):
    fields = {"differing": 2, "of": 12, "first": (1, 2), "largest": 0.5, "relative": 0.25, "not_finite": 0}
    fields.update(more)
    return Apart(file=file, against=against, **fields)


def unequal(kind=Kind.PARAMETER, name="model.fc.weight", sides=TWO, **more):
    fields = {"seen": ("float32[3, 4]",) * len(sides), "apart": tuple(apart(side[0]) for side in sides[1:])}
    fields.update(more)
    return Unequal(kind=kind, name=name, sides=sides, **fields)


def setting(name="optimizer.param_groups.0.lr", kind=Kind.SETTING, seen=("0.1", "0.2"), sides=TWO):
    return unequal(kind, name, sides, seen=seen, apart=())


def facts(*differences, files=2, incomparable=(), tensors=3):
    named = tuple(map(file, range(files))) if isinstance(files, int) else files
    return DiffFacts(files=named, tensors=tensors, values=2, unequal=differences, incomparable=incomparable)


test_rows = table("files", "ddpdoctor.model.saved tests.rules.build", globals())
