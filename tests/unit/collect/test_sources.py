"""Which processes stand for ranks, under every kind of launcher."""

import pytest

from ddpdoctor.collect.run.agent_log import WorkerStart
from ddpdoctor.collect.run.sources import RankTraces, find_ranks, is_on_one_host
from ddpdoctor.collect.run.watched import WatchedJob, parse_watch
from ddpdoctor.recorder.storage.ring_layout import CELL_NAMES, ROLE_CHILD, ROLE_RANK
from ddpdoctor.recorder.storage.ring_reading import RingContent


def ring(pid, *, ppid=1, began=10, joined=None, world=2, of=0, left=None, role=ROLE_RANK, **env):
    process = {"k": "process", "ppid": ppid, "rank_pid": of, "env": {name: str(value) for name, value in env.items()}}
    notes = [process]
    notes += [{"k": "initialized", "rank": joined, "world_size": world}] if joined is not None else []
    notes += [{"k": "destroyed", "at": left}] if left is not None else []
    fields = dict.fromkeys(RingContent._fields, None)
    fields.update(role=role, pid=pid, start_ticks=1, cells=dict.fromkeys(CELL_NAMES, 0) | {"started_ns": began},
                  notes=notes, slots=[])  # fmt: skip
    return RingContent(**fields)


def found(*rings, started=None, watched=None, until=None):
    contents = {content.pid: content for content in rings}
    seen = RankTraces(
        started=started or {}, contents=contents, watch=parse_watch({"processes": watched or {}}), until_ns=until
    )
    return [(source.rank, source.pid) for source in find_ranks(seen)]


AGENT = {
    20: WorkerStart(pid=20, rank=0, local_rank=0, world_size=2, at=5),
    21: WorkerStart(pid=21, rank=1, local_rank=1, world_size=2, at=5),
}


def test_the_agents_children_are_ranks_recorded_or_not():
    assert found(ring(20, RANK=0), started=AGENT) == [(0, 20), (1, 21)]


def test_what_a_rank_starts_is_none_and_earlier_or_later_attempts_do_not_count():
    helper, before, after = (
        ring(30, ppid=20, role=ROLE_CHILD),
        ring(31, began=1, joined=0),
        ring(32, began=90, joined=0),
    )
    assert found(ring(20), ring(21), helper, before, after, started=AGENT, until=50) == [(0, 20), (1, 21)]


def test_a_world_that_an_agents_child_made_stands_for_it():
    children = [ring(40, ppid=20, joined=1), ring(41, ppid=20, joined=0)]
    one = {20: AGENT[20]}
    assert sorted(found(ring(20), *children, started=one)) == [(0, 41), (1, 40)]


def test_a_rank_behind_a_shell_is_its_python_and_ends_with_the_shell():
    seen = RankTraces(
        started=AGENT,
        contents={c.pid: c for c in (ring(50, ppid=20, RANK=0), ring(51, ppid=21, RANK=1))},
        watch=WatchedJob(),
    )
    sources = find_ranks(seen)
    assert [(s.rank, s.pid, s.stands_for) for s in sources] == [(0, 50, 20), (1, 51, 21)]


def test_behind_a_shell_the_python_that_joined_counts_and_not_the_last_helper():
    rings = [ring(50, ppid=20, joined=0, RANK=0), ring(51, ppid=20, began=20, RANK=0)]
    assert found(*rings, started={20: AGENT[20]}) == [(0, 50)]


TRAINERS = ring(20, RANK=0, joined=0), ring(21, RANK=1, joined=1)
WRAPPERS = ring(20, RANK=0), ring(21, RANK=1)
BELOW_THE_FIRST = [
    # what is below the rank, and the ranks then: an evaluation by two spawned processes, one behind a shell that
    # inherited the number, and one that an own launcher numbered
    (TRAINERS, [ring(40, ppid=20, of=20, joined=0), ring(41, ppid=20, of=20, joined=1)], [(0, 20), (1, 21)]),
    (TRAINERS, [ring(40, ppid=99, of=20, joined=0, RANK=0)], [(0, 20), (1, 21)]),
    (TRAINERS, [ring(40, ppid=98, of=20, joined=0, world=1, RANK=0)], [(0, 20), (1, 21)]),
    # the rank has not joined yet, and an evaluation of its own size or of one process did
    (WRAPPERS, [ring(40, ppid=20, joined=0), ring(41, ppid=20, joined=1)], [(0, 20), (1, 21)]),
    (WRAPPERS, [ring(40, ppid=20, joined=0, world=1)], [(0, 20), (1, 21)]),
    # the first runs the training as its child, directly or behind a shell; the child evaluates in a group of its own
    (WRAPPERS, [ring(40, ppid=20, joined=0, RANK=0)], [(0, 40), (1, 21)]),
    (WRAPPERS, [ring(40, ppid=99, of=20, joined=0), ring(50, ppid=40, joined=0)], [(0, 40), (1, 21)]),
    # it joined a group, left it, and then started the training
    ((ring(20, RANK=0, joined=0, left=15), TRAINERS[1]), [ring(40, ppid=20, began=30, joined=0)], [(0, 20), (1, 21)]),
]


