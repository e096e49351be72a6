"""Jobs that Slurm, Kubernetes, the kernel or a GPU ended, and what their words do not tell."""

import pytest

from tests.evidence_texts import (
    closed_by,
    gloo_timeout,
    interleaved,
    labeled,
    nccl_start,
    raised,
    steps,
    text,
    watchdog,
    work,
)
from tests.rules.evidence.truths import ABSENT, Truth, hold

OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=4410.0. Some of the step tasks have been OOM Killed."


def tasks(count: int, lines: list[str]) -> list[str]:
    return [f"{task}: {line}" for line in lines for task in range(count)]


def test_slurm_names_the_task(tmp_path):
    log = text(
        [
            *tasks(8, steps(6)),
            OOM,
            "srun: error: n042: task 6: Out Of Memory",
            "srun: error: n041: tasks 0-3: Terminated",
            "srun: error: n042: tasks 4-5,7: Terminated",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(6,), hosts=("n042",), says=("memory",)))


def test_an_event_without_a_task(tmp_path):
    """deeplearning_course_sjtu 20: memory is certain, the task is not."""
    log = text([*steps(6), OOM.replace("4410.0", "4410.batch"), "srun: error: n042: task 0: Terminated"])
    hold(tmp_path, log, Truth(kinds=("killed",), says=("memory",), ranks=()))


def test_the_old_words_of_an_event(tmp_path):
    log = text(
        [
            *steps(6),
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=31.batch. Some of your processes may have been killed by the cgroup out-of-memory handler.",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed",), says=("memory",), ranks=()))


def test_an_event_that_hit_a_loader_worker(tmp_path):
    error = "RuntimeError: DataLoader worker (pid 411) is killed by signal: Killed. "
    lines = [f"3: {line}" for line in raised(error, None, 44, "for batch in loader:")]
    log = text(
        [
            *tasks(4, steps(4)),
            OOM,
            *lines,
            "srun: error: n041: task 3: Exited with exit code 1",
            "srun: error: n041: tasks 0-2: Terminated",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("crash", "killed"), ranks=(3,), says=("memory|oom", "worker")))


def test_the_time_limit(tmp_path):
    log = text(
        [
            *steps(99),
            "slurmstepd: error: *** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:12:11 DUE TO TIME LIMIT ***",
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
            "srun: error: g001: tasks 0-7: Terminated",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(), hosts=(), says=("time limit",)))


def test_a_hang_until_the_time_limit(tmp_path):
    """The watchdog spoke first: the limit is not the cause."""
    logs = [labeled(f"[rank{rank}]: ", steps(3)) + (watchdog(rank, work(71)) if rank != 2 else []) for rank in range(4)]
    log = interleaved(*logs) + text(
        ["slurmstepd: error: *** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:12:11 DUE TO TIME LIMIT ***"]
    )
    hold(tmp_path, log, Truth(kinds=ABSENT, ranks=(2,)))


@pytest.mark.parametrize(("why", "says"), [("PREEMPTION", "preempt"), ("JOB REQUEUE", "requeue")])
def test_taken_away(tmp_path, why, says):
    log = text([*steps(9), f"slurmstepd: error: *** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:12:11 DUE TO {why} ***"])
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(), hosts=(), says=(says,)))


def test_cancelled_by_somebody(tmp_path):
    log = text([*steps(9), "slurmstepd: error: *** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:12:11 ***"])
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(), hosts=(), or_cannot_tell=True))


def test_a_crash_and_then_cancelled(tmp_path):
    lines = [f"2: {line}" for line in raised("KeyError: 'labels'", None)]
    log = text(
        [
            *tasks(4, steps(3)),
            *lines,
            "srun: error: g001: task 2: Exited with exit code 1",
            "srun: Terminating StepId=912.0",
            "slurmstepd: error: *** STEP 912.0 ON g001 CANCELLED AT 2026-03-09T14:12:11 ***",
            "srun: error: g001: tasks 0-1: Terminated",
            "srun: error: g002: task 3: Killed",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("crash",), ranks=(2,), says=("KeyError",)))


