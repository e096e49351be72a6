"""Jobs of Lightning, Accelerate, DeepSpeed, Megatron, Ray and the like: what their launchers say is rarely the cause."""

import pytest

from tests.evidence_texts import (
    SITE,
    agent,
    closed_by,
    interleaved,
    labeled,
    old_watchdog,
    raised,
    steps,
    table,
    text,
    traceback,
    watchdog,
    work,
)
from tests.rules.evidence.truths import ABSENT, Truth, hold

ZERO = "ZeroDivisionError: division by zero"


def test_accelerates_called_process_error_is_no_fact(tmp_path):
    own = traceback(
        "subprocess.CalledProcessError: Command '['/opt/venv/bin/python', 'train.py']' returned non-zero exit status 1.",
        ("/opt/venv/bin/accelerate", 8, "<module>", "sys.exit(main())"),
        (f"{SITE}/accelerate/commands/launch.py", 1168, "launch_command", "simple_launcher(args)"),
        (
            f"{SITE}/accelerate/commands/launch.py",
            763,
            "simple_launcher",
            "raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
        ),
    )
    hold(tmp_path, text([*raised("KeyError: 'labels'", None), *own]), Truth(kinds=("crash",), says=("KeyError",)))


def test_accelerate_alone_tells_nothing(tmp_path):
    own = traceback(
        "subprocess.CalledProcessError: Command '['/opt/venv/bin/python', 'train.py']' returned non-zero exit status 1.",
        (
            f"{SITE}/accelerate/commands/launch.py",
            763,
            "simple_launcher",
            "raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
        ),
    )
    hold(tmp_path, text([*steps(3), *own]), Truth(collect=("log",)))


def deepspeed(code: int, local: int, ranks: int = 4) -> list[str]:
    head = "[2026-03-09 14:02:1{},111] [INFO] [launch.py:{}:{}] "
    command = "['/opt/venv/bin/python', '-u', 'train.py', '--local_rank={}', '--deepspeed', 'ds.json']"
    start = [
        head.format(1, 256, "main") + f"process {900 + rank} spawned with command: {command.format(rank)}"
        for rank in range(ranks)
    ]
    end = [head.format(9, 319, "sigkill_handler") + f"Killing subprocess {900 + rank}" for rank in range(ranks)]
    return [
        *start,
        *steps(4),
        *end,
        f"[2026-03-09 14:02:19,111] [ERROR] [launch.py:325:sigkill_handler] {command.format(local)} exits with return code = {code}",
    ]


def test_deepspeeds_launcher_does_not_say_which_was_killed(tmp_path):
    """It prints the command that it started last, whichever process failed."""
    hold(tmp_path, text(deepspeed(-9, 3)), Truth(kinds=("killed",), ranks=(), says=("SIGKILL",)))


def test_deepspeeds_launcher_and_the_fault_handler_of_a_rank(tmp_path):
    fatal = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f01 (most recent call first):",
             '  File "/w/train.py", line 12 in <module>', ""]  # fmt: skip
    lines = deepspeed(-11, 3)
    log = text([*lines[:6], *labeled("[rank1]: ", fatal), *lines[6:]])
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(1,), where="train.py:12"))


def test_deepspeeds_launcher_and_a_traceback(tmp_path):
    lines = deepspeed(1, 2)
    log = text([*lines[:6], *closed_by(0), *raised("RuntimeError: shard 7 is damaged", 2), *lines[6:]])
    hold(tmp_path, log, Truth(kinds=("crash",), ranks=(2,), says=("shard 7",)))


def test_deepspeed_on_two_nodes(tmp_path):
    lines = labeled("worker-1: ", deepspeed(-9, 1, 2))
    log = text([*labeled("worker-0: ", deepspeed(0, 0, 2)[:6]), *lines])
    hold(tmp_path, log, Truth(kinds=("killed",), hosts=("worker-1",), not_ranks=(0, 1)))


