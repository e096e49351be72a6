"""Environments of launches that are as they should be, recorded and by hand, as processes and fleets."""

from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.network import read_names, read_network
from ddpdoctor.collect.system import ReadingPlan
from ddpdoctor.model.launch import select_variables
from ddpdoctor.model.node import Fleet, Launcher
from tests.machines import shared_machine
from tests.rules.environment.build import fleet, node, process

TORCHRUN = {
    "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "40123", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
"""What every rank of `torchrun --nnodes 2 --nproc-per-node 2` has, beside its own numbers."""


def listed(variables, **more):
    """Return a process with those of the variables that may be kept, as the collector does."""
    kept, others = select_variables(variables)
    rank = variables.get("RANK")
    return process(None if rank is None else int(rank), other_names=others, **kept, **more)


def recorded(name, *states, env=None):
    """Return the process that a recorded machine shows."""
    return read_process(shared_machine(name, *states, env=env))


def recorded_node(name, *states, env=None):
    """Return the node that a recorded machine shows: its process, names and network."""
    system, plan = shared_machine(name, *states, env=env), ReadingPlan(sections=frozenset())
    return node(
        system.calls.hostname(), processes=[recorded(name, *states, env=env)], names=read_names(system, plan),
        network=read_network(system, plan),
    )  # fmt: skip


def torchrun_fleet(nodes=2, a_node=2, **variables):
    """Return a whole job of torchrun; ``variables`` are set on every rank."""
    size = nodes * a_node
    return fleet(
        *(
            node(
                f"node{index}",
                index=index,
                processes=[
                    listed(
                        TORCHRUN
                        | {"GROUP_WORLD_SIZE": str(nodes), "LOCAL_WORLD_SIZE": str(a_node), "WORLD_SIZE": str(size)}
                        | {"RANK": str(rank), "LOCAL_RANK": str(rank % a_node), "GROUP_RANK": str(index)}
                        | variables,
                        pid=100 + rank,
                    )
                    for rank in range(index * a_node, (index + 1) * a_node)
                ],
            )
            for index in range(nodes)
        ),
        launcher=Launcher.TORCHRUN, world_size=size, nnodes=nodes,
    )  # fmt: skip


def changed(facts: Fleet, rank, **variables):
    """Return a fleet in which one rank has other variables; None takes one away."""
    from dataclasses import replace

    def change(one):
        if one.rank != rank:
            return one
        kept = {name: value for name, value in (one.variables | variables).items() if value is not None}
        return replace(one, variables=kept)

    nodes = tuple(replace(each, processes=tuple(map(change, each.processes))) for each in facts.nodes)
    return replace(facts, nodes=nodes)
