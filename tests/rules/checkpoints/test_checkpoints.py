"""The rules of checkpoints: tables of facts in, findings out."""

from ddpdoctor.model import saved
from ddpdoctor.model.saved import (
    Checkpoints,
    Checksums,
    Contents,
    FileSeen,
    Form,
    OddValues,
    ReadState,
    StatePart,
    TensorIn,
    Weights,
)
from tests.golden import table
from tests.rules.build import judge_about

NAMES = ("body.weight", "body.bias", "head.weight")


def tensors(*names, shape=(2, 3), dtype="float32"):
    return tuple(TensorIn(name=name, shape=shape, dtype=dtype) for name in names)


def contents(*names, parts=(StatePart.MODEL,), where="model", **more):
    weights = (Weights(where=where, tensors=tensors(*names)),)
    return Contents(tensors=tensors(*names), weights=weights, parts=parts, **more)


def seen(path="x.pt", **changes):
    facts = {
        "size_bytes": 9000, "form": Form.ZIP, "state": ReadState.WHOLE, "checksums": Checksums.CHECKED,
        "contents": contents(*NAMES), "values": (),
    }  # fmt: skip
    return FileSeen(path=path, **{**facts, **changes})


def values(**counts):
    return (OddValues(**{"name": "head.weight", "of": 10, "nan": 0, "above": 0, "below": 0, "plain": 0, **counts}),)


def ask(*files, **more):
    return judge_about("checkpoints", Checkpoints(files=files, **more))


test_rows = table("checkpoints", vars(saved), globals())