def test_a_lost_node(tmp_path):
    log = text(
        [
            *steps(9),
            "srun: error: Node failure on n007",
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
            "slurmstepd: error: *** STEP 912.0 ON n001 CANCELLED AT 2026-03-09T14:12:11 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            "srun: error: n001: tasks 0-7: Terminated",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed", "node-failure", "crash"), hosts=("n007",), says=("n007",)))


def test_a_node_failure_that_names_no_node(tmp_path):
    """The host in the line runs the step; it is not the one that failed."""
    log = text(
        [
            *steps(9),
            "slurmstepd: error: *** JOB 912 ON n001 CANCELLED AT 2026-03-09T14:12:11 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed", "node-failure", "crash"), hosts=(), ranks=()))


def test_one_task_a_node_is_no_rank(tmp_path):
    """srun starts one torchrun a node: task 1 has the ranks 4 to 7."""
    lines = [f"1: {line}" for line in raised("KeyError: 'labels'", 6)]
    log = text(
        [
            *(f"{rank // 4}: [rank{rank}]: {line}" for rank in range(8) for line in steps(2)),
            *lines,
            "srun: error: n002: task 1: Exited with exit code 1",
            "srun: error: n001: task 0: Terminated",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("crash",), ranks=(6,), says=("KeyError",)))


def test_two_jobs_in_one_folder(tmp_path):
    files = {
        "slurm-4711.out": text(raised("KeyError: 'labels'", 1)),
        "slurm-4712.out": text(
            [
                *steps(9),
                "slurmstepd: error: *** JOB 4712 ON g001 CANCELLED AT 2026-03-09T14:12:11 DUE TO TIME LIMIT ***",
            ]
        ),
    }
    hold(tmp_path, files, Truth(kinds=("killed",), ranks=(), says=("time limit",)))


def test_a_pod_without_memory(tmp_path):
    pod = "Name:         job-worker-3\nNamespace:    train\nContainers:\n  pytorch:\n    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
    hold(
        tmp_path,
        {"pod.txt": pod, "job-worker-0.log": text(closed_by(0))},
        Truth(kinds=("killed",), says=("memory",), hosts=("job-worker-3",)),
    )


XID = "[Mon Mar  9 14:02:18 2026] NVRM: Xid (PCI:0000:{}:00): {}, pid='<unknown>', name=<unknown>, {}"


def test_a_gpu_off_the_bus(tmp_path):
    """busId in NCCL's log tells whose GPU it was."""
    start = [
        line for rank in range(4) for line in nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank)
    ]
    logs = [watchdog(rank, work(71)) for rank in range(4)]
    files = {
        "job.log": text(start) + interleaved(*logs),
        "dmesg_h1.txt": XID.format("3a", 79, "GPU has fallen off the bus.") + "\n",
    }
    hold(tmp_path, files, Truth(kinds=("crash", "xid"), says=("79",), or_cannot_tell=False))


def test_an_xid_of_the_application_is_a_consequence(tmp_path):
    files = {
        "job.log": interleaved(raised("ValueError: NaN in loss", 1), closed_by(0)),
        "dmesg.txt": XID.format("3a", 43, "Ch 00000008") + "\n",
    }
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(1,), says=("NaN",)))


def test_the_kernel_killed_another_program(tmp_path):
    kernel = "[Mon Mar  9 14:02:18 2026] Out of memory: Killed process 811 (mysqld) total-vm:91231231kB, anon-rss:60231231kB\n"
    files = {"job.log": interleaved(raised("ValueError: NaN in loss", 1), closed_by(0)), "dmesg.txt": kernel}
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(1,), says=("NaN",)))


