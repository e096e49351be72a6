"""Versions of torch, over nodes, of drivers and GPUs: tables of facts and what is said of them."""

from dataclasses import replace
from functools import cache

import pytest

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.system import ReadingPlan, read_node
from ddpdoctor.diagnose.machines import read_expected
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import SECTIONS, Fleet, GpuOnBus, Launcher, Pci, PciDevice, release
from ddpdoctor.model.reading import NOT_ASKED, Unread, Why
from ddpdoctor.rules.environment.versions import cuda_wheel
from ddpdoctor.rules.registry import rules_of
from tests.machines import shared_machine
from tests.nvml import load_nvml
from tests.rules.environment.build import (
    ask,
    cpu_torch,
    device,
    failed,
    fleet,
    gpus,
    judge_fleet,
    node,
    process,
    software,
    torch,
)

PASSED, FAILED, SKIPPED, UNKNOWN = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.INCONCLUSIVE
ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
NO_TORCH = Unread(why=Why.NOT_ASKED, reason="torch is not imported (--no-torch)")
SLOW = Unread(why=Why.TIMEOUT, reason="`import torch` took longer than 55 s")
NO_DRIVER = Unread(why=Why.ABSENT, reason="there is no NVIDIA driver here")


def broken(error, **changes):
    return torch(version="", import_error=error, cuda=None, nccl=None, nccl_libraries=(), **changes)


@pytest.mark.parametrize(
    ("build", "installed", "outcome", "seen"),
    [
        (torch(), "2.13.0+cu130", PASSED, "torch 2.13.0+cu130, Python 3.12.4"),
        (NO_TORCH, "2.13.0+cpu", PASSED, "torch 2.13.0+cpu is installed; it was not imported"),
        (NO_TORCH, None, FAILED, "no package torch"),
        (SLOW, "2.13.0", UNKNOWN, ""),
        (broken("ModuleNotFoundError: No module named 'torch'"), None, FAILED, "no package torch"),
        (
            broken("ImportError: libcudart.so.13: cannot open"),
            "2.13.0",
            FAILED,
            "ImportError: libcudart.so.13: cannot open",
        ),
    ],
)
def test_torch_import(build, installed, outcome, seen):
    check, findings = ask("torch-import", node(torch=build, software=software(torch_version=installed)))
    assert (check.outcome, check.seen) == (outcome, seen)
    assert [finding.severity for finding in findings] == [ERROR] * (outcome is FAILED)


CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("build", "changes", "gpu_count", "fix"),
    [
        ("No module named 'torch'", {"torch_version": None}, 0, f"/venv/bin/python -m pip install torch {CPU_INDEX}"),
        (
            "No module named 'torch'",
            {"torch_version": None, "platform": "darwin"},
            0,
            "/venv/bin/python -m pip install torch",
        ),
        (
            "No module named 'torch'",
            {"torch_version": None},
            2,
            "/venv/bin/python -m pip install torch --index-url https://download.pytorch.org/whl/cu130",
        ),
        ("No module named 'sympy.core'", {}, 0, "/venv/bin/python -m pip install sympy"),
        (
            "libc10.so: undefined symbol",
            {"torch_version": "2.13.0+cpu"},
            0,
            f"/venv/bin/python -m pip install --force-reinstall torch==2.13.0+cpu {CPU_INDEX}",
        ),
        (
            "libcudnn.so.9: cannot open",
            {"torch_version": "2.9.1"},
            1,
            "/venv/bin/python -m pip install --force-reinstall torch==2.9.1",
        ),
    ],
)
def test_the_command_that_mends_torch(build, changes, gpu_count, fix):
    facts = node(torch=broken(f"ImportError: {build}"), software=software(**changes), gpus=gpus(gpu_count))
    _, (finding,) = ask("torch-import", facts)
    assert finding.fix == fix


def test_a_folder_that_hides_torch():
    build = broken("AttributeError: module 'torch' has no attribute '__version__'", path="/home/ann/job/torch")
    _, (finding,) = ask("torch-import", node(torch=build, software=software()))
    assert finding.fix.startswith("rename or remove /home/ann/job/torch")
    assert finding.evidence == ("torch was found at /home/ann/job/torch",)


