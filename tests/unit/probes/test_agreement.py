"""What all ranks do, from what each wants and is."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ddpdoctor.cli import allreduce_bench, check_consistency
from ddpdoctor.cli.options import declared_by
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.store import KeyValues
from ddpdoctor.model.bandwidth import BenchSettings, Collective, Member, Mode
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.trial import TrialSettings
from ddpdoctor.probes.bandwidth.plan import check_possible
from ddpdoctor.probes.ranks import (
    AUTO,
    Proposal,
    RankGpu,
    Ranks,
    describe_settings,
    describe_versions,
    find_differences,
    judge,
    lets_share,
    nccl_host,
    run_agreed,
)

SETTINGS = BenchSettings(backend=AUTO)


def proposal(rank, *, settings=SETTINGS, gpu=None, problem="", **member):
    facts = {
        "host": "a", "local_rank": rank, "pid": 100 + rank, "device": "cpu", "device_name": "EPYC", "cores": 8,
        "version": "1.0", "torch": "2.13.0+cu128", "nccl": "2.27.3", **member,
    }  # fmt: skip
    member = Member(rank=rank, **facts)
    asked = {} if problem else describe_settings(settings) | describe_versions(member)
    return Proposal(member=member, asked=asked, backend=settings.backend, gpu=gpu, problem=problem, help="so")


def with_gpus(*uuids, settings=SETTINGS, nccl_hosts=None, may_share=()):
    gpus = [
        RankGpu(
            index=rank, name="H100", uuid=uuid, nccl_host=nccl_hosts[rank] if nccl_hosts else "a",
            may_share=rank in may_share,
        )
        if uuid is not None
        else None
        for rank, uuid in enumerate(uuids)
    ]  # fmt: skip
    return [proposal(rank, settings=settings, gpu=gpu) for rank, gpu in enumerate(gpus)]


def refusal(proposals, world_size=None):
    verdict = judge(proposals, world_size or len(proposals), 60)
    assert verdict.members == ()
    return verdict


ON_NCCL, ON_GLOO = (BenchSettings(backend=name) for name in ("nccl", "gloo"))
AGREED = {
    "each has its own": (("x", "y"), {}, "nccl cuda:0 cuda:1"),
    "gloo was asked for": (("x", "y"), {"settings": ON_GLOO}, "gloo cpu cpu"),
    "they share one": (("x", "x"), {}, "gloo cpu cpu"),
    "one has none": (("x", None), {}, "gloo cpu cpu"),
    "none has one": ((None, None), {}, "gloo cpu cpu"),
    # Another NCCL_HOSTID for each rank, with and without asking; the same for all where nobody shares.
    "own ids": (("x", "x"), {"settings": ON_NCCL, "nccl_hosts": ("0", "1")}, "nccl cuda:0*2 cuda:1*2"),
    "own ids of three": (
        ("x", "x", "y"), {"settings": ON_NCCL, "nccl_hosts": ("0", "1", "2")}, "nccl cuda:0*2 cuda:1*2 cuda:2"
    ),
    "own ids, not asked": (("x", "x"), {"nccl_hosts": ("0", "1")}, "gloo cpu cpu"),
    "one id": (("x", "y"), {"settings": ON_NCCL, "nccl_hosts": ("1", "1")}, "nccl cuda:0 cuda:1"),
    # NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks.
    "all may share": (
        ("x", "x", "y"), {"settings": ON_NCCL, "nccl_hosts": ("a",) * 3, "may_share": (0, 1, 2)},
        "nccl cuda:0*2 cuda:1*2 cuda:2",
    ),
    # What NCCL would refuse. Each rank looks at all pairs, so one without the variable is enough. Only equal ids are
    # refused, where one of three kept the host's own.
    "asked, one has none": (("x", "y", None), {"settings": ON_NCCL}, "rank 2 has none"),
    "asked, two share": (("x", "x", "y"), {"settings": ON_NCCL}, "ranks 0 and 1 share one"),
    "asked, one may not share": (
        ("x", "x", "y"), {"settings": ON_NCCL, "may_share": (0, 1)}, "ranks 0 and 1 share one"
    ),
    "asked, two of one id": (
        ("x", "x", "x"), {"settings": ON_NCCL, "nccl_hosts": ("1", "1", "a")}, "ranks 0 and 1 share one"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREED)
def test_the_backend_is_what_the_gpus_of_all_ranks_allow(name):
    uuids, more, expected = AGREED[name]
    agreed = judge(with_gpus(*uuids, **more), len(uuids), 60)
    if not agreed.members:
        assert agreed.problem == f"--backend nccl needs its own GPU for every rank; {expected}"
        assert ("NCCL_HOSTID" in agreed.help) is ("share" in expected)
        return
    shares = [f"{one.device}*{one.gpu_ranks}".removesuffix("*1") for one in agreed.members]
    assert " ".join([agreed.backend, *shares]) == expected
    assert {one.device_name for one in agreed.members} == {"H100" if agreed.backend == "nccl" else "EPYC"}


ON_NCCL = BenchSettings(backend="nccl")


def test_variables_count_as_nccl_reads_them():
    allowed = {
        ("1", (2, 30, 3)): True, ("1", (2, 31, 0)): True, (" 0x2", (2, 30, 7)): True, ("1", (2, 30, 1)): False,
        ("1", (2, 29, 7)): False, ("0", (2, 30, 7)): False, ("yes", (2, 30, 7)): False, ("", (2, 30, 7)): False,
    }  # fmt: skip
    assert {key: lets_share({"NCCL_MULTI_RANK_GPU_ENABLE": key[0]}, key[1]) for key in allowed} == allowed
    assert [nccl_host(env, "a") for env in ({}, {"NCCL_HOSTID": "7"}, {"NCCL_HOSTID": ""})] == ["a", "7", ""]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_size_bytes": 64 * 2**20}, "--max-size: 1 GiB on ranks 0-2 (host a), 64 MiB on rank 3 (host b)"),
        ({"min_size_bytes": 1000}, "--min-size: 1 KiB on ranks 0-2 (host a), 1000 B on rank 3 (host b)"),
        (
            {"collectives": tuple(Collective)[:2]},
            "--collective: all_reduce on ranks 0-2 (host a), all_reduce,all_gather on",
        ),
        ({"modes": (Mode.LATENCY,)}, "--mode: latency,throughput on ranks 0-2 (host a), latency on rank 3 (host b)"),
        ({"in_place": True}, "--in-place: no on ranks 0-2 (host a), yes on rank 3 (host b)"),
        ({"budget_s": 5.0}, "--budget: 30 s on ranks 0-2 (host a), 5 s on rank 3 (host b)"),
        ({"iterations": 5}, "--iters: not set on ranks 0-2 (host a), 5 on rank 3 (host b)"),
        ({"backend": "gloo"}, "--backend: auto on ranks 0-2 (host a), gloo on rank 3 (host b)"),
    ],
)
def test_a_setting_that_differs_is_named_with_who_and_what(changes, words):
    proposals = [proposal(rank) for rank in range(3)] + [proposal(3, settings=replace(SETTINGS, **changes), host="b")]
    (difference,) = find_differences(proposals)
    assert difference.startswith(words)
    assert refusal(proposals).status == 2


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ({"version": "1.1"}, ["the version of ddpdoctor: 1.0 on rank 0, 1.1 on rank 1"]),
        ({"torch": "2.12.0+cu128"}, ["the version of torch: 2.13.0 on rank 0, 2.12.0 on rank 1"]),
        ({"nccl": "2.26.2"}, ["the version of NCCL: 2.27 on rank 0, 2.26 on rank 1"]),
        ({"nccl": None}, ["the version of NCCL: 2.27 on rank 0, none on rank 1"]),
        ({"nccl": "2.27.5"}, []),
        ({"torch": "2.13.0+cpu"}, []),
        ({"cores": 4, "host": "b"}, []),
    ],
)
def test_versions_that_differ(member, words):
    assert find_differences([proposal(0), proposal(1, **member)]) == words


@pytest.mark.parametrize(
    ("settings", "verb"), [(SETTINGS, allreduce_bench), (TrialSettings(model="m:f"), check_consistency)]
)
def test_every_setting_is_compared_and_called_as_the_option_is(settings, verb):
    described = describe_settings(settings)
    assert len(described) == len(type(settings).__dataclass_fields__)
    assert described.keys() <= {name for one in declared_by(verb.Options) for name in one.names}
    assert all(described.values())


def test_those_that_did_not_come_and_wrong_command_lines_are_reported():
    """With its rank, unless all have it."""
    error = refusal([proposal(0), proposal(3)], world_size=5)
    assert (error.problem, error.status) == ("ranks 1, 2, 4 did not come within 60 s", 4)
    messages = {
        ("bad", "bad"): "bad", ("bad", ""): "rank 0: bad", ("", "bad", "bad"): "ranks 1 and 2: bad",
        ("", "bad", "worse"): "rank 1: bad", ("bad",): "bad",
    }  # fmt: skip
    for problems, message in messages.items():
        proposals = [proposal(rank, problem=problem) for rank, problem in enumerate(problems)]
        assert refusal(proposals, max(2, len(problems))).problem == message


@pytest.mark.parametrize(
    ("problems", "reported"),
    [(("", "bad"), ["rank 1: bad"]), (("bad", ""), ["rank 0: bad"]), (("bad", "bad"), ["bad"]), (("", ""), [])],
)
def test_rank_0_says_why_nothing_runs_and_all_ranks_end_alike(problems, reported):
    launch = Launch(launcher=Launcher.ENVIRONMENT, run="", world_size=2)
    talk, shown, ran = Conversation(KeyValues()), [[], []], []

    def take_part(rank):
        ranks = Ranks(replace(launch, rank=rank), talk, 30)

        def run(*agreed):
            ran.append(agreed)
            return 0

        own = proposal(rank, problem=problems[rank])
        return run_agreed(ranks, own, 30, lambda error: shown[rank].append(error.message), run)

    with ThreadPoolExecutor() as pool:
        statuses = list(pool.map(take_part, range(2)))

    assert (statuses, shown) == ([2 if reported else 0] * 2, [reported, []])
    assert [(backend, len(members)) for backend, members in ran] == ([] if reported else [("gloo", 2)] * 2)


def test_what_the_chosen_backend_cannot_reduce_is_refused():
    settings = BenchSettings(dtypes=("int32",), redop="avg")

    def check(backend):
        check_possible(replace(settings, backend=backend))

    refused = judge([proposal(0)], 1, 60, check)
    assert ("gloo cannot reduce int32 with avg" in refused.problem, refused.status) == (True, 2)
    settings = replace(settings, collectives=(Collective.ALL_GATHER,))
    assert judge([proposal(0)], 1, 60, check).backend == "gloo"
