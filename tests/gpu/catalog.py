"""All jobs of these tests, in the order of what they are worth: a run that is cut off has had the first ones.

Two ranks share cuda:0, and NCCL takes them for two hosts. The hang timeout is a minute for jobs that must stay silent.
"""

import signal
from pathlib import Path
from typing import Any

from tests.gpu.running import JOBS as SCRIPTS
from tests.gpu.running import ROOT, Job
from tests.scenarios.running import words_of

HANG = ("--hang-timeout", "{hang_s}", "--on-hang", "kill")
HEALTHY = ("--hang-timeout", "60", "--on-hang", "auto")
OFF, DETAIL = ("--debug-level", "OFF"), ("--debug-level", "DETAIL")
LEVELS = {"off": OFF, "detail": DETAIL}
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
TIMED = {"TORCH_NCCL_ENABLE_TIMING": "1"}
DUMPED = {
    "TORCH_FR_DUMP_TEMP_FILE": "{folder}/trace_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"
}  # fmt: skip
"""For jobs that ``analyze`` reads: torch saves its flight recorder at the group's limit. Its older name of the size is
TORCH_NCCL_TRACE_BUFFER_SIZE."""
DRIFTS = ("bypassed", "accumulated", "unfrozen", "loaded", "rate", "one_steps", "momentum")
ALIKE = ("statistics", "stale")
"""Silent faults of ``replicas.py``: ranks that differ, and what no rank does unlike the others."""
RESULT = "{folder}/result.json"
HOLDS = ROOT / "tests" / "scenarios" / "bandwidth" / "faults"
"""A sitecustomize that holds a rank of the bench up at its second size."""
HELD_UP = {"HELD_FILE": "{folder}/held", "HELD_RANK": "1", "HELD_HOW": "sleep"}
FLOATS = "float64,float32,float16,bfloat16"
DTYPES = f"{FLOATS},int64,int32,int8,uint8"


def wrapped(
    name: str, script: str, *options: str, ranks: int = 2, env: dict[str, str] | None = None, **more: Any
) -> Job:
    """Return a job under ``wrap``."""
    return Job(
        name=name, env=env or {}, **more,
        command=(
            "-m", "ddpdoctor", "wrap", f"--nproc-per-node={ranks}", "--master-port={port}", "--report-dir",
            "{folder}/run", *options, *script_of(script),
        ),
    )  # fmt: skip


def script_of(job: str) -> tuple[str, ...]:
    """Return a script and its arguments: the file of its result, and which of its jobs it is to be."""
    script, *function = words_of(job, SCRIPTS)
    return (script, RESULT, *function)


def plain(name: str, script: str, *, ranks: int = 2, **more: Any) -> Job:
    """Return a job under torchrun alone."""
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port={port}")
    return Job(name=name, command=(*launcher, *script_of(script)), **more)


def probe(name: str, **more: Any) -> Job:
    """Return a job that is one process."""
    return Job(name=name, command=script_of(name), **more)


def verb(name: str, *words: str, **more: Any) -> Job:
    """Return a job that is a command of ours."""
    return Job(name=name, command=("-m", "ddpdoctor", *words, "--format", "json"), **more)


def two_hosts(name: str, *words: str, folder: Path = ROOT, env: dict[str, str] | None = None, **more: Any) -> Job:
    """Return a command of ours as two ranks of torchrun on one GPU. ``folder`` is where it imports from."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}")
    command = (*launcher, str(SCRIPTS / "two_hosts.py"), *words, "--format", "json")
    return Job(name=name, command=command, env={**(env or {}), "PYTHONPATH": str(folder)}, **more)


def checked(name: str, *words: str, batch: str = "make_batch") -> Job:
    """Return a check-consistency of the scenarios' healthy model."""
    models = "consistency_models"
    return two_hosts(
        name, "check-consistency", "--model", f"{models}:healthy", "--batch", f"{models}:{batch}", "--steps", "2",
        "--backend", "{backend}", *words, folder=ROOT / "tests" / "scenarios" / "jobs",
    )  # fmt: skip


def bench(*words: str) -> tuple[str, ...]:
    """Return a bench of two ranks."""
    return ("allreduce-bench", "--backend", "{backend}", *words)


STOPPED = bench("--max-size", "4KiB", "--iters", "3", "--warmup", "1", "--mode", "latency", "--hang-timeout", "10s")
ALONE = ("allreduce-bench", "--nproc-per-node", "1", "--budget", "5s", "--max-size", "1MiB", "--factor", "32")