def test_the_whole_node_ran_out_of_memory(tmp_path):
    kernel = "Mar  9 14:02:18 n7 kernel: [12345.678901] python3 invoked oom-killer: gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0\nMar  9 14:02:18 n7 kernel: [12345.978901] Out of memory: Killed process 51232 (python3) total-vm:91231231kB, anon-rss:60231231kB\n"
    files = {"job.log": interleaved(gloo_timeout(0), gloo_timeout(1)), "messages": kernel}
    hold(tmp_path, files, Truth(kinds=("killed",), hosts=("n7",), says=("memory",)))


SMI = """
==============NVSMI LOG==============

Timestamp                                 : Mon Mar  9 14:02:18 2026
Driver Version                            : 570.86.15
CUDA Version                              : 12.8

Attached GPUs                             : 2
GPU 00000000:4E:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            DRAM Uncorrectable            : {dram}
        Aggregate
            DRAM Uncorrectable            : 2
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 1
        Pending                           : {pending}
        Remapping Failure Occurred        : No
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : {slow}
    GPU Recovery Action                   : {action}
GPU 00000000:5E:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
"""


@pytest.mark.parametrize("fault", [{"dram": "12"}, {"pending": "Yes"}, {"action": "Reset"}])
def test_a_gpu_with_a_fault(tmp_path, fault):
    healthy = {"dram": "0", "pending": "No", "slow": "Not Active", "action": "None"}
    logs = interleaved(*(watchdog(rank, work(71)) for rank in range(4)))
    truth = Truth(kinds=("xid", "crash", "gpu"), says=("4e:00",))
    hold(tmp_path, {"job.log": logs, "h1_smi.txt": SMI.format_map(healthy | fault)}, truth)


def test_a_healthy_gpu_says_nothing(tmp_path):
    healthy = {"dram": "0", "pending": "No", "slow": "Not Active", "action": "None"}
    logs = [labeled(f"[rank{rank}]: ", steps(3)) + (watchdog(rank, work(71)) if rank != 2 else []) for rank in range(4)]
    hold(tmp_path, {"job.log": interleaved(*logs), "smi.txt": SMI.format_map(healthy)}, Truth(kinds=ABSENT, ranks=(2,)))


def test_a_gpu_that_nvidia_smi_cannot_find(tmp_path):
    smi = "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error\n"
    hold(
        tmp_path,
        {"job.log": interleaved(gloo_timeout(0), gloo_timeout(1)), "smi.txt": smi},
        Truth(kinds=("xid", "crash", "gpu"), says=("03:00",)),
    )


NCCL_TESTS = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  20100 on         h1 device  0 [0x4e] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  20101 on         h1 device  1 [0x5e] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    20.10   52.17   97.81      0    19.90   52.69   98.80      0
   134217728      33554432     float     sum      -1    610.2  219.95  412.41      {wrong}    608.8  220.46  413.36      0