def pci(*devices):
    made = [
        PciDevice(
            bus_id=bus, vendor=vendor, device=1, device_class=kind, numa_node=None, local_cpus=(), width=None,
            max_width=None, speed_gt_s=None, max_speed_gt_s=None, acs_redirect=None, upstream=(),
        )
        for bus, vendor, kind in devices
    ]  # fmt: skip
    return Pci(
        devices=tuple(made), iommu=False, iommu_passthrough=False, virtual_machine=False, nvidia_proc_gpus=()
    )  # fmt: skip


MI300 = pci(("0000:05:00.0", 0x1002, 0x120000))
LAPTOP = pci(("0000:05:00.0", 0x1002, 0x030000))
GIVEN = software(gpu_devices=("/dev/nvidia0",), driver="535.161.08")
KFD = software(gpu_devices=("/dev/kfd",))
NOUVEAU = GpuOnBus(bus_id="0000:01:00.0", device=1, driver="nouveau")


@pytest.mark.parametrize(
    ("sections", "severity", "says", "fix"),
    [
        ({"torch": torch(), "gpus": gpus(8)}, None, "", ""),
        ({"torch": cpu_torch(), "gpus": NO_DRIVER}, None, "", ""),
        # The driver and the bus of the host show in a container that was given no GPU.
        ({"torch": cpu_torch(), "gpus": NO_DRIVER, "software": software(driver="570.86.15")}, None, "", ""),
        ({"torch": torch(cuda=None, hip="6.4.0"), "gpus": gpus(1)}, None, "", ""),
        ({"torch": cpu_torch(), "gpus": gpus(8)}, ERROR, "torch 2.13.0+cpu is a CPU build", "torch==2.13.0+cu130 --"),
        (
            {"torch": cpu_torch(), "gpus": NO_DRIVER, "software": GIVEN},
            ERROR, "CPU build", "torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126",
        ),
        (
            {"torch": cpu_torch(version="2.8.0+cpu"), "gpus": gpus(1, driver="575.1")},
            ERROR, "CPU build", "torch==2.8.0+cu128",
        ),
        (
            {"torch": cpu_torch(), "gpus": gpus(1, driver="470.82")},
            ERROR, "CPU build", "upgrade the NVIDIA driver (470.82)",
        ),
        ({"torch": cpu_torch(), "gpus": gpus(0, driver=None, on_bus=(NOUVEAU,))}, INFO, "has no driver", "install"),
        ({"torch": torch(), "pci": MI300, "software": KFD}, ERROR, "no ROCm", "install a ROCm"),
        ({"torch": torch(), "pci": LAPTOP, "software": KFD}, None, "", ""),
        ({"torch": torch(), "pci": MI300}, None, "", ""),
    ],
)  # fmt: skip
def test_torch_cuda_build(sections, severity, says, fix):
    check, findings = ask("torch-cuda-build", node(**{"software": software(), **sections}))
    assert check.outcome is (failed(severity) if severity else PASSED), check
    if severity:
        (finding,) = findings
        assert finding.severity is severity
        assert says in finding.summary
        assert fix in finding.fix


def test_a_job_that_hides_its_gpus_is_meant_for_the_processors():
    facts = node(processes=[process(CUDA_VISIBLE_DEVICES="")], torch=cpu_torch(), gpus=gpus(8), software=software())
    assert ask("torch-cuda-build", facts)[0].outcome is SKIPPED


@pytest.mark.parametrize("kind", ["torch-cuda-build", "nccl-loaded", "hip-gpu-other", "arch"])
@pytest.mark.parametrize(
    ("build", "outcome"), [(broken("ImportError: x"), SKIPPED), (NO_TORCH, SKIPPED), (SLOW, UNKNOWN)]
)
def test_without_torch_its_build_is_not_judged(kind, build, outcome):
    assert ask(kind, node(torch=build, software=software(), gpus=gpus(1)))[0].outcome is outcome