@pytest.mark.parametrize(("ranks", "below", "expected"), BELOW_THE_FIRST)
@pytest.mark.parametrize("agent", [AGENT, None], ids=["torchrun", "numbered"])
def test_what_is_below_a_rank_is_a_rank_only_if_it_took_over(agent, ranks, below, expected):
    ranks = [ring_with_world(r) for r in ranks] if agent is None else ranks
    assert sorted(found(*ranks, *below, started=agent)) == expected


def ring_with_world(content):
    """Return a rank whose launcher told it the size of the world, as those that give numbers do."""
    process, *rest = content.notes
    return content._replace(notes=[{**process, "env": {**process["env"], "WORLD_SIZE": "2"}}, *rest])


STARTS_ITS_PEERS = [
    # Lightning: the command joins as rank 0, and has started the others before; each evaluates in a group of its own
    ([ring(20, joined=0), ring(30, ppid=20, joined=1)], [(0, 20), (1, 30)]),
    (
        [ring(20, joined=0), ring(30, ppid=20, of=20, joined=1), ring(40, ppid=30, of=30, began=20, joined=1)],
        [(0, 20), (1, 30)],
    ),
    (
        [ring(20, joined=0), ring(30, ppid=20, joined=1), ring(40, ppid=20, began=20, joined=0, world=1)],
        [(0, 20), (1, 30)],
    ),
    ([ring(20, joined=0, world=1), ring(30, ppid=20, joined=0), ring(31, ppid=20, joined=1)], [(0, 20)]),
]


@pytest.mark.parametrize(("rings", "expected"), STARTS_ITS_PEERS)
def test_a_rank_may_start_its_peers_before_it_joins_them(rings, expected):
    assert found(*rings) == expected


def test_each_of_several_processes_may_start_a_larger_world():
    children = [ring(pid, ppid=20 + pid % 2, joined=pid - 40, world=4) for pid in range(40, 44)]
    assert sorted(found(*WRAPPERS, *children, started=AGENT)) == [(0, 40), (1, 41), (2, 42), (3, 43)]


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_the_number_that_a_launcher_gave_counts_until_a_group_is_joined(name):
    assert found(ring(20, **{name: 3}), ring(21, **{name: 1}), ring(22, joined=0, **{name: 7})) == [
        (0, 22), (1, 21), (3, 20),
    ]  # fmt: skip


def test_a_command_without_any_number_is_the_one_rank():
    assert found(ring(20)) == [(0, 20)]


def test_a_command_that_starts_ranks_is_none():
    assert found(ring(20), ring(30, ppid=20, joined=0), ring(31, ppid=20, joined=1)) == [(0, 30), (1, 31)]


def test_of_two_trainings_one_after_the_other_the_last_counts():
    watched = {"20": {"ended_ns": 15}, "21": {"ended_ns": 16}}
    rings = [
        ring(20, RANK=0, joined=0),
        ring(21, RANK=1, joined=1),
        ring(30, began=40, RANK=0),
        ring(31, began=41, RANK=1),
    ]
    assert found(*rings, watched=watched) == [(0, 30), (1, 31)]


def test_two_living_processes_of_one_number_are_both_reported():
    assert found(ring(20, RANK=0, joined=0), ring(21, RANK=0, joined=0)) == [(0, 20), (0, 21)]


def test_a_helper_that_inherited_the_number_is_no_rank():
    assert found(ring(20, SLURM_PROCID=0, joined=0), ring(21, began=30, SLURM_PROCID=0)) == [(0, 20)]


def test_a_rank_that_keeps_the_recorder_out_is_there():
    assert found(ring(20, RANK=0), watched={"21": {"unrecorded": {"RANK": "1"}, "why": "-I"}}) == [(0, 20), (1, 21)]


@pytest.mark.parametrize(
    ("env", "here"),
    [
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}, True),
        ({"OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 4}, True),
        ({"OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}, False),
        ({"SLURM_PROCID": 0, "SLURM_NNODES": 1}, True),
        ({"SLURM_PROCID": 0, "SLURM_NNODES": 2}, False),
        ({"RANK": 0, "WORLD_SIZE": 2}, False),
        ({}, False),
    ],
)
def test_some_launchers_say_that_all_ranks_are_on_this_host(env, here):
    assert is_on_one_host([ring(20, **env)]) is here
