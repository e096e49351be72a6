"""GPUs, links between them and torch's build, of recorded machines and real children."""

import json

import pytest

from ddpdoctor.collect.bounded import ChildEnd
from ddpdoctor.collect.gpus import PROBE, GpuCount, count_gpus, read_gpu_trial, run_child, try_gpus
from ddpdoctor.collect.kernel import read_pci
from ddpdoctor.collect.rdma import read_rdma
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.launch import read_visible
from ddpdoctor.model.node import Gpu, Gpus, GpuWork, Limit, Node, NodeProcess, PeerCopy
from ddpdoctor.model.reading import NotRead, Why
from tests import forking
from tests.machines import shared_machine
from tests.rules.environment.build import ask, limits
from tests.scenarios.running import clean_environment

# The trial: what is asked, in which order, and what becomes of children that fail.


GOOD = {"ok": True, "error": None, "seconds": 3.5}


def answers(**said):
    """Return what runs a child, with an answer for each of its arguments."""

    def run(arguments, _limit_s):
        return said["_".join(arguments).replace(":", "_")]

    return run


def ended(*results, status=0, err=""):
    return ChildEnd(out="".join(json.dumps(result) + "\n" for result in results), err=err, status=status)


def test_without_deep_nothing_is_asked(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_gpu_trial(System(root=tmp_path), ReadingPlan(sections=frozenset()))
    assert missing.value.unread.why is Why.NOT_ASKED
    assert "--deep" in missing.value.unread.reason


def test_deep_without_a_gpu(tmp_path):
    with pytest.raises(NotRead) as missing:
        read_gpu_trial(System(root=tmp_path), ReadingPlan(sections=frozenset(), deep=True))
    assert missing.value.unread.why is Why.ABSENT


def test_all_gpus_and_all_pairs():
    copy = {"source": 0, "target": 1, "ok": True, "error": None, "gb_s": 150.0}
    trial = try_gpus(
        answers(count=ended({"count": 2}), work_cuda_0=ended(GOOD), work_cuda_1=ended(GOOD), copies=ended(copy))
    )
    assert trial.work == tuple(GpuWork(index=n, timed_out=False, **GOOD) for n in (0, 1))
    assert trial.copies == (PeerCopy(**copy),)


def test_one_that_hangs_and_one_that_crashes():
    trial = try_gpus(
        answers(
            count=ended({"count": 3}),
            work_cuda_0=ended(GOOD),
            work_cuda_1=ended(status=None),
            work_cuda_2=ended(status=-11, err="warning\nSegmentation fault\n"),
        )
    )
    assert [(one.ok, one.timed_out, one.error) for one in trial.work] == [
        (True, False, None),
        (False, True, "no result within 60 s"),
        (False, False, "Segmentation fault"),
    ]
    assert trial.copies == ()


def test_copies_that_hang():
    trial = try_gpus(
        answers(count=ended({"count": 2}), work_cuda_0=ended(GOOD), work_cuda_1=ended(GOOD), copies=ended(status=None))
    )
    assert [copy.error for copy in trial.copies] == ["no copy was done within 120 s"]


@pytest.mark.parametrize(
    ("status", "error"), [(None, "this copy was not done within 120 s"), (-11, "Xid 31"), (0, None)]
)
def test_a_pair_that_hangs_or_crashes_after_others_were_copied(status, error):
    good = ended({"source": 0, "target": 1, "ok": True, "error": None, "gb_s": 9.0}, status=status, err="Xid 31")
    trial = try_gpus(answers(count=ended({"count": 2}), work_cuda_0=ended(GOOD), work_cuda_1=ended(GOOD), copies=good))
    failed = [(one.source, one.target, one.error) for one in trial.copies if not one.ok]
    assert failed == ([(1, 0, error)] if error else [])


@pytest.mark.parametrize(
    ("count", "why"),
    [(ended({"count": 0}), Why.ABSENT), (ended(status=None), Why.TIMEOUT), (ended(status=1, err="boom"), Why.ERROR)],
)
def test_gpus_that_cannot_be_counted(count, why):
    with pytest.raises(NotRead) as missing:
        try_gpus(answers(count=count))
    assert missing.value.unread.why is why


def test_the_real_child_counts():
    said = forking.run("-m", PROBE, "count", env=clean_environment(CUDA_VISIBLE_DEVICES=""))
    assert json.loads(said.stdout) == {"count": 0}, said.stderr


def test_the_real_child_works_on_the_cpu():
    said = run_child(PROBE, ("work", "cpu"), {}, 100.0)
    result = json.loads(said.out)
    assert (result["ok"], result["error"]) == (True, None)


def test_a_device_that_is_not_there_is_an_error_in_words():
    said = forking.run("-m", PROBE, "work", "cuda:0", env=clean_environment(CUDA_VISIBLE_DEVICES=""))
    result = json.loads(said.stdout) if said.stdout else {"ok": False, "error": said.stderr}
    assert not result["ok"]
    assert result["error"]


# Counting GPUs as CUDA_VISIBLE_DEVICES leaves them.


UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1,2", 3),
        ("2, 0", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("1,1", 0),
        ("GPU-bb33,0", 2),
        ("GPU-bb", 1),
        ("GPU-aa", 0),
        ("MIG-x,MIG-y", 2),
        ("NoDevFiles", 0),
        ("²", 0),
        (None, 3),
    ],
)
def test_visible_devices(visible, count):
    assert len(read_visible(visible, UUIDS).devices) == count


def test_nothing_is_visible_where_there_is_nothing():
    assert read_visible("0,MIG-x", ()).devices == ()


def test_what_is_wrong_with_a_value_is_kept():
    read = read_visible("2,9,0", UUIDS)
    assert (read.devices, read.bad_entry, read.hidden, read.on_purpose) == (("GPU-bb33",), "9", ("0",), False)
    assert read_visible("0,GPU-aa11", UUIDS).repeated == ("GPU-aa11",)
    assert all(read_visible(value, UUIDS).on_purpose for value in ("", "-1", "NoDevFiles"))


def test_counting_never_fails():
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == GpuCount()


# Recorded machines in each of their failing states, read by the real collectors and judged by the real rules.


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