WHEEL = "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"
SYSTEM = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.5"


@pytest.mark.parametrize(
    ("build", "severity", "says", "fix"),
    [
        (torch(), None, "", ""),
        (torch(nccl_libraries=(), nccl_loaded=None), None, "", ""),
        (torch(nccl_libraries=(SYSTEM,), nccl_loaded="2.27.3"), None, "", ""),
        (torch(nccl_loaded=None), None, "", ""),
        (
            torch(nccl_libraries=(SYSTEM,), nccl_loaded="2.18.5", nccl_found_by="LD_LIBRARY_PATH"),
            WARNING, "built with NCCL 2.27.3, but NCCL 2.18.5 is loaded", "remove /usr/lib/x86_64-linux-gnu from",
        ),
        (
            torch(nccl_libraries=(SYSTEM,), nccl_loaded="2.18.5", nccl_found_by="LD_PRELOAD"),
            WARNING, "", "unset LD_PRELOAD",
        ),
        (torch(nccl_libraries=(SYSTEM,), nccl_loaded="2.28.3"), WARNING, "", "remove the libnccl in /usr/lib/x86_64"),
        (torch(nccl_loaded="2.26.2"), WARNING, "", "pip install --force-reinstall torch"),
        (torch(nccl_loaded="2.28.3"), INFO, "NCCL 2.28.3 is loaded", "pip install"),
        (torch(nccl_libraries=(SYSTEM, WHEEL)), WARNING, "Two NCCL libraries", "remove the libnccl in /usr/lib/x86_64"),
    ],
)  # fmt: skip
def test_nccl_loaded(build, severity, says, fix):
    check, findings = ask("nccl-loaded", node(torch=build))
    assert check.outcome is (failed(severity) if severity else PASSED)
    if severity:
        (finding,) = findings
        assert finding.severity is severity
        assert says in finding.summary
        assert finding.fix.startswith(fix)


def test_nccl_of_a_build_without_it():
    assert ask("nccl-loaded", node(torch=cpu_torch()))[0].outcome is SKIPPED


def test_a_rocm_build_says_what_is_not_checked():
    _, (finding,) = ask("hip-gpu-other", node(torch=torch(cuda=None, hip="6.4.0")))
    assert finding.severity is INFO
    assert "ROCm 6.4.0" in finding.summary
    assert ask("hip-gpu-other", node(torch=torch()))[0].outcome is SKIPPED


UNAVAILABLE = {"cuda_available": False, "cuda_error": "The NVIDIA driver on your system is too old"}
CU126 = "upgrade the driver to 580 or newer, or /venv/bin/python -m pip install torch==2.13.0+cu126"


@pytest.mark.parametrize(
    ("build", "driver", "outcome", "fix"),
    [
        (torch(), "580.95.05", PASSED, ""),
        (torch(**UNAVAILABLE), "580.95.05", PASSED, ""),
        (torch(**UNAVAILABLE), "535.161.08", FAILED, CU126),
        (torch(**UNAVAILABLE, cuda_library="/usr/local/cuda/compat/libcuda.so.580.65.06"), "535.161.08", FAILED, CU126),
        # cuda-compat at work: CUDA could be initialized.
        (torch(cuda_library="/usr/local/cuda/compat/libcuda.so.580.65.06"), "535.161.08", PASSED, ""),
        (torch(cuda="12.6", **UNAVAILABLE), "525.60.13", PASSED, ""),
        (
            torch(cuda="12.6", version="2.7.0+cu126", **UNAVAILABLE),
            "470.82.01",
            FAILED,
            "upgrade the driver to 525 or newer",
        ),
        (torch(cuda="14.0", **UNAVAILABLE), "580.95.05", PASSED, ""),
        (torch(cuda=None, hip="6.4", **UNAVAILABLE), "535.161.08", SKIPPED, ""),
        (cpu_torch(), "535.161.08", SKIPPED, ""),
        (torch(), None, SKIPPED, ""),
        (NO_TORCH, "535.161.08", FAILED, CU126),
    ],
)
def test_driver_min(build, driver, outcome, fix):
    installed = software(
        driver=driver, gpu_devices=("/dev/nvidia0",), torch_cuda=None if build == cpu_torch() else "13.0"
    )
    check, findings = ask("driver-min", node(torch=build, software=installed, gpus=NO_DRIVER))
    assert check.outcome is outcome, check
    if findings:
        assert findings[0].severity is ERROR
        assert findings[0].fix.startswith(fix)
        assert f"NVIDIA driver {driver} is too old" in findings[0].summary


