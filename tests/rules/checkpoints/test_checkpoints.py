"""The rules of checkpoints: tables of facts in, findings out."""

import pytest

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.saved import (
    Checkpoints,
    Checksums,
    Contents,
    Damage,
    Expected,
    FileSeen,
    Form,
    Gap,
    Leftover,
    OddValues,
    ReadState,
    StatePart,
    TensorIn,
    Weights,
)
from tests.rules.build import judge_about

E, W, N = Severity.ERROR, Severity.WARNING, Severity.INFO
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
    """Return outcome, findings and words by code."""
    judged = judge_about("checkpoints", Checkpoints(files=files, **more))
    return {
        check.code: (
            check.outcome,
            [one for one in judged.findings if one.code == check.code],
            check.seen or check.reason,
        )
        for check in judged.checks
    }


def problems(answers):
    return {code: [(one.severity, one.summary) for one in found] for code, (_, found, _) in answers.items() if found}


MODEL = Expected(function="train:build", tensors=tensors(*NAMES))
ALL = tuple(StatePart)


def test_a_sound_file_has_no_findings_and_what_was_not_asked_is_skipped():
    answers = ask(seen())
    assert problems(answers) == {}
    skipped = {code for code, (outcome, *_) in answers.items() if outcome is Outcome.SKIPPED}
    assert skipped == {"DD714", "DD716", "DD717"}


@pytest.mark.parametrize("file", [seen(contents=Contents(weights=())), seen(contents=None)])
def test_without_a_state_dict_there_are_no_names_to_judge(file):
    outcome, _, words = ask(file)["DD713"]
    assert (outcome, words) == (Outcome.SKIPPED, "it has no model state dict")


@pytest.mark.parametrize(
    ("file", "code", "severity", "words"),
    [
        (seen(state=ReadState.FOREIGN, contents=None, detail="a pointer of git-lfs"), "DD710", E,
         "a pointer of git-lfs"),
        (seen(damaged=(Damage(record="data/1", tensors=("model.head.weight",)),)), "DD711", E,
         "1 record has a wrong checksum (model.head.weight)"),
        (seen(damaged=(Damage(record="data.pkl"),)), "DD711", E, "1 record has a wrong checksum"),
        (seen(state=ReadState.UNREADABLE, contents=None), "DD711", E, "the index of x.pt cannot be read"),
        (seen(state=ReadState.EMPTY, contents=None), "DD712", E, "x.pt is empty"),
        (seen(state=ReadState.CUT, contents=None), "DD712", E, "truncated before its index"),
        (seen(state=ReadState.CUT, lost=("head.weight",)), "DD712", E, "1 of 3 tensors is lost"),
        (seen(state=ReadState.CUT), "DD712", E, "no tensor is lost"),
        (seen(contents=contents(*(f"module.{name}" for name in NAMES))), "DD713", N, "all 3 tensors have the prefix"),
        (seen(contents=contents("module.a", "b")), "DD713", W, "1 of 2 tensors have the prefix module."),
        (seen(values=values(nan=1, plain=9)), "DD715", E, "1 NaN among the 10 values of head.weight"),
        (seen(values=values(above=2, plain=8)), "DD715", E, "2 inf"),
        (seen(values=values(below=2, plain=8)), "DD715", W, "2 -inf"),
        (seen(contents=contents(*NAMES, parts=(StatePart.MODEL, StatePart.OPTIMIZER))), "DD716", N,
         "but no scheduler state"),
        (seen(contents=contents(*NAMES, parts=ALL, empty_optimizer=True)), "DD716", N, "had made no step"),
        (seen(contents=contents(*NAMES, globals=("a.B",)), refused=("a.B",)), "DD719", W, "because it refers to a.B"),
        (seen(contents=contents(*NAMES, globals=("posix.system",))), "DD719", E, "calls posix.system"),
        (seen(contents=contents(*NAMES, globals=("builtins.eval",))), "DD719", E, "it runs code"),
        (seen(refusal="RuntimeError: version 9"), "DD719", W, "version 9"),
        (seen(missing=("__1_0.distcp is not there",)), "DD720", E, "__1_0.distcp is not there"),
    ],
)  # fmt: skip
def test_each_fault_has_its_code(file, code, severity, words):
    found = problems(ask(file))
    assert list(found) == [code]
    assert found[code][0][0] is severity
    assert words in found[code][0][1]


