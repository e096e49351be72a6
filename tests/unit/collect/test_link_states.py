"""Recorded machines in each of their failing states, read by the real collectors and judged by the real rules."""

import pytest

from ddpdoctor.collect.gpu.pci import read_pci
from ddpdoctor.collect.node import ReadingPlan
from ddpdoctor.collect.rdma import read_rdma
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.gpus import Gpu, Gpus
from ddpdoctor.model.limits import Limit
from ddpdoctor.model.node import Node, NodeProcess
from ddpdoctor.model.reading import NotRead
from tests.machines import shared_machine
from tests.rules.environment.build import ask
from tests.rules.environment.machine_facts import limits

PLAN = ReadingPlan(sections=frozenset({"pci", "rdma"}))
CHECKS = (
    "pcie", "acs-iommu", "numa", "ib-state", "ib-rate", "ib-flap", "roce-gid", "ib-hca-env", "peermem", "memlock",
    "uverbs", "ib-disabled",
)  # fmt: skip
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def section(read, *arguments):
    try:
        return read(*arguments)
    except NotRead as missing:
        return missing.unread


def read_machine(machine, *states, cpus=None, **variables):
    system = shared_machine(machine, *states, env=variables)
    pci = section(read_pci, system, PLAN)
    devices = tuple(
        Gpu(index=n, uuid=f"GPU-{n}", name=pci.models[bus_id], bus_id=bus_id)
        for n, bus_id in enumerate(pci.nvidia_proc_gpus)
    )
    lock = system.calls.answers.get("rlimit MEMLOCK", "-1 -1").split()
    soft, hard = (None if number == "-1" else int(number) for number in lock)
    ranks = tuple(
        NodeProcess(
            rank=rank, local_rank=rank, pid=100 + rank, variables=dict(system.env), other_names=(),
            cpus=tuple(cpus or system.calls.cpus()),
        )
        for rank in range(max(1, len(devices)))
    )  # fmt: skip
    return Node(
        host=system.calls.hostname(),
        processes=ranks,
        conf_files=(),
        limits=limits(memlock=Limit(soft=soft, hard=hard)),
        gpus=Gpus(driver=None, cuda_driver=None, devices=devices, pairs=(), persistenced=True, fabric_manager=None),
        pci=pci,
        rdma=section(read_rdma, system, PLAN, lambda _seconds: None),
    )


def found(node):
    by_kind = {kind: {finding.severity for finding in ask(kind, node)[1]} for kind in CHECKS}
    return {kind: severities for kind, severities in by_kind.items() if severities}


@pytest.mark.parametrize(
    ("machine", "states", "variables", "expected"),
    [
        ("nvlink8", (), {}, {}),
        ("nvlink8", (), {"NCCL_IB_HCA": "mlx5"}, {}),
        ("nvlink8", ("not-root",), {}, {}),
        ("roce8", (), {}, {}),
        ("roce8", (), {"NCCL_IB_GID_INDEX": "3"}, {}),
        ("roce8", ("shifted",), {}, {}),
        ("workstation2", (), {}, {}),
        ("container-nogpu", (), {}, {}),
        ("container-nogpu", (), {"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "1"}, {}),
        ("nvlink8", ("ib-down",), {}, {"ib-state": {ERROR}}),
        ("nvlink8", ("ib-no-manager",), {}, {"ib-state": {WARNING}}),
        ("nvlink8", ("ib-no-manager",), {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}, {"ib-state": {ERROR}}),
        ("nvlink8", ("ib-one-lane",), {}, {"ib-rate": {ERROR}}),
        ("nvlink8", ("ib-flapped",), {}, {"ib-flap": {WARNING}}),
        ("nvlink8", ("pcie-narrow",), {}, {"pcie": {ERROR}}),
        ("nvlink8", ("pcie-old-speed",), {}, {"pcie": {WARNING}}),
        ("nvlink8", ("acs",), {}, {"acs-iommu": {WARNING}}),
        ("nvlink8", ("iommu",), {}, {"acs-iommu": {WARNING}}),
        ("nvlink8", ("numa-lost",), {}, {"numa": {WARNING}}),
        ("nvlink8", ("no-peermem",), {}, {"peermem": {WARNING}}),
        ("nvlink8", ("uverbs-missing",), {}, {"uverbs": {WARNING}}),
        ("nvlink8", ("uverbs-missing",), {"NCCL_IB_HCA": "mlx5"}, {"uverbs": {ERROR}}),
        ("nvlink8", ("uverbs-denied",), {"NCCL_NET": "IB"}, {"uverbs": {ERROR}}),
        ("nvlink8", ("memlock-low",), {}, {"memlock": {ERROR}}),
        ("nvlink8", (), {"NCCL_IB_DISABLE": "1"}, {"ib-disabled": {WARNING}}),
        ("nvlink8", (), {"NCCL_IB_HCA": "mlx4_0"}, {"ib-hca-env": {ERROR}}),
        ("roce8", ("no-ipv4",), {}, {"roce-gid": {ERROR}}),
        ("roce8", (), {"NCCL_IB_GID_INDEX": "7"}, {"roce-gid": {ERROR}}),
        ("roce8", (), {"NCCL_IB_GID_INDEX": "0"}, {"roce-gid": {ERROR}}),
        ("workstation2", (), {"NCCL_IB_HCA": "mlx5_0"}, {"ib-hca-env": {ERROR}}),
    ],
    ids=str,
)
def test_states(machine, states, variables, expected):
    assert found(read_machine(machine, *states, **variables)) == expected


def test_ranks_of_one_socket_are_far_from_half_of_the_gpus():
    node = read_machine("nvlink8", cpus=range(56))
    _, (finding,) = ask("numa", node)
    assert finding.ranks == (4, 5, 6, 7)


@pytest.mark.parametrize("kind", CHECKS)
def test_a_container_without_gpu_is_given_the_reason_why_nothing_was_checked(kind):
    check, _ = ask(kind, read_machine("container-nogpu"))
    assert check.outcome is Outcome.SKIPPED
    assert check.reason