def test_the_drivers_of_a_host_are_no_matter_of_a_container_without_gpus():
    facts = node(torch=torch(**UNAVAILABLE), software=software(driver="470.82.01"), gpus=NO_DRIVER)
    for kind in ("driver-min", "driver-lib-mismatch"):
        assert ask(kind, facts)[0].outcome is SKIPPED


LIBRARY = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so."


@pytest.mark.parametrize(
    ("seen", "libraries", "driver", "outcome"),
    [
        (gpus(8), (f"{LIBRARY}535.161.08",), "580.95.05", PASSED),
        (gpus(0, init_error="LIB_RM_VERSION_MISMATCH", driver=None), (), "580.95.05", FAILED),
        (gpus(0, init_error="DRIVER_NOT_LOADED", driver=None), (f"{LIBRARY}580.95.05",), "580.95.05", PASSED),
        (Unread(why=Why.ERROR, reason="NVML could not be asked"), (f"{LIBRARY}575.57.08",), "580.95.05", FAILED),
        (Unread(why=Why.ERROR, reason="x"), (f"{LIBRARY}575.57.08", f"{LIBRARY}580.95.05"), "580.95.05", PASSED),
        (Unread(why=Why.ERROR, reason="x"), (), "580.95.05", SKIPPED),
        (Unread(why=Why.ERROR, reason="x"), (f"{LIBRARY}580.95.05",), None, SKIPPED),
    ],
)
def test_driver_lib_mismatch(seen, libraries, driver, outcome):
    installed = software(driver=driver, nvml_libraries=libraries, gpu_devices=("/dev/nvidia0", "/dev/nvidiactl"))
    check, findings = ask("driver-lib-mismatch", node(software=installed, gpus=seen))
    assert check.outcome is outcome
    if findings:
        assert findings[0].fix.startswith("reboot, or, when no process uses the GPUs: sudo rmmod")
        assert findings[0].severity is ERROR


ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("arches", "devices", "ranks", "severity", "fix"),
    [
        (ARCHES, [(9, 0)], 1, None, ""),
        (ARCHES, [(8, 9)], 1, None, ""),
        (ARCHES, [(12, 1)], 1, None, ""),
        (("sm_90", "compute_90"), [(10, 0)], 1, None, ""),
        (("sm_90a",), [(9, 0)], 1, None, ""),
        (("sm_100f",), [(10, 3)], 1, None, ""),
        (("sm_90a", "compute_90a"), [(10, 0)], 1, ERROR, "install a newer build"),
        (("sm_80", "sm_90"), [(12, 0)], 1, ERROR, "install a newer build: upgrade the NVIDIA driver"),
        (("sm_86",), [(8, 0)], 1, ERROR, "install an older build of torch that still supports sm_80"),
        (ARCHES, [(7, 0)], 1, ERROR, "install an older build of torch that still supports sm_70"),
        (ARCHES, [(9, 0), (6, 1)], 1, WARNING, "export CUDA_VISIBLE_DEVICES=0"),
        (ARCHES, [(6, 1), (9, 0)], 1, ERROR, "export CUDA_VISIBLE_DEVICES=1"),
        (ARCHES, [(9, 0), (6, 1)], 2, ERROR, "export CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_arch(arches, devices, ranks, severity, fix):
    build = torch(arch_list=arches, devices=tuple(device(n, capability) for n, capability in enumerate(devices)))
    facts = node(processes=[process(0, LOCAL_WORLD_SIZE=str(ranks))], torch=build, software=software())
    check, findings = ask("arch", facts)
    assert check.outcome is (failed(severity) if severity else PASSED)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all(finding.fix.startswith(fix) for finding in findings)


def test_arch_where_there_is_nothing_to_judge():
    for build in (torch(), cpu_torch(), torch(hip="6.4", cuda=None), torch(cuda_error="no driver", arch_list=ARCHES)):
        assert ask("arch", node(torch=build, software=software()))[0].outcome is SKIPPED


def machines(count, **changed):
    """Make nodes alike; ``changed`` has sections of some of them, by name: node3=…"""
    alike = {"software": software(), "torch": torch(), "gpus": gpus(8)}
    return [
        node(f"node{n}", index=n, processes=[process(n)], **{**alike, **changed.get(f"node{n}", {})})
        for n in range(count)
    ]


def reported(*nodes):
    return ask("version-same", fleet(*nodes, launcher=Launcher.TORCHRUN))


def test_equal_versions():
    check, findings = reported(*machines(16))
    assert (check.outcome, findings) == (PASSED, ())
    assert check.seen.startswith("versions of 16 nodes: torch 2.13.0+cu130, NCCL 2.27.3, Python 3.12")


def test_one_node_has_nothing_to_be_compared_with():
    assert reported(*machines(1))[0].outcome is SKIPPED


@pytest.mark.parametrize(
    ("changed", "severity", "summary"),
    [
        ({"torch": torch(version="2.11.0+cu130")}, ERROR, "torch 2.11.0+cu130 on node3, 2.13.0+cu130 on 15 others"),
        ({"torch": torch(nccl_loaded="2.26.2")}, ERROR, "NCCL 2.26.2 on node3, 2.27.3 on 15 others"),
        ({"software": software(python="3.11.7")}, WARNING, "Python 3.11 on node3, 3.12 on 15 others"),
        ({"software": software(driver="570.1")}, WARNING, "NVIDIA driver 570.1 on node3, 580.95.05 on 15 others"),
        ({"gpus": gpus(8, vbios="97.00")}, WARNING, "VBIOS 97.00 on node3, 96.00 on 15 others"),
        (
            {"gpus": gpus(8, name="A100", vbios="92.00")},
            WARNING,
            "GPUs: A100 on node3, NVIDIA H100 80GB HBM3 on 15 others",
        ),
        ({"software": software(kernel="5.15.0")}, WARNING, "kernel 5.15.0 on node3, 6.8.0-60-generic on 15 others"),
    ],
)
def test_a_node_that_differs(changed, severity, summary):
    check, (finding,) = reported(*machines(16, node3=changed))
    assert (check.outcome, finding.severity, finding.summary) == (failed(severity), severity, summary)
    assert (finding.hosts, finding.confidence) == (("node3",), Confidence.HIGH)


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("2.13.0+cu130", "torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"),
        ("2.13.0+cpu", "torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0", "torch==2.13.0"),
    ],
)
def test_the_torch_of_the_others_is_installed_from_where_it_is(version, fix):
    nodes = [replace(one, torch=torch(version=version)) for one in machines(3)]
    _, (finding,) = reported(*nodes[:2], replace(nodes[2], torch=torch(version="2.11.0+cu130")))
    assert finding.fix == f"python -m pip install {fix}"


