"""The kernel's log, Kubernetes and nvidia-smi."""

import pytest

from ddpdoctor.evidence.machines import KernelReader, KubernetesReader, NvidiaSmiReader
from ddpdoctor.evidence.reader import Document
from ddpdoctor.model.evidence import Exited, Fact, Trouble, Who
from tests.unit.evidence.reading_lines import read_text

XID = "NVRM: Xid (PCI:0000:4e:00): {code}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def kernel(text: str, host: str = "") -> list[Fact]:
    return read_text(KernelReader(), text, Who(host=host))


@pytest.mark.parametrize(
    ("code", "fatal"),
    [
        *((code, True) for code in (79, 48, 64, 74, 94, 95, 119, 120)),
        *((code, False) for code in (13, 31, 43, 45, 63, 9999)),
    ],
)
def test_xids_are_causes_or_consequences(code: int, fatal: bool) -> None:  # noqa: FBT001
    (fact,) = kernel(f"Mar  9 14:02:11 g7 kernel: {XID.format(code=code)}")
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.gpu, fact.who.host, fact.fatal) == ("xid", "4e:00", "g7", fatal)
    assert f"Xid {code}" in fact.problem
    assert "{index}" not in fact.fix


@pytest.mark.parametrize(
    "prefix", ["", "[12345.678901] ", "[Mon Mar  9 14:02:11 2026] ", "Mar  9 14:02:11 g7 kernel: "]
)
def test_every_form_of_the_kernels_log(prefix: str) -> None:
    (fact,) = kernel(f"{prefix}NVRM: Xid (0000:4e:00.0): 13, Graphics Exception")
    assert isinstance(fact, Trouble)
    assert fact.gpu == "4e:00"


CGROUP = (
    "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/job_88,"
    "task_memcg=/slurm/job_88/step_0,task=python3,pid=51232,uid=1004\n"
)
KILLED = "Memory cgroup out of memory: Killed process 51232 (python3) total-vm:9kB, anon-rss:8kB, file-rss:0kB\n"


@pytest.mark.parametrize("text", [CGROUP + KILLED, CGROUP, KILLED])
def test_a_process_that_is_killed_for_memory_is_told_once(text: str) -> None:
    trouble, exited = kernel(text, host="g7")
    assert isinstance(trouble, Trouble)
    assert (trouble.kind, trouble.fatal, "cgroup" in trouble.problem) == ("oom", True, True)
    assert isinstance(exited, Exited)
    assert (exited.who, exited.signal, exited.memory) == (Who(host="g7", pid=51232), "SIGKILL", True)


def test_a_whole_machine_without_memory() -> None:
    trouble, _ = kernel("Out of memory: Killed process 7 (pt_main_thread) total-vm:9kB, anon-rss:8kB")
    assert isinstance(trouble, Trouble)
    assert "the memory of the machine" in trouble.problem


def test_another_program_that_is_killed_is_no_fault_of_the_job() -> None:
    (trouble,) = kernel("Out of memory: Killed process 7 (java) total-vm:9kB, anon-rss:8kB")
    assert isinstance(trouble, Trouble)
    assert not trouble.fatal


@pytest.mark.parametrize(
    "text",
    [
        "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:03:00.0: GPU is lost.  Reboot the system",
        "Unable to determine the device handle for GPU0: 0000:03:00.0: Unknown Error",
        "NVRM: GPU 0000:03:00.0: GPU has fallen off the bus.",
        "NVRM: GPU at PCI:0000:03:00 has fallen off the bus.",
    ],
)
def test_a_gpu_that_is_lost(text: str) -> None:
    (fact,) = kernel(text)
    assert isinstance(fact, Trouble)
    assert (fact.kind, fact.gpu) == ("gpu-lost", "03:00")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15", "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "Out of memory warning threshold set", "python3 invoked oom-killer: gfp_mask=0xcc0",
    ],
)  # fmt: skip
def test_other_lines_say_nothing(text: str) -> None:
    assert kernel(text) == []


DESCRIBE = """\
Name:             job-worker-3
Namespace:        default
Containers:
  pytorch:
    State:          Terminated
      Reason:       {reason}
      Exit Code:    {code}
    Ready:          False
    Restart Count:  0
"""


