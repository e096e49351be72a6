"""What all ranks do, from what each wants and is."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ddpdoctor.cli import allreduce_bench, check_consistency
from ddpdoctor.cli.options import declared_by
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.store import KeyValues
from ddpdoctor.model.bandwidth import BenchSettings, Collective, Member
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.trial import TrialSettings
from ddpdoctor.probes.bandwidth.plan import check_possible
from ddpdoctor.probes.ranks import (
    AUTO,
    Proposal,
    RankGpu,
    Ranks,
    describe_asked,
    find_differences,
    judge,
    lets_share,
    run_agreed,
)
from tests.golden import table

SETTINGS = BenchSettings(backend=AUTO)


def proposal(rank, *, settings=SETTINGS, gpu=None, problem="", **member):
    facts = {
        "host": "a", "local_rank": rank, "pid": 100 + rank, "device": "cpu", "device_name": "EPYC", "cores": 8,
        "version": "1.0", "torch": "2.13.0+cu128", "nccl": "2.27.3", **member,
    }  # fmt: skip
    member = Member(rank=rank, **facts)
    asked = {} if problem else describe_asked(settings, member)
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


def agreed(*uuids, **more):
    """Return what ranks with these GPUs agree on."""
    found = judge(with_gpus(*uuids, **more), len(uuids), 60)
    members = [f"{one.device} of {one.gpu_ranks} ranks, {one.device_name}" for one in found.members]
    return [replace(found, members=()), *members]


def differing(**changes):
    """Return what differs where the last of four ranks was given other settings: wrong use."""
    proposals = [*map(proposal, range(3)), proposal(3, settings=replace(SETTINGS, **changes), host="b")]
    assert refusal(proposals).status == 2
    return find_differences(proposals)


test_rows = table("agreement", "ddpdoctor.model.bandwidth", globals())


def test_variables_count_as_nccl_reads_them():
    allowed = {
        ("1", (2, 30, 3)): True, ("1", (2, 31, 0)): True, (" 0x2", (2, 30, 7)): True, ("1", (2, 30, 1)): False,
        ("1", (2, 29, 7)): False, ("0", (2, 30, 7)): False, ("yes", (2, 30, 7)): False, ("", (2, 30, 7)): False,
    }  # fmt: skip
    assert {key: lets_share({"NCCL_MULTI_RANK_GPU_ENABLE": key[0]}, key[1]) for key in allowed} == allowed


@pytest.mark.parametrize(
    ("settings", "verb"), [(SETTINGS, allreduce_bench), (TrialSettings(model="m:f"), check_consistency)]
)
def test_every_setting_is_compared_and_called_as_the_option_is(settings, verb):
    asked = describe_asked(settings, proposal(0).member)
    described = {name: value for name, value in asked.items() if name.startswith("--")}
    assert len(described) == len(type(settings).__dataclass_fields__)
    assert described.keys() <= {name for one in declared_by(verb.Options) for name in one.names}
    assert all(described.values())


def test_those_that_did_not_come_and_wrong_command_lines_are_reported():
    """With its rank, unless all have it."""
    error = refusal([proposal(0), proposal(3)], world_size=5)
    assert (error.problem, error.status) == ("ranks 1, 2, 4 did not connect within 60 s", 4)
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
