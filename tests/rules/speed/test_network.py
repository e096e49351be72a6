"""What a job uses of the network, and what the network could carry; nothing is said where one is unknown."""

from dataclasses import replace

import pytest

from ddpdoctor.model.facts import GroupState, Rank
from ddpdoctor.model.gpus import Gpu, Gpus
from ddpdoctor.model.network import Interface, Network
from ddpdoctor.model.node import Node
from ddpdoctor.model.reading import NOT_ASKED
from ddpdoctor.report.time_budget import network_words
from ddpdoctor.rules.speed.comparing import network_use
from ddpdoctor.rules.speed.reduction import MIB
from ddpdoctor.rules.speed.state import SpeedState

from .jobs import state
from .test_predictions import CURVES, two


def made(backend: str = "gloo", hosts: tuple[str, str] = ("a", "b"), machine: Node | None = None) -> SpeedState:
    ranks: list[Rank] = [
        replace(one, host=host, groups=(GroupState(name="0", ranks=(0, 1), backend=backend, enqueued=1),))
        for one, host in zip(two(), hosts, strict=True)
    ]
    found = state(*ranks)
    return replace(found, job=replace(found.job, ranks=tuple(ranks), machine=machine))


def test_what_a_job_uses_is_its_gradients_by_the_length_of_its_step() -> None:
    use = network_use(made())
    assert use is not None
    assert use.step_bytes == 16 * MIB
    assert use.used_gb_s == pytest.approx(16 * MIB / made().budget.wall_ms / 1e6)
    assert use.limit_gb_s is None
    assert network_words(use) is None


def test_a_bench_says_what_the_network_carries() -> None:
    use = network_use(made(), CURVES)
    assert use is not None
    assert use.limit_gb_s == pytest.approx(MIB / 10.0 / 1e6)
    said = network_words(use)
    assert said is not None
    assert said.startswith("the network could carry 0.105 GB/s (allreduce-bench); the reductions of this job use 0.04")


def test_links_count_between_hosts_over_gloo_if_all_are_known() -> None:
    interface = Interface(
        name="eth0", up=True, operstate="up", carrier=True, loopback=False, virtual=False, mtu=1500, speed_mb_s=1000,
        addresses=(), link_type=1,
    )  # fmt: skip
    network = Network(
        interfaces=(interface,), default_interface="eth0", ipv6_disabled=None, local_ports=None, master_port=NOT_ASKED,
        firewall=NOT_ASKED,
    )  # fmt: skip
    node = Node(host="a", network=network)
    one_known = network_use(made(machine=node))
    assert one_known is not None
    assert one_known.limit_gb_s is None
    one_host = network_use(made(hosts=("a", "a"), machine=node))
    assert one_host is not None
    assert one_host.limit_gb_s is None


def test_a_published_figure_counts_for_the_same_gpus_ranks_and_hosts() -> None:
    gpu = Gpu(index=0, uuid="g", name="NVIDIA H100 80GB HBM3", bus_id="0000:1b:00.0")
    gpus = Gpus(driver="570", cuda_driver="12.8", devices=(gpu,), pairs=(), persistenced=True, fabric_manager=True)
    use = network_use(made("nccl", ("a", "a"), Node(host="a", gpus=gpus)))
    assert use is not None
    assert use.limit_gb_s is None  # there is a figure for 8 ranks, not for 2


def test_without_gradients_nothing_is_said() -> None:
    ranks = two(times=None)
    assert network_use(state(*ranks), CURVES) is None