def test_lightning_waits_for_a_member(tmp_path):
    """Only two of four members came."""
    log = text([f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/4" for rank in (0, 2)])
    hold(tmp_path, log, Truth(kinds=ABSENT, or_cannot_tell=True, not_ranks=(0, 2), collect=("other ranks|1|3",)))


def test_lightnings_log_with_a_crash(tmp_path):
    error = raised(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.10 GiB.", 1, 30, "loss = self.model(x)"
    )
    log = text(
        [
            *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/2" for rank in (0, 1)),
            "\rEpoch 0:  50%|█████     | 50/100 [00:10<00:10,  4.9it/s]" + error[0],
            *error[1:],
        ]
    )
    hold(tmp_path, log, Truth(kinds=("crash",), ranks=(1,), says=("memory",)))


def test_rays_list_of_guesses_is_no_cause(tmp_path):
    guess = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
    log = text(
        [*labeled("(RayTrainWorker pid=19799, ip=10.72.0.6) ", steps(5)), f"ray.exceptions.ActorDiedError: {guess}"]
    )
    hold(tmp_path, log, Truth(kinds=("killed", "crash"), ranks=(), or_cannot_tell=True, confidence=("low",)))


def test_ray_with_the_real_error(tmp_path):
    own = labeled("(RayTrainWorker pid=19799, ip=10.72.0.6) ", raised("ValueError: bad batch", 2))
    log = text(
        [
            *own,
            "ray.exceptions.RayTaskError(ValueError): \x1b[36mray::_RayTrainWorker__execute.get_next()\x1b[39m (pid=19799, ip=10.72.0.6)",
            "ValueError: bad batch",
        ]
    )
    hold(tmp_path, log, Truth(kinds=("crash",), ranks=(2,), says=("bad batch",)))


def test_megatron_hides_the_out_of_memory(tmp_path):
    """Megatron-Bridge 5283: it looks like a hang of the pipeline, and the first stage had no memory."""
    logs = [watchdog(rank, work(71, "SEND" if rank == 2 else "RECV")) for rank in (1, 2, 3)]
    own = raised(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.30 GiB.", 0, 77, "output = model(tokens)"
    )
    hold(tmp_path, interleaved(own, *logs), Truth(kinds=("crash",), ranks=(0,), says=("memory",)))


def test_preprocessing_on_rank_0_longer_than_the_limit(tmp_path):
    """axolotl 921: the bar of rank 0 stands at 71 % when the others run into the limit of the first barrier."""
    bar = "".join(
        f"\rTokenizing: {share:3}%|███████   | {share}00/10000 [29:{share % 60:02}<12:10, 5.5 examples/s]"
        for share in range(60, 72)
    )
    logs = [watchdog(rank, work(1, "ALLREDUCE", 1, limit_ms=1800000)) for rank in (1, 2, 3)]
    hold(tmp_path, text([f"[rank0]: {bar}"]) + interleaved(*logs), Truth(kinds=ABSENT, ranks=(0,)))


def test_preprocessing_without_a_label(tmp_path):
    """Nothing says whose bar it is, but the three that ran into the limit are the ranks 1 to 3 of 4."""
    bar = "".join(
        f"\rTokenizing: {share:3}%|███████   | {share}00/10000 [29:{share % 60:02}<12:10, 5.5 examples/s]"
        for share in range(60, 72)
    )
    logs = [watchdog(rank, work(1, "_ALLGATHER_BASE", 8, 32, limit_ms=1800000)) for rank in (1, 2, 3)]
    hold(tmp_path, text([bar]) + interleaved(*logs), Truth(kinds=ABSENT, ranks=(0,)))


def _bar(words: str, share: int = 71) -> str:
    return f"\r{words}: {share}%|███████   | {share}00/10000 [29:14<12:10, 5.5 examples/s]"


LATE = [line for rank in (1, 2, 3) for line in old_watchdog(rank, work(2, "ALLREDUCE", 1, limit_ms=1800000))]


@pytest.mark.parametrize(
    ("said", "confidence"),
    [
        (_bar("[rank0]: Running tokenizer on dataset"), "medium"),
        (_bar("Running tokenizer on dataset"), "low"),
        (_bar("Map (num_proc=16)"), "low"),
        (_bar("Downloading shards"), "low"),
        (_bar("Generating train split"), "low"),
        (_bar("Evaluating"), "low"),
        (_bar("Running tokenizer") + _bar("Running tokenizer", 0), "low"),
        ("[rank0]: 2026-03-09 - root - INFO - Saving the model trained for 3 complete epochs and 36 batches", "medium"),
        ("[rank0]: > building indices on rank 0 ...", "medium"),
        ("[rank0]: saving checkpoint at iteration 400 to /data/out", "medium"),
        ("[rank0]: Compiling the model with inductor ...", "medium"),
        ("[rank0]: 2026-03-09 14:02:11 INFO data: Preprocessing 4031 files", "medium"),
    ],
)
def test_the_rank_that_works_alone_while_the_others_wait(tmp_path, said, confidence):
    truth = Truth(kinds=("stuck",), ranks=(0,), confidence=(confidence,), says=("(?i)ing|map|token",))
    hold(tmp_path, text([said, *LATE]), truth)


@pytest.mark.parametrize(
    "said",
    [
        _bar("[rank0]: Running tokenizer on dataset", 100),
        text([_bar("Tokenizing"), *steps(3)]),
        "[rank0]: saving checkpoint at iteration 400\n[rank0]: saved in 3.1 s",
        "[rank0]: Validation loss 0.3, accuracy 71 %",
        _bar("[rank2]: Running tokenizer on dataset"),
        text([_bar("Tokenizing"), *old_watchdog(0, work(2, "ALLREDUCE", 1, limit_ms=1800000))]),
    ],
)
def test_work_that_ended_or_that_a_waiter_did_is_no_reason(tmp_path, said):
    hold(tmp_path, text([said, *LATE]), Truth(collect=("other ranks",)))


def test_experts_without_tokens(tmp_path):
    """DeepSpeed 5066: rank 5 is behind in the group of the experts."""
    group = "PG ID 3 PG GUID 21(expert_parallel)"
    logs = [
        watchdog(rank, work(412, "_REDUCE_SCATTER_BASE", 8000, 1000), group=group) for rank in range(8) if rank != 5
    ]
    late = [
        line.replace("PG ID 0 PG GUID 0(default_pg)", group)
        for line in watchdog(5, work(409, "_ALLGATHER_BASE", 1000, 8000))
    ]
    truth = Truth(kinds=(*ABSENT, "mismatch"), ranks=(5,))
    hold(tmp_path, interleaved(*logs, late), truth)


def test_a_rank_local_modality(tmp_path):
    """MoE-LLaVA 20: another number of elements at the same number."""
    logs = [watchdog(rank, work(202558, numel=75264 if rank == 6 else 2359296)) for rank in range(8)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(6,), says=("75264",)))


def test_uneven_numbers_of_batches(tmp_path):
    """verl 1158: rank 3 has ended its epoch, and said nothing of a limit."""
    files = {f"rank{rank}.log": text([*steps(20), *watchdog(rank, work(812))]) for rank in range(3)}
    files["rank3.log"] = text([*steps(19), "`Trainer.fit` stopped: `max_epochs=1` reached."])
    hold(tmp_path, files, Truth(kinds=("early-exit", "stuck", "missing"), ranks=(3,)))


def test_horovods_stalled_tensors(tmp_path):
    """The missing rank and the tensor are named."""
    log = text([
        "[1,0]<stderr>:[2026-03-09 14:02:12.111111: W /tmp/pip-req/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of ranks is submitting tensors, which will cause deadlock. ",
        "[1,0]<stderr>:Missing ranks:",
        "[1,0]<stderr>:2: [allreduce.grad_fc1, allreduce.grad_fc2 ...]",
    ])  # fmt: skip
    hold(tmp_path, log, Truth(kinds=(*ABSENT, "mismatch"), ranks=(2,), says=("grad_fc1",)))


def test_a_table_after_a_signal(tmp_path):
    """The agent of node 0 was told to stop by its scheduler; its table lists what it stopped itself."""
    log = text(
        [
            *steps(5),
            "W0309 14:02:19.000000 4011 torch/distributed/elastic/agent/server/api.py:719] Received Signals.SIGTERM death signal, shutting down workers",
            *agent(-15, 0, 801, [801, 802]),
            *table((1, -15, 802, ""), (0, -15, 801, "")),
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(), or_cannot_tell=True))


def test_a_spawned_process(tmp_path):
    """mp.spawn tells the number of the process, which is the rank."""
    inner = "\n".join(
        [
            "",
            "",
            "-- Process 2 terminated with the following error:",
            *traceback(
                "ValueError: bad batch",
                (f"{SITE}/torch/multiprocessing/spawn.py", 90, "_wrap", "fn(i, *args)"),
                ("/workspace/run/train.py", 40, "worker", "raise ValueError('bad batch')"),
            ),
        ]
    )
    log = text(
        traceback(
            f"torch.multiprocessing.spawn.ProcessRaisedException: {inner}",
            ("/workspace/run/train.py", 99, "<module>", "mp.spawn(worker, nprocs=4)"),
        )
    )
    hold(tmp_path, log, Truth(kinds=("crash",), ranks=(2,), where="train.py:40", says=("bad batch",)))


def test_horovods_old_words(tmp_path):
    log = text(
        [
            "[2019-03-09 14:02:12.111111: W horovod/common/operations.cc:588] One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds.",
            "Stalled ops:HorovodAllreduce_grads_7 [missing ranks: 1, 3]",
        ]
    )
    hold(tmp_path, log, Truth(kinds=ABSENT, ranks=(1, 3), says=("grads_7",)))


def test_horovods_job_that_went_on(tmp_path):
    """Its twin: a rank was late, as with a checkpoint, and the steps go on."""
    stall = ["Missing ranks:", "2: [allreduce.grad_fc1, allreduce.grad_fc2 ...]"]
    log = text([*steps(10), *stall, *steps(30, 11), "Training completed. Do not forget to share your model"])
    hold(tmp_path, log, Truth(silent=True))
