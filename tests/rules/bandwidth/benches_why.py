"""Benches and machines for tables of reasons, with a healthy one as the default."""

from ddpdoctor.model.bandwidth import Bench, BenchSettings, Collective, Measurement, Member, Mode, NcclLog
from ddpdoctor.model.node import BusyCpu, Governor, Load
from ddpdoctor.rules.bandwidth.reasons import view
from tests.rules.environment.build import fleet, node, process


def member(rank, host="node0", local_rank=None):
    return Member(
        rank=rank, local_rank=rank if local_rank is None else local_rank, host=host, pid=100 + rank, device="cpu",
        device_name="a processor", cores=2, version="1", torch="2.13.0",
    )  # fmt: skip


def measured(busbw_gb_s):
    return Measurement(
        collective=Collective.ALL_REDUCE, dtype="float32", redop="sum", mode=Mode.THROUGHPUT, in_place=False,
        size_bytes=2**26, count=2**24, iterations=10, first_us=1.0, min_us=1.0, p50_us=1.0, p95_us=1.0,
        p50_low_us=1.0, p50_high_us=1.0, cv=0.0, algbw_gb_s=busbw_gb_s, busbw_gb_s=busbw_gb_s, warm=True, wrong=0,
    )  # fmt: skip


def log(rank, network="IB", interfaces=("mlx5_0:1",), nvls=None, **transports):
    """``transports`` by name: NET_IB stands for NET/IB."""
    ways = {name.replace("_", "/"): count for name, count in transports.items()}
    return NcclLog(rank=rank, network=network, interfaces=interfaces, transports=ways, nvls=nvls)


def bench(*hosts, backend="gloo", results=(), logs=(), **settings):
    """One rank a name of a host: bench("node0", "node0", "node1")."""
    return Bench(
        settings=BenchSettings(backend=backend, **settings),
        members=tuple(member(rank, host) for rank, host in enumerate(hosts)),
        results=tuple(measured(one) for one in results),
        nccl_logs=tuple(logs),
    )


def machine(host="node0", *, ranks=(0, 1), cpus=((0, 1),), load=None, variables=None, **sections):
    """A node with these ranks; ``cpus`` are those of each rank in turn."""
    placed = [
        process(rank, cpus=cpus[at % len(cpus)], LOCAL_WORLD_SIZE=str(len(ranks)), **(variables or {}))
        for at, rank in enumerate(ranks)
    ]
    return node(host, processes=placed, **({} if load is None else {"load": load}), **sections)


def load(busy=None, *, steal=0.0, governors=()):
    return Load(
        window_s=0.4,
        busy=tuple(BusyCpu(cpu=cpu, share=share) for cpu, share in (busy or {}).items()),
        steal_share=steal,
        governors=tuple(governors),
    )


def governor(name="powersave", driver="acpi-cpufreq", preference="", cpus=2):
    return Governor(name=name, driver=driver, preference=preference, cpus=cpus)


def reported(question, seen, *nodes):
    """Return what one family of reasons says: effects by name, and texts."""
    return [(one.effect.name, one.reason) for one in question(view(seen, fleet(*nodes)))]