_JOBS = (
    wrapped("flight_source", "flight_source", *HEALTHY, *OFF, ranks=1, env=TIMED),
    wrapped("sleeper_off", "sleeper", *HANG, *OFF, env={"SEEDED": "1"}),
    wrapped("sleeper_healthy", "sleeper", *HEALTHY, env={"SEEDED": "0"}),
    *(
        plain(f"watched_{name}", "sleeper", env={"SEEDED": seeded, "WATCHED": "1"})
        for name, seeded in (("sleeper", "1"), ("healthy", "0"))
    ),
    wrapped("pending_oldest", "pending_oldest", *HANG, *OFF),
    wrapped("ddp_sleeper", "ddp_sleeper", *HANG, *OFF),
    wrapped("capture_async_allreduce", "capture_async_allreduce", *HEALTHY, *OFF, ranks=1),
    wrapped("ddp_whole_capture", "ddp_whole_capture", *HEALTHY, *OFF),
    wrapped("no_sync", "no_sync", *HEALTHY, *OFF, limit_s=150),
    wrapped("slow_kernel", "slow_kernel", "--hang-timeout", "{hang_s}", "--on-hang", "auto", *OFF, limit_s=150),
    wrapped("early_exit", "early_exit", "--hang-timeout", "300", "--on-hang", "kill", *OFF),
    wrapped("watchdog", "watchdog", "--hang-timeout", "60", "--on-hang", "auto", *OFF, limit_s=150),
    *(
        wrapped(f"{fault}_{mode}", "faults", *HANG, *level, env={"FAULT": fault})
        for fault in (
            "crash", "memory", "killed", "call", "alone", "fork", "size", "model", "duplicate", "stopped", "exit",
            "missing", "abort_at_exit",
        )
        for mode, level in LEVELS.items()
    ),
    wrapped("missing_at_once", "faults", *HANG, *OFF, env={"FAULT": "missing_at_once"}),
    wrapped("aborted", "faults", *HANG, *OFF, env={"FAULT": "aborted"}),
    wrapped("trains_off", "trains", *HEALTHY, *OFF),
    wrapped("trains_detail", "trains", *HEALTHY, *DETAIL),
    wrapped("killed_remote", "faults", *HANG, *OFF, env={"FAULT": "killed", "FAKENCCL_PEER_DEATH": "1"}),
    wrapped("subgroup_sleeper", "subgroup", *HANG, *OFF, env={"SEEDED": "1"}),
    wrapped("subgroup_healthy", "subgroup", *HEALTHY, *OFF, env={"SEEDED": "0"}),
    wrapped("nonblocking_sleeper", "sleeper", *HANG, *OFF, env={"SEEDED": "1", **NONBLOCKING}),
    wrapped("nonblocking_healthy", "sleeper", *HEALTHY, *OFF, env={"SEEDED": "0", **NONBLOCKING}),
    *(
        plain(name, "late", env={"WHAT": name, **DUMPED}, limit_s=150, cuda_only=True)
        for name in ("late", "late_soon", "leaves")
    ),
    wrapped("watchdog_desync", "watchdog", *HEALTHY, *OFF, env={"TORCH_NCCL_DESYNC_DEBUG": "1"}, limit_s=150),
    wrapped("recv_without_send", "recv_without_send", *HANG, *OFF),
    wrapped("recv_without_send_detail", "recv_without_send", *HANG, *DETAIL),
    wrapped("bucket_view_nan", "gradients", *HEALTHY, *OFF, env={"SEEDED": "1", "VIEWS": "1"}),
    wrapped("bucket_view_healthy", "gradients", *HEALTHY, *OFF, env={"SEEDED": "0", "VIEWS": "1"}),
    *(
        wrapped(
            f"replicas_{name}", "replicas", *HEALTHY, *OFF, ranks=3,
            env={"SEEDED": str(int(name != "healthy")), "FAULTS": " ".join(faults)},
        )
        for name, faults in (("drift", DRIFTS), ("alike", ALIKE), ("healthy", (*DRIFTS, *ALIKE)))
    ),
    wrapped("mixed_backend_objects", "mixed_backend_objects", *HANG, *OFF, env={"SEEDED": "1"}),
    wrapped("mixed_backend_healthy", "mixed_backend_objects", *HEALTHY, *OFF, env={"SEEDED": "0"}),
    wrapped("sleeper_detail", "sleeper", *HANG, *DETAIL, env={"SEEDED": "1"}),
    wrapped("sleeper_detail_healthy", "sleeper", *HEALTHY, *DETAIL, env={"SEEDED": "0"}),
    probe("maxima_dtypes"),
    probe("fingerprints"),
    probe("kernels"),
    wrapped("compiled_allreduce", "compiled_allreduce", *HANG, *OFF, limit_s=150),
    two_hosts("bench_two", *bench("--collective", "all", "--max-size", "4MiB", "--factor", "16", "--budget", "15s")),
    two_hosts("bench_kill", *STOPPED, env=HELD_UP, folder=HOLDS, sends=signal.SIGKILL),
    two_hosts("bench_stop", *STOPPED, env=HELD_UP, folder=HOLDS, sends=signal.SIGSTOP),
    checked("check_consistency_nccl", "--reference", "--twice"),
    checked("check_consistency_scaled", "--reference", "--step", "consistency_models:scaled_by_the_world_size"),
    checked("check_consistency_twice", "--twice", batch="make_another_batch_each_time"),
    *(
        wrapped(f"dropout_{name}", "trains", *HEALTHY, *OFF, env={"DROPOUT": "0.1", "SEEDED": seeded})
        for name, seeded in (("alike", "1"), ("apart", "0"))
    ),
    verb("check_env", "check-env"),
    verb("check_env_hidden", "check-env", "cvd-valid", env={"CUDA_VISIBLE_DEVICES": ""}, cuda_only=True),
    wrapped("gradients_gloo_nan", "gradients", *HEALTHY, *OFF, env={"SEEDED": "1", "OVER": "gloo"}),
    wrapped("gradients_gloo_healthy", "gradients", *HEALTHY, *OFF, env={"SEEDED": "0", "OVER": "gloo"}),
    verb("bench_sum", *ALONE, "--collective", "all", "--dtype", DTYPES, "--op", "sum"),
    *(verb(f"bench_{op}", *ALONE, "--dtype", DTYPES, "--op", op) for op in ("prod", "min", "max")),
    verb("bench_avg", *ALONE, "--dtype", FLOATS, "--op", "avg"),
    plain("event_stream", "event_stream", ranks=1, alone=True),
    wrapped("straggler", "straggler", *HEALTHY, *OFF, env=TIMED, alone=True),
    wrapped("straggler_device", "straggler", *HEALTHY, *OFF, env={**TIMED, "SEEDED": "1"}, alone=True),
    wrapped(
        "speed_busy", "steps_measured", "--speed", *HEALTHY, *OFF, ranks=1, env={"FAKECUDA_KERNEL_US": "500"},
        alone=True,
    ),
    wrapped(
        "speed_small_kernels", "steps_measured", "--speed", *HEALTHY, *OFF, ranks=1, env={"SEEDED": "1"}, alone=True
    ),
    verb("check_env_deep", "check-env", "--deep", limit_s=120, alone=True),
    plain("overhead_plain", "overhead", alone=True),
    wrapped("overhead_off", "overhead", *HEALTHY, *OFF, alone=True),
    wrapped("overhead_speed", "overhead", "--speed", *HEALTHY, *OFF, alone=True),
    wrapped("overhead_detail", "overhead", *HEALTHY, *DETAIL, alone=True),
    verb(
        "bench_too_large", "allreduce-bench", "--nproc-per-node", "1", "--min-size", "1MiB", "--max-size", "1TiB",
        "--factor", "1048576", "--iters", "3", "--warmup", "1", alone=True,
    ),
)  # fmt: skip
JOBS = {job.name: job for job in _JOBS}

ONLY_A_DEVICE = {
    "CUDA graphs": ("capture_async_allreduce", "ddp_whole_capture"),
    "Triton's kernels": ("compiled_allreduce",),
    "arithmetic in every dtype": (
        "maxima_dtypes", "fingerprints", *(f"bench_{op}" for op in ("sum", "prod", "min", "max", "avg"))
    ),
    "a device that is faster than its host": ("speed_small_kernels",),
    "a driver and its NVML": ("check_env", "check_env_hidden", "check_env_deep"),
}  # fmt: skip
"""Jobs that no stand-in for CUDA and NCCL can run, by what they show. All others run on it too: tests/standin."""