def kubernetes(text: str) -> list[Fact]:
    return read_text(KubernetesReader(), text)


@pytest.mark.parametrize(
    ("reason", "code", "signal", "status", "memory"),
    [
        ("OOMKilled", 137, "SIGKILL", None, True), ("Error", 137, "SIGKILL", None, False),
        ("Error", 143, "SIGTERM", None, False), ("Error", 1, "", 1, False),
    ],
)  # fmt: skip
def test_how_a_container_ended(reason: str, code: int, signal: str, status: int | None, memory: bool) -> None:  # noqa: FBT001
    (fact,) = kubernetes(DESCRIBE.format(reason=reason, code=code))
    assert isinstance(fact, Exited)
    assert (fact.who.host, fact.signal, fact.code, fact.memory) == ("job-worker-3", signal, status, memory)


def test_a_container_that_ended_well_and_an_exit_code_in_a_log_say_nothing() -> None:
    assert kubernetes(DESCRIBE.format(reason="Completed", code=0)) == []
    assert kubernetes("Exit Code: 1\nreason: none\n") == []


def test_a_table_of_pods() -> None:
    (killed, evicted) = kubernetes("job-worker-1   0/1   OOMKilled   0   12m\njob-worker-2   0/1   Evicted   0   12m\n")
    assert isinstance(killed, Exited)
    assert (killed.who.host, killed.memory) == ("job-worker-1", True)
    assert isinstance(evicted, Trouble)


SMI = """\

==============NVSMI LOG==============

Timestamp                                 : Mon Mar  9 14:02:11 2026
Driver Version                            : 550.54.15
Attached GPUs                             : 2
GPU 00000000:1A:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : None
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            DRAM Uncorrectable            : 0
        Aggregate
            DRAM Uncorrectable            : 3
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : No
        Remapping Failure Occurred        : No
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Not Active
GPU 00000000:4E:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU Recovery Action                   : {action}
    ECC Errors
        Volatile
            DRAM Uncorrectable            : {errors}
    Remapped Rows
        Pending                           : {pending}
        Remapping Failure Occurred        : {failure}
    Clocks Event Reasons
        HW Slowdown                       : {slow}
    Temperature
        GPU Current Temp                  : {temperature}
    FB Memory Usage
        Total                             : {temperature}
"""
WELL = {
    "action": "None", "errors": "0", "pending": "No", "failure": "No", "slow": "Not Active", "temperature": "44 C",
}  # fmt: skip


def smi(**values: str) -> list[tuple[str, str, bool]]:
    body = SMI.format(**{**WELL, **values}).encode()
    reader = NvidiaSmiReader()
    assert reader.recognizes(body)
    facts = reader.read(Document(source="smi.txt", path=None, body=body, who=Who(host="g7"))).facts
    found = [fact for fact in facts if isinstance(fact, Trouble)]
    assert len(found) == len(facts)
    assert {fact.who.host for fact in found} <= {"g7"}
    return [(fact.kind, fact.gpu, fact.fatal) for fact in found]


def test_healthy_gpus_say_nothing() -> None:
    assert smi() == []


@pytest.mark.parametrize(
    ("values", "kind", "fatal"),
    [
        ({"errors": "2"}, "xid", True), ({"pending": "Yes"}, "xid", True), ({"failure": "Yes"}, "xid", True),
        ({"action": "Reset"}, "gpu-lost", True), ({"slow": "Active"}, "slowdown", False),
        ({"temperature": "Unknown Error"}, "gpu-lost", True),
    ],
)  # fmt: skip
def test_faults_are_told_once_with_their_gpu(values: dict[str, str], kind: str, fatal: bool) -> None:  # noqa: FBT001
    assert smi(**values) == [(kind, "4e:00", fatal)]


def test_a_gpu_that_the_report_cannot_reach() -> None:
    line = "Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error\n"
    body = (SMI.format(**WELL) + line).encode()
    facts = NvidiaSmiReader().read(Document(source="smi.txt", path=None, body=body)).facts
    assert [(fact.kind, fact.gpu) for fact in facts if isinstance(fact, Trouble)] == [("gpu-lost", "4e:00")]