@pytest.mark.parametrize("changed", [{"software": software(python="3.12.9")}, {"gpus": NO_DRIVER}, {"torch": SLOW}])
def test_what_is_no_difference(changed):
    assert reported(*machines(4, node3=changed))[0].outcome is PASSED


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ofed", "24.10", "OFED 24.10 on node0, 23.04 on node1"),
        ("image", "a:1", "container image a:1 on node0, a:2 on node1"),
    ],
)
def test_two_nodes_that_differ_are_both_named(field, value, says):
    other = {"ofed": "23.04", "image": "a:2"}[field]
    nodes = machines(2, node0={"software": software(**{field: value})}, node1={"software": software(**{field: other})})
    _, (finding,) = reported(*nodes)
    assert (finding.summary, finding.confidence, finding.hosts) == (says, Confidence.LOW, ("node0", "node1"))


def test_versions_of_metadata_count_where_torch_is_not_imported():
    nodes = machines(3, node2={"software": software(torch_version="2.11.0")})
    _, (finding,) = reported(*[replace(one, torch=NO_TORCH) for one in nodes])
    assert finding.summary == "torch 2.11.0 on node2, 2.13.0+cu130 on 2 others"
    assert finding.fix.startswith("python -m pip install torch==2.13.0+cu130 --index-url ")