@pytest.mark.parametrize(
    "file",
    [
        seen(values=values(above=10)),
        seen(values=values(below=6)),
        seen(contents=contents(*NAMES, parts=ALL)),
        seen(contents=contents(*NAMES, globals=("collections.defaultdict",))),
        seen(contents=contents("encoder.module.weight", "module_list.weight")),
        seen(checksums=Checksums.NOT_WRITTEN),
    ],
    ids=["nothing but inf", "mask", "all parts", "allowed class", "layer named module", "no checksums"],
)
def test_what_is_meant_is_no_finding(file):
    assert problems(ask(file)) == {}


def test_without_checksums_damage_is_skipped_and_not_passed():
    outcome, _, words = ask(seen(checksums=Checksums.NONE))["DD711"]
    assert (outcome, "no checksums" in words) == (Outcome.SKIPPED, True)


@pytest.mark.parametrize(
    ("inside", "code", "words"),
    [
        (contents(*NAMES), None, ""),
        (contents(*(f"module.{name}" for name in NAMES)), "DD713", "0 of 3 tensors would load into train:build, and 3"),
        (contents(*(f"module._orig_mod.{name}" for name in NAMES)), "DD713", "without the prefix module._orig_mod."),
        (contents(*NAMES[:2], "head._orig_mod.weight"), "DD713", "2 of 3 tensors would load into train:build, and 3"),
        (contents(*NAMES[:2]), "DD714", "head.weight is missing"),
        (Contents(), "DD714", "it has no tensors"),
        (contents(*NAMES, "extra"), "DD714", "extra is not in the model"),
        (Contents(weights=(Weights(where="", tensors=tensors(*NAMES, shape=(4, 3))),)), "DD714",
         "body.weight is (4, 3) in the file and (2, 3) in the model"),
        (Contents(weights=(Weights(where="", tensors=tensors(*NAMES, dtype="bfloat16")),)), "DD714",
         "would be silently converted"),
    ],
)  # fmt: skip
def test_names_are_held_to_the_model(inside, code, words):
    found = problems(ask(seen(contents=inside), expected=MODEL))
    assert list(found) == ([code] if code else [])
    assert not code or words in found[code][0][1]


def test_of_several_state_dicts_the_one_that_fits_is_compared():
    both = Contents(
        weights=(Weights(where="critic", tensors=tensors("a", "b")), Weights(where="actor", tensors=tensors(*NAMES)))
    )
    assert problems(ask(seen(contents=both), expected=MODEL)) == {}


@pytest.mark.parametrize(("asked", "severity"), [(True, E), (False, N)])
def test_copies_are_compared_by_tensor(asked, severity):
    one = seen("n0/x.pt", digests={"a": "1", "b": "2"})
    same, other = seen("n1/x.pt", digests={"b": "2", "a": "1"}), seen("n2/x.pt", digests={"a": "1", "c": "2"})
    found = problems(ask(one, same, other, copies=((0, 1, 2),), same_asked=asked))
    assert found == {"DD717": [(severity, "n2/x.pt differs from n0/x.pt in 2 of 3 tensors: b, c")]}


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": "1"}, {"model.a": "1"}, [(W, "y.pt has the same 1 tensor as x.pt under other names")]),
        ({"a": "1"}, {"model.a": "2"}, [(E, "y.pt differs from x.pt in 1 of 1 tensor: a")]),
        ({"a": "1", "b": "2"}, {"a": "1"}, []),  # b lies in a damaged part of y.pt
    ],
)
def test_copies_under_other_names_and_copies_that_cannot_be_read_in_full(left, right, found):
    files = [
        seen("x.pt", contents=contents(*left), digests=left),
        seen("y.pt", contents=contents(*(right if found else left)), digests=right),
    ]
    assert problems(ask(*files, copies=((0, 1),), same_asked=True)).get("DD717", []) == found


def test_neighbors_are_reported():
    left = Leftover(path="x.pt.tmp", kind="a temporary file of a write", detail="5 bytes; there is no x.pt")
    gap = Gap(pattern="s2_rank*.pt", missing=("s2_rank1.pt",), why="files of other steps have them")
    found = problems(ask(seen(), leftovers=(left,), gaps=(gap,)))
    assert found["DD718"][0] == (W, "x.pt.tmp is a temporary file of a write: 5 bytes; there is no x.pt")
    assert found["DD720"][0] == (E, "files s2_rank*.pt: s2_rank1.pt is missing")
