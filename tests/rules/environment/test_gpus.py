"""gpu-count, cvd-valid, dup-gpu."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import GpuOnBus, Launcher
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import ask, failed, fleet, gpu_node, gpus_of, node, process, torch_of, torchrun

NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")
CVD = "CUDA_VISIBLE_DEVICES"


def one_of(facts, kind="gpu-count"):
    check, findings = ask(kind, facts)
    assert check.outcome is failed(*(one.severity for one in findings)), (check.outcome, check.seen, check.reason)
    (finding,) = findings
    return finding


@pytest.mark.parametrize("kind", ["gpu-count", "cvd-valid"])
def test_without_a_driver_the_check_is_skipped(kind):
    check, findings = ask(kind, node(gpus=NO_DRIVER))
    assert (check.outcome, check.reason, findings) == (Outcome.SKIPPED, NO_DRIVER.reason, ())


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        (gpu_node(), "NVML lists 8"),
        (gpu_node(torch=torch_of(gpus_of())), "NVML lists 8, torch sees 8"),
        (gpu_node(ranks=8, torch=torch_of(gpus_of())), "NVML lists 8, torch sees 8, 8 ranks"),
        (gpu_node(machine="workstation2", ranks=2), "NVML lists 2, 2 ranks"),
        (gpu_node(ranks=2, variables={CVD: "4,5"}, torch=torch_of(gpus_of(), count=2)), None),
    ],
    ids=["no-torch", "torch", "ranks", "workstation", "chosen"],
)
def test_all_are_there(facts, seen):
    check, findings = ask("gpu-count", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert seen is None or check.seen == seen


def test_a_lost_gpu():
    finding = one_of(gpu_node("lost", ranks=8))
    assert finding.severity is Severity.ERROR
    assert finding.summary.startswith("GPU 3 does not respond")
    assert finding.evidence == ("GPU 3: GPU is lost",)
    assert "nvidia-smi -r -i 3" in finding.fix


def test_a_gpu_that_is_lost_while_it_is_asked_is_of_a_rank():
    finding = one_of(gpu_node("lost-on-the-way", ranks=8))
    assert finding.ranks == (3,)
    assert finding.evidence == ("GPU 3 (NVIDIA H100 80GB HBM3, 0000:61:00.0): GPU is lost",)


def test_a_gpu_that_nvml_does_not_list_and_that_can_be_opened():
    finding = one_of(gpu_node("one-fewer"))
    assert (finding.severity, finding.confidence) == (Severity.ERROR, Confidence.HIGH)
    assert "0000:df:00.0" in finding.summary


@pytest.mark.parametrize("error", [None, "EPERM", "EACCES", "ENOENT"])
def test_a_gpu_that_was_not_given_to_this_process_is_no_fault(error):
    gpus = gpus_of("one-fewer")
    on_bus = (*gpus.on_bus[:-1], replace(gpus.on_bus[-1], open_error=error))
    assert ask("gpu-count", node(gpus=replace(gpus, on_bus=on_bus)))[0].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("driver", "device", "outcome"),
    [
        (None, 0x2330, Outcome.FAILED),
        (None, 0x1430, Outcome.PASSED),
        ("vfio-pci", 0x2330, Outcome.PASSED),
        ("nouveau", 0x2330, Outcome.PASSED),
    ],
    ids=["driver-refused-it", "another-model", "given-to-a-vm", "nouveau"],
)
def test_a_gpu_that_the_driver_has_not_taken(driver, device, outcome):
    gpus = gpus_of()
    extra = GpuOnBus(bus_id="0000:f0:00.0", device=device, driver=driver)
    check, findings = ask("gpu-count", node(gpus=replace(gpus, on_bus=(*gpus.on_bus, extra))))
    assert check.outcome is outcome
    assert all(finding.confidence is Confidence.MEDIUM for finding in findings)


def test_nvml_that_does_not_start():
    finding = one_of(gpu_node("no-device-node"))
    assert "NVML does not start" in finding.summary
    assert finding.evidence == ("nvmlInit fails with UNKNOWN",)
    denied = node(gpus=replace(gpus_of("no-device-node"), init_error="NO_PERMISSION"))
    assert one_of(denied).fix.startswith("ls -l /dev/nvidia*")
    check, _ = ask("gpu-count", gpu_node("mismatch"))
    assert check.outcome is Outcome.SKIPPED
    assert "driver-lib-mismatch" in check.reason


def test_cuda_that_hangs_is_a_driver_that_does_not_answer():
    """Also where NVML cannot be read. A machine without a GPU answers at once."""
    gpus, said = gpus_of(), "CUDA was not initialized within 55 s"
    stuck = replace(torch_of(gpus, count=0, cuda_error=said), cuda_stuck=True)
    without = node(gpus=NO_DRIVER, torch=stuck)
    for facts in (gpu_node(torch=stuck), without):
        finding = one_of(facts)
        assert finding.summary.startswith("CUDA does not start")
        assert finding.evidence == (said,)
    check, found = ask("gpu-count", replace(without, torch=replace(stuck, cuda_stuck=False)))
    assert (check.outcome, found) == (Outcome.SKIPPED, ())


def test_torch_sees_fewer():
    finding = one_of(gpu_node(torch=torch_of(gpus_of(), count=0, cuda_error="Error 802: system not yet initialized")))
    assert finding.summary == "torch sees 0 of 8 GPUs that NVML lists"
    assert finding.evidence == ("Error 802: system not yet initialized",)


@pytest.mark.parametrize(
    "facts",
    [
        gpu_node(torch=torch_of(gpus_of(), count=0, cuda=None)),
        gpu_node("mig", torch=torch_of(gpus_of(), count=1)),
        gpu_node(variables={CVD: ""}, torch=torch_of(gpus_of(), count=0)),
    ],
    ids=["cpu-wheel", "mig", "hidden-on-purpose"],
)
def test_a_count_of_torch_that_is_as_it_should_be(facts):
    assert ask("gpu-count", facts)[0].outcome is Outcome.PASSED


def test_more_ranks_than_gpus():
    finding = one_of(gpu_node(machine="workstation2", ranks=4))
    assert finding.severity is Severity.ERROR
    assert finding.summary == "4 ranks but only 2 GPUs here: 2 ranks have no cuda:LOCAL_RANK"
    assert finding.ranks == (2, 3)
    assert finding.fix.startswith("--nproc-per-node=2")


def test_fewer_ranks_than_gpus_is_reported_only():
    finding = one_of(gpu_node(ranks=4))
    assert (finding.severity, finding.summary) == (Severity.INFO, "4 ranks for 8 GPUs: 4 stay idle")


def test_slurm_tasks_may_have_gpus_of_their_own():
    one = replace(gpus_of(), devices=gpus_of().devices[:1])
    tasks = tuple(process(rank, SLURM_PROCID=str(rank), CUDA_VISIBLE_DEVICES="0") for rank in range(8))
    assert ask("gpu-count", node(processes=tasks, gpus=one))[0].outcome is Outcome.PASSED


@pytest.mark.parametrize("value", ["0,1,2,3,4,5,6,7", "3", "GPU-a1", "0,-1", "MIG-x"])
def test_values_that_are_right(value):
    check, findings = ask("cvd-valid", gpu_node(variables={CVD: value}))
    assert (check.outcome, check.seen, findings) == (Outcome.PASSED, f"{CVD}={value} of 8 GPUs", ())


ALL = "0,1,2,3,4,5,6,7"
HIDES = "which is not a device here: CUDA ignores it and all later entries, and shows"
TWICE = "names a device twice, so CUDA shows no device at all"


@pytest.mark.parametrize(
    ("value", "says", "fix"),
    [
        ("0,8,1", f"names 8, {HIDES} 1", "0,1"),
        ("9", f"names 9, {HIDES} 0", ALL),
        ("1,1", TWICE, "1"),
        ("0,GPU-a0", TWICE, "0"),
        ("0,,1", f"names an empty entry, {HIDES} 1", "0,1"),
        ("GPU-zz", f"names GPU-zz, {HIDES} 0", ALL),
        ("0,-1,1", f"names -1, {HIDES} 1", "0,1"),
    ],
)
def test_values_that_hide_what_they_name(value, says, fix):
    finding = one_of(gpu_node(variables={CVD: value}, ranks=2), "cvd-valid")
    assert (finding.severity, finding.summary) == (Severity.ERROR, f"{CVD}={value} {says}")
    assert finding.fix == f"export {CVD}={fix}"
    assert finding.ranks == (0, 1)


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_to_hide_all_is_reported_only(value):
    finding = one_of(gpu_node(variables={CVD: value}), "cvd-valid")
    assert finding.severity is Severity.INFO
    assert "hides all 8 GPUs" in finding.summary


def test_values_that_cannot_be_judged():
    assert ask("cvd-valid", gpu_node())[0].outcome is Outcome.SKIPPED
    check, _ = ask("cvd-valid", gpu_node("mismatch", variables={CVD: "0"}))
    assert (check.outcome, check.reason) == (Outcome.SKIPPED, "NVML does not start: LIB_RM_VERSION_MISMATCH")
    tasks = tuple(process(n, SLURM_PROCID=str(n), CUDA_VISIBLE_DEVICES=f"GPU-a{n}") for n in range(2))
    alone = replace(gpus_of(), devices=gpus_of().devices[:1])
    assert ask("cvd-valid", node(processes=tasks, gpus=alone))[0].outcome is Outcome.PASSED


def job(*nodes):
    return fleet(*nodes, launcher=Launcher.TORCHRUN, world_size=sum(len(one.processes) for one in nodes))


def ranks_with(values, first=0, **more):
    return tuple(
        process(first + n, local_rank=n, **({} if value is None else {CVD: value}), **more)
        for n, value in enumerate(values)
    )


@pytest.mark.parametrize(
    "values", [[None] * 8, ["0,1"] * 2, ["0", "1"], ["1", "0"], ["GPU-a0", "GPU-a1"], ["0,1,2,3"] * 4, [""] * 4]
)
def test_every_rank_on_its_own(values):
    check, findings = ask("dup-gpu", job(node(processes=ranks_with(values), gpus=gpus_of())))
    assert findings == ()
    assert check.outcome in {Outcome.PASSED, Outcome.SKIPPED}


@pytest.mark.parametrize(
    ("values", "blamed"),
    [(["0", "0"], (0, 1)), (["0", "GPU-a0"], (0, 1)), (["0,1", "1,0"], (0, 1)), (["0", "1", "1"], (1, 2))],
)
def test_two_ranks_on_one(values, blamed):
    finding = one_of(job(node("h", processes=ranks_with(values), gpus=gpus_of())), "dup-gpu")
    assert (finding.severity, finding.ranks, finding.hosts) == (Severity.ERROR, blamed, ("h",))
    assert "NCCL does not allow" in finding.summary
    assert " of h" in finding.summary


def test_two_containers_of_one_machine():
    nodes = [node(f"pod{n}", index=n, processes=ranks_with(["0"], first=n), gpus=gpus_of()) for n in range(2)]
    finding = one_of(job(*nodes), "dup-gpu")
    assert finding.hosts == ("pod0", "pod1")


def test_sharing_that_is_allowed_is_a_warning():
    processes = ranks_with(["0", "0"], NCCL_MULTI_RANK_GPU_ENABLE="1")
    finding = one_of(job(node(processes=processes, gpus=gpus_of())), "dup-gpu")
    assert finding.severity is Severity.WARNING
    assert "refuses" not in finding.summary


@pytest.mark.parametrize(
    ("ids", "severity"), [(("0", "1"), Severity.WARNING), (("0", "0"), Severity.ERROR), ((None, "1"), Severity.ERROR)]
)
def test_ranks_that_nccl_takes_for_ranks_of_different_hosts(ids, severity):
    processes = tuple(
        process(n, local_rank=n, **{CVD: "0"}, **({} if one is None else {"NCCL_HOSTID": one}))
        for n, one in enumerate(ids)
    )
    assert one_of(job(node(processes=processes, gpus=gpus_of())), "dup-gpu").severity is severity


@pytest.mark.parametrize(
    "facts",
    [
        fleet(gpu_node()),
        job(node(processes=ranks_with(["0"] * 8, SLURM_PROCID="1"), gpus=gpus_of())),
        job(node(processes=torchrun(2), gpus=replace(gpus_of(), devices=gpus_of().devices[:1]))),
        job(node(processes=torchrun(2), gpus=NO_DRIVER)),
    ],
    ids=["alone", "slurm-confines", "one-gpu-is-gpu-count", "no-driver"],
)
def test_who_is_on_which_cannot_be_determined(facts):
    assert ask("dup-gpu", facts)[0].outcome is Outcome.SKIPPED


def test_many_are_drawn_into_one_finding():
    nodes = [
        node(f"n{n}", index=n, processes=ranks_with(["0"] * 4, first=4 * n),
             gpus=replace(gpus_of(), devices=tuple(replace(g, uuid=f"{g.uuid}-{n}") for g in gpus_of().devices)))
        for n in range(6)
    ]  # fmt: skip
    finding = one_of(job(*nodes), "dup-gpu")
    assert "ranks 0-3 on GPU 0 of n0" in finding.summary
    assert finding.summary.endswith("and 2 more GPUs")