# Out of bounds values : {bounds}
# Avg bus bandwidth    : 255.6
#
"""


def test_wrong_results_of_nccl_tests(tmp_path):
    hold(
        tmp_path,
        NCCL_TESTS.format(wrong="12", bounds="1 FAILED"),
        Truth(kinds=("crash", "wrong-data", "bandwidth", "corruption"), says=("wrong",)),
    )


def test_good_results_of_nccl_tests(tmp_path):
    hold(tmp_path, NCCL_TESTS.format(wrong="0", bounds="0 OK"), Truth(silent=True, mentions=("255.6",)))


def test_torchrun_on_one_node_died_and_the_others_hang(tmp_path):
    """spd 537: the log of the node ends; the others wait."""
    files = {
        "n1.log": interleaved(*(watchdog(rank, work(71)) for rank in (0, 1))),
        "n2.log": text(
            [
                *(f"[rank{rank}]: {line}" for line in steps(3) for rank in (2, 3)),
                "slurmstepd: error: Detected 1 oom_kill event in StepId=4410.0. Some of the step tasks have been OOM Killed.",
                "srun: error: n2: task 1: Out Of Memory",
            ]
        ),
    }
    hold(tmp_path, files, Truth(kinds=("killed",), hosts=("n2",), says=("memory",), not_ranks=(0, 1)))


SACCT = """\
JobID             State ExitCode     MaxRSS
------------ ---------- -------- ----------
4711         {:>10} {:>8}
4711.batch   {:>10} {:>8}    123456K
4711.extern   COMPLETED      0:0          0
"""


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("OUT_OF_ME+", "0:125", "OUT_OF_ME+", "0:125"), "memory"),
        (("TIMEOUT", "0:0", "CANCELLED", "0:15"), "time limit"),
        (("PREEMPTED", "0:0", "CANCELLED", "0:15"), "preemption"),
        (("FAILED", "0:15", "FAILED", "0:15"), "stopped from outside"),
        (("NODE_FAIL", "1:0", "CANCELLED", "0:15"), "node"),
        (("FAILED", "0:9", "FAILED", "0:9"), "SIGKILL"),
    ],
)
def test_slurms_accounting(tmp_path, rows, says):
    given = {"sacct.txt": SACCT.format(*rows), "job.log": text(steps(30))}
    hold(tmp_path, given, Truth(kinds=("killed",), ranks=(), hosts=(), says=(says,)))


def test_slurms_accounting_with_bars(tmp_path):
    table = "JobID|JobName|State|ExitCode|MaxRSS|\n4711|train|TIMEOUT|0:0||\n4711.batch|batch|CANCELLED|0:15|12K|\n"
    hold(
        tmp_path,
        {"sacct.txt": table, "job.log": text(steps(30))},
        Truth(kinds=("killed",), ranks=(), says=("time limit",)),
    )


def test_slurms_accounting_of_a_good_end(tmp_path):
    given = {"sacct.txt": SACCT.format("COMPLETED", "0:0", "COMPLETED", "0:0"), "job.log": text(steps(30))}
    hold(tmp_path, given, Truth(silent=True))


def test_a_device_that_pcie_lost(tmp_path):
    kernel = "[Mon Mar  9 14:02:18 2026] pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0\n"
    files = {"job.log": interleaved(gloo_timeout(0), gloo_timeout(1)), "dmesg.txt": kernel}
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(), says=("AER",)))


def test_errors_that_pcie_corrected(tmp_path):
    kernel = "[Mon Mar  9 14:02:18 2026] pcieport 0000:3a:00.0: AER: Corrected error received: 0000:3b:00.0\n"
    files = {"job.log": interleaved(gloo_timeout(0), raised("ValueError: NaN in loss", 1)), "dmesg.txt": kernel}
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(1,), says=("NaN",)))


def test_two_tasks_that_one_line_tells_of(tmp_path):
    log = text(
        [
            *tasks(4, steps(3)),
            OOM,
            "srun: error: n042: tasks 1,3: Out Of Memory",
            "srun: error: n041: tasks 0,2: Terminated",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(1, 3), hosts=("n042",), says=("memory",)))


def test_whose_gpu_it_is(tmp_path):
    """The file's name tells the host, NCCL's busId the rank."""
    start = [
        nccl_start(f"h{1 + rank // 2}", f"10.0.0.{1 + rank // 2}", 100 + rank, rank=rank, ranks=4, gpu=rank % 2)
        for rank in range(4)
    ]
    logs = [watchdog(rank, work(71)) for rank in range(4)]
    files = {
        "job.log": interleaved(*start) + interleaved(*logs),
        "dmesg_h2.txt": XID.format("2a", 79, "GPU has fallen off the bus.") + "\n",
    }
    hold(tmp_path, files, Truth(kinds=("xid",), ranks=(3,), hosts=("h2",), says=("79",)))


@pytest.mark.parametrize(
    "line",
    [
        XID.format("3a", 63, "Row remapper event"),
        "[Mon Mar  9 14:02:18 2026] Out of memory: Killed process 811 (mysqld) total-vm:1kB",
    ],
)
def test_notes_of_the_kernel_beside_a_good_end(tmp_path, line):
    given = {"job.log": text([*steps(30), "`Trainer.fit` stopped: `max_epochs=3` reached."]), "dmesg.txt": line + "\n"}
    hold(tmp_path, given, Truth(silent=True))