@pytest.mark.parametrize(
    ("version", "driver", "index"),
    [
        ("2.13.0", "580.95.05", "cu130"),
        ("2.8.0", "580.95.05", "cu128"),
        ("2.13.0", "575.1", "cu126"),
        ("2.7.0", "535.1", "cu126"),
        ("2.6.0", "470.82", "cu118"),
        ("2.13.0", "470.82", None),
        (None, "580.95.05", "cu130"),
        (None, "550.1", "cu126"),
        (None, "470.82", None),
        ("2.13.0", None, None),
    ],
)
def test_the_index_for_a_driver(version, driver, index):
    assert cuda_wheel(version, driver) == index


def test_numbers_of_a_version():
    assert release("2.13.0+cu130") == (2, 13, 0)
    assert release("580.95.05") == (580, 95, 5)
    assert release(None) == release("nightly") == ()


# DD106 over nodes whose versions are known.


def of(*expected, versions=("2.13.0+cu130", "2.13.0+cu130")):
    nodes = [
        node(host=f"node{number}", software=software(kernel="6.1.0-12-amd64"), torch=torch(version=version))
        for number, version in enumerate(versions)
    ]
    return replace(fleet(*nodes), expected=tuple(map(read_expected, expected)))


@pytest.mark.parametrize(
    "expected", ["torch==2.13.*", "torch>=2.6,<3", "Torch == 2.13.0", "kernel>=6.1", "python>=3.10"]
)
def test_versions_that_meet_the_expectation_pass(expected):
    assert ask("version-expected", of(expected))[0].outcome is Outcome.PASSED


def test_the_nodes_with_another_version_are_named():
    _, (finding,) = ask("version-expected", of("torch==2.13.*", "kernel>=6", versions=("2.13.0", "2.12.1")))
    assert finding.hosts == ("node1",)
    assert finding.summary == "torch is 2.12.1, but torch==2.13.* is expected"


def test_nothing_expected_is_skipped_and_what_is_not_known_is_no_pass():
    assert ask("version-expected", of())[0].outcome is Outcome.SKIPPED
    assert ask("version-expected", of("driver>=550"))[0].outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("text", ["torsh==2", "torch", "torch=2", "==2", "torch==2.13.*; rm", ""])
def test_what_is_no_expectation_is_refused(text):
    with pytest.raises(UserError, match="--expect-version is"):
        read_expected(text)


# Recorded machines through all collectors and all rules: a healthy one is silent, one fault is one finding.


WITH_GPUS = frozenset({"nvlink8", "roce8", "workstation2"})


@cache
def read(machine, *states):
    """Return the machine and what the collectors say of it."""
    system = shared_machine(machine, *states)
    return system, read_node(system, ReadingPlan(sections=frozenset(SECTIONS)), (read_process(system),))


def findings_of(machine, states=(), nvml=()):
    system, node = read(machine, *states)
    if machine in WITH_GPUS:
        *_, gpus = read_gpu_facts(load_nvml(machine, *nvml), system)
        node = replace(node, gpus=gpus)
    judged = judge_fleet(Fleet(nodes=(node,)), rules_of("environment"))
    assert [c.id for c in judged.checks if c.outcome in {Outcome.CRASHED, Outcome.INCONCLUSIVE}] == []
    return sorted(f"{finding.severity.value} {finding.kind}" for finding in judged.findings)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("nvlink8", []),
        ("roce8", []),
        # A desktop's shell has 1024 files, its cards no peer access, and its driver is not kept loaded.
        ("workstation2", ["info p2p", "info persistence", "warning nofile"]),
        # Docker's own 64 MiB of shared memory.
        ("container-nogpu", ["warning shm"]),
        # A Mac's shell has 256 files.
        ("mac-laptop", ["warning nofile"]),
    ],
)
def test_a_healthy_machine(machine, expected):
    assert findings_of(machine) == expected


