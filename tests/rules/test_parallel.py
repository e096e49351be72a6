"""Ranks of a device mesh: who waits in which dimension and for whom, and errors that a library of torch's passed on."""

import pytest

from ddpdoctor.diagnose.job import judge_job as judge
from ddpdoctor.model.facts import GroupState
from tests.rules.build import C10D, LONG_AGO, S, call, crashed, error, in_user, job, line, rank


def mesh_group(name, dim, ranks, enqueued):
    return GroupState(name=name, ranks=ranks, backend="gloo", enqueued=enqueued, mesh_dim=dim)


def waiting(number, op, seq, name, *groups, **more):
    return rank(number, 4, open_calls=(call(op, seq, 20, group=name, **more),), groups=groups)


def two_by_two(inner="tp", outer="dp"):
    """Rank 3 of a mesh of 2 by 2 stands still: 2 waits for it in one dimension, 1 in the other, 0 behind that."""
    first, second = mesh_group("1", inner, (0, 1), 5), mesh_group("2", inner, (2, 3), 5)
    even, odd = mesh_group("3", outer, (0, 2), 5), mesh_group("4", outer, (1, 3), 5)
    behind = mesh_group("3", outer, (0, 2), 4)
    return (
        waiting(0, "all_reduce", 5, "3", first, even),
        waiting(1, "all_reduce", 5, "4", first, odd),
        waiting(2, "all_gather", 5, "2", second, behind),
        in_user(3, groups=(mesh_group("2", inner, (2, 3), 4), mesh_group("4", outer, (1, 3), 4)), world=4),
    )


@pytest.mark.parametrize(
    ("dims", "summary", "seen"),
    [
        pytest.param(
            ("tp", "dp"),
            "; ranks 1 and 2 are waiting for it in the dp and tp groups; rank 0 is waiting behind ranks 1 and 2",
            (
                "ranks 0 and 1 wait in all_reduce of float32[16] in their dp groups for ranks 2 and 3, train.py:20",
                "rank 2 waits in all_gather of float32[16] in the tp group (ranks 2 and 3) for rank 3, train.py:20",
            ),
            id="named dimensions",
        ),
        pytest.param(
            ("dim_1", "dim_0"),
            "; ranks 1 and 2 are waiting for it in the mesh dimension 0 and mesh dimension 1 groups; "
            "rank 0 is waiting behind ranks 1 and 2",
            ("in the mesh dimension 1 group (ranks 2 and 3) for rank 3",),
            id="dimensions without names",
        ),
        pytest.param(
            ("", ""),
            "; ranks 0-2 are waiting for it",
            ("rank 2 waits in all_gather of float32[16], train.py:20",),
            id="no mesh",
        ),
    ],
)
def test_waits_are_reported_by_dimension(dims, summary, seen) -> None:
    verdict = judge(job(*two_by_two(*dims))).findings[0]
    assert (verdict.kind, verdict.ranks) == ("stuck", (3,))
    assert verdict.summary.endswith(summary)
    assert all(any(words in sentence for sentence in verdict.evidence) for words in seen), verdict.evidence


def test_a_dimension_that_spans_all_ranks_is_the_group_of_all() -> None:
    everybody = tuple(range(4))
    ranks = [waiting(n, "all_reduce", 5, "0", mesh_group("0", "dp", everybody, 5)) for n in range(3)]
    verdict = judge(job(*ranks, in_user(3, world=4, enqueued=4))).findings[0]
    assert verdict.summary.endswith("; ranks 0-2 are waiting for it in all_reduce")


def test_a_receive_says_from_whom() -> None:
    found = judge(job(waiting(0, "irecv", None, "0", peer=1), in_user(1, world=2), world_size=2)).findings[0]
    assert any("in irecv of float32[16] from rank 1, " in sentence for sentence in found.evidence), found.evidence


def heard_of(number, of_ranks, at, **more):
    """A rank on which a distributed checkpoint raised the collection of errors."""
    text = f"CheckpointException ranks:dict_keys({list(of_ranks)})"
    return crashed(number, error("CheckpointException", text, at, (line(30), C10D), of_ranks=of_ranks, **more))


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        pytest.param(
            (
                heard_of(0, (1,), LONG_AGO),
                crashed(1, error(at=LONG_AGO + S, of_ranks=(1,), passed_on_as="CheckpointException")),
                heard_of(2, (1,), LONG_AGO),
            ),
            (1,),
            id="the rank whose error it was raised last",
        ),
        pytest.param(
            (heard_of(0, (0, 1), LONG_AGO), heard_of(1, (0, 1), LONG_AGO), heard_of(2, (0, 1), LONG_AGO)),
            (0, 1, 2),
            id="all at one line, with errors of several",
        ),
    ],
)
def test_who_only_heard_of_an_error_is_not_blamed(ranks, blamed) -> None:
    verdict = judge(job(*ranks)).findings[0]
    assert (verdict.kind, verdict.ranks) == ("crash", blamed)


def test_the_error_that_the_log_ends_with_is_named() -> None:
    raised = error(passed_on_as="RuntimeError")
    verdict = judge(job(crashed(0, raised), in_user(1, world=2), world_size=2)).findings[0]
    assert "torch raised RuntimeError because of this error" in verdict.evidence