@pytest.mark.parametrize(
    ("machine", "state", "expected"),
    [
        ("nvlink8", "acs", ["warning acs-iommu"]),
        ("nvlink8", "ib-down", ["error ib-state"]),
        ("nvlink8", "ib-flapped", ["warning ib-flap"]),
        ("nvlink8", "ib-no-manager", ["warning ib-state"]),
        ("nvlink8", "ib-one-lane", ["error ib-rate"]),
        ("nvlink8", "iommu", ["warning acs-iommu"]),
        ("nvlink8", "memlock-low", ["error memlock"]),
        ("nvlink8", "no-peermem", ["warning peermem"]),
        ("nvlink8", "not-root", []),
        ("nvlink8", "numa-lost", ["warning numa"]),
        ("nvlink8", "pcie-narrow", ["error pcie"]),
        ("nvlink8", "pcie-old-speed", ["warning pcie"]),
        ("nvlink8", "pod", []),
        ("nvlink8", "stuck", ["error dstate"]),
        ("nvlink8", "uverbs-denied", ["warning uverbs"]),
        ("nvlink8", "uverbs-missing", ["warning uverbs"]),
        ("nvlink8", "xid", ["error xid", "info xid", "warning xid"]),
        ("roce8", "no-ipv4", ["error roce-gid"]),
        ("container-nogpu", "leftovers", ["error shm"]),
    ],
)
def test_one_fault_of_the_machine(machine, state, expected):
    assert findings_of(machine, (state,)) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("lost", ["error gpu-count"]),
        ("lost-on-the-way", ["error gpu-count"]),
        ("mismatch", ["error driver-lib-mismatch"]),
        ("one-fewer", ["error gpu-count"]),
        ("ecc-uncorrected", ["error ecc-unc"]),
        ("ecc-off", ["warning ecc-unc"]),
        ("ecc-corrected", ["warning ecc-unc"]),
        ("remap-pending", ["error row-remap"]),
        ("remap-failed", ["error row-remap"]),
        ("remapped", ["warning row-remap"]),
        ("retired-pending", ["error retired-pages"]),
        ("retired-many", ["warning retired-pages"]),
        ("sram", ["error sram-threshold"]),
        ("hw-slowdown", ["error throttle"]),
        ("power-brake", ["error throttle"]),
        ("sw-thermal", ["warning throttle"]),
        ("power-cap", ["info throttle"]),
        ("hot", ["warning temp-power"]),
        ("power-limit", ["warning temp-power"]),
        ("app-clocks", ["warning app-clocks"]),
        ("mig", ["warning mig"]),
        ("prohibited", ["error compute-mode"]),
        ("leftover", ["warning other-procs"]),
        ("our-process", []),
        ("zombie", ["warning zombie-ctx"]),
        ("nvlink-down", ["error nvlink"]),
        ("fabric-in-progress", ["error fabric"]),
        ("fabric-failed", ["error fabric"]),
        ("p2p-off", ["error p2p"]),
    ],
)
def test_one_fault_of_a_gpu(state, expected):
    assert findings_of("nvlink8", nvml=(state,)) == expected


@pytest.mark.parametrize("machine", ["nvlink8", "container-nogpu"])
@pytest.mark.parametrize("rule", rules_of("environment"), ids=lambda rule: rule.kind)
def test_a_rule_says_the_same_where_only_what_it_needs_was_read(rule, machine):
    system, node = read(machine)
    if machine in WITH_GPUS:
        *_, gpus = read_gpu_facts(load_nvml(machine, "ecc-off", "persistence-off"), system)
        node = replace(node, gpus=gpus)
    needed = replace(node, **{name: NOT_ASKED for name in SECTIONS if name not in rule.needs})

    assert judge_fleet(Fleet(nodes=(needed,)), [rule]) == judge_fleet(Fleet(nodes=(node,)), [rule])
