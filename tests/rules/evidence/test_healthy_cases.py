"""Jobs with which nothing is wrong, and words in their logs that sound as if something were."""

import gzip
import json
from pathlib import Path

import pytest

from tests.evidence_texts import (
    closed_by,
    interleaved,
    nccl,
    nccl_start,
    nccl_warn,
    pyspy,
    raised,
    steps,
    text,
    traceback,
)
from tests.rules.evidence.truths import Truth, hold

DATA = Path(__file__).parents[2] / "data"
SILENT = Truth(silent=True)
RUNS_ON = Truth(silent=True, ended=False)
END = "`Trainer.fit` stopped: `max_steps=20` reached."

HARMLESS = [
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed. ",
    "[rank1]:[W309 14:02:51.000000257 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 1]  using GPU 1 as device used by this process is currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect. You can pecify device_id in init_process_group() to force use of a particular device.",
    "[rank0]:[W309 14:02:51.000000257 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources. For more info, please see https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())",
    "/opt/venv/lib/python3.12/site-packages/torch/autograd/graph.py:825: UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not created according to the gradient layout contract, or that the param's strides changed since DDP was constructed.  This is not an error, but may impair performance.",
    "[rank0]:[W309 14:02:51.000000257 reducer.cpp:1400] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass. This flag results in an extra traversal of the autograd graph every iteration,  which can adversely affect performance. (function operator())",
    "h1:20100:20100 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
    "h1:20100:20100 [0] NCCL INFO NET/IB : No device found.",
    "h1:20100:20100 [0] graph/xml.cc:85 NCCL WARN Could not find real path of /sys/class/pci_bus/0000:4e/../../0000:4e:00.0",
    "h1:20100:20100 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0",
    "[rank2]:[W309 14:02:51.000000257 ProcessGroupNCCL.cpp:5023] Guessing device ID based on global rank. This can cause a hang if rank to GPU mapping is heterogeneous. You can specify device_id in init_process_group()",
    "[rank0]:[I309 14:02:51.000000257 reducer.cpp:1290] Reducer buckets have been rebuilt in this iteration.",
    "[W309 14:02:51.000000257 socket.cpp:697] [c10d] The IPv6 network addresses of (n001, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 12 leaked semaphore objects to clean up at shutdown",
    "2026-03-09 14:02:12,000 WARNING wandb: Network error (ConnectionError), entering retry loop.",
    "wandb: WARNING Failed to upload file, retrying: HTTPSConnectionPool(host='api.wandb.ai', port=443): Read timed out. (read timeout=20)",
    "2026-03-09 14:02:12,000 INFO data: error rate of the tokenizer 0.002, timeout of the loader 120 s",
    "2026-03-09 14:02:12,000 INFO eval: sample 12: 'He was Killed in action.' -> 'Killed'",
    "2026-03-09 14:02:12,000 INFO eval: prompt: Traceback of the packet shows a connection closed by the remote side",
    "2026-03-09 14:02:12,000 WARNING s3: Connection reset by peer, retry 1 of 5",
    "2026-03-09 14:02:12,000 INFO model: drop_path=0.1 error_correction=True oom_kill_threshold=0.9 watchdog_timeout=600",
    "WARNING:root:OOM while compiling the kernel with 5 stages, trying 4 stages",
    "W0309 14:02:12.000000 4011 torch/_dynamo/convert_frame.py:1016] [0/8] torch._dynamo hit config.recompile_limit (8)",
    "[2026-03-09 14:02:12,111] [WARNING] [stage3.py:2150:step] 1 pytorch allocator cache flushes since last step. this happens when there is high memory pressure and is detrimental to performance.",
    "Invalidate trace cache @ step 1: expected module 15, but got module 313",
    "h1:20100:21100 [0] NCCL INFO [Service thread] Connection closed by localRank 0",
    "h1:20100:21100 [0] NCCL INFO comm 0x55d10000a0 rank 0 nranks 2 cudaDev 0 busId 1a000 - Destroy COMPLETE",
    "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f11>",
    "loss scaler: overflow detected, skipping step, reducing loss scale to 32768.0",
    "INFO 03-09 14:02:12 No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).",
    "srun: job 912 queued and waiting for resources",
    "srun: job 912 has been allocated resources",
    "[Mon Mar  9 14:02:18 2026] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
    "pip: ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
    "2026-03-09 14:02:12.104: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been registered",
    "Killed",
    "srun: error: n001: task 0: Exited with exit code 0",
    "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)",
    "2026-03-09 14:02:12 WARNING ckpt: RuntimeError: CUDA error: out of memory, retrying with smaller batch",
    "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded",
    "slurmstepd: error: couldn't chdir to `/x': No such file or directory: going to /tmp instead",
    "[rank0]: /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:4631: UserWarning: No device id is provided via `init_process_group` or `barrier `. Using the current device set by the user.",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line(tmp_path, line):
    hold(tmp_path, text([*steps(10), line, *steps(10, 11), END]), SILENT)


@pytest.mark.parametrize("line", (DATA / "harmless_lines.txt").read_text(encoding="utf-8").splitlines())
def test_a_line_that_sounds_like_an_error_accuses_nobody_even_at_the_end(tmp_path, line):
    hold(tmp_path, text([*steps(5), line]), RUNS_ON)


def test_all_harmless_lines_together(tmp_path):
    hold(tmp_path, text([HARMLESS[0], *steps(10), *HARMLESS[1:], *steps(10, 11), END]), SILENT)


def test_a_retry_that_logs_its_traceback(tmp_path):
    """A handled exception is no failure: the steps go on."""
    error = traceback(
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        (
            "/opt/venv/lib/python3.12/site-packages/urllib3/connectionpool.py",
            715,
            "urlopen",
            "httplib_response = self._make_request(",
        ),
    )
    log = text([*steps(10), "2026-03-09 14:02:12 WARNING data: fetch failed, retry 1 of 5", *error, *steps(30, 11)])
    hold(tmp_path, log, RUNS_ON)


def test_a_validation_that_caught_an_error(tmp_path):
    log = text(
        [
            *steps(10),
            "2026-03-09 14:02:12 ERROR eval: one sample failed",
            *traceback(
                "ValueError: empty text", ("/workspace/run/eval.py", 7, "score", "raise ValueError('empty text')")
            ),
            *steps(30, 11),
            "2026-03-09 14:42:12 INFO train: done, saved the model",
            "`Trainer.fit` stopped: `max_epochs=3` reached.",
        ]
    )
    hold(tmp_path, log, SILENT)


def test_a_good_end_of_all_ranks_that_closes_connections(tmp_path):
    """While processes end one after the other, NCCL's proxies and the store see connections close."""
    log = [
        *nccl_start("h1", "10.0.0.1", 100, rank=0, ranks=2),
        *nccl_start("h2", "10.0.0.2", 200, rank=1, ranks=2),
        *steps(20),
        "`Trainer.fit` stopped: `max_epochs=3` reached.",
        "[rank1]:[W309 14:02:51.000000257 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=13, addr=[h2]:44380, remote=[h1]:45672): Connection reset by peer",
        '[rank1]:[W309 14:02:51.000000257 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0(default_pg) Rank 1] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection reset by peer',
        nccl("h1", 100, "[Service thread] Connection closed by localRank 0"),
        nccl("h1", 100, "comm 0x55d10000a0 rank 0 nranks 2 cudaDev 0 busId 1a000 - Destroy COMPLETE"),
        *nccl_warn("h1", 100, "Cuda failure 'driver shutting down'", place="enqueue.cc:1"),
    ]
    hold(tmp_path, text(log), SILENT)


def test_gloo_aborts_at_exit_after_the_script_has_ended(tmp_path):
    log = text(
        [
            *steps(20),
            "Training completed. Do not forget to share your model on huggingface.co/models =)",
            "terminate called without an active exception",
        ]
    )
    hold(tmp_path, log, SILENT)


def test_columns_of_megatron(tmp_path):
    line = " [2026-03-09 14:{:02}:02] iteration {:8}/     500 | consumed samples: {:12} | elapsed time per iteration (ms): 1211.1 | learning rate: 1.5E-04 | global batch size:   256 | lm loss: 4.1E+00 | loss scale: 1.0 | grad norm: 1.2 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    log = text([line.format(number % 60, number, number * 256) for number in range(40, 60)])
    hold(tmp_path, log, RUNS_ON)


def test_columns_of_megatron_with_a_label(tmp_path):
    """Only the last rank prints them."""
    line = "[default7]: iteration {:8}/     500 | consumed samples: {:12} | lm loss: 4.1E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    hold(tmp_path, text([line.format(number, number * 256) for number in range(40, 60)]), RUNS_ON)


def test_lightning_that_ended(tmp_path):
    log = text([
        "GPU available: True (cuda), used: True",
        *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/2" for rank in range(2)),
        "----------------------------------------------------------------------------------------------------",
        "distributed_backend=nccl",
        "All distributed processes registered. Starting with 2 processes",
        "\rEpoch 0:  50%|█████     | 50/100 [00:10<00:10,  4.9it/s, v_num=3]\rEpoch 0: 100%|██████████| 100/100 [00:20<00:00,  4.9it/s, v_num=3]",
        "`Trainer.fit` stopped: `max_epochs=1` reached.",
    ])  # fmt: skip
    hold(tmp_path, log, SILENT)


def test_a_limit_after_the_end_of_training_is_the_scripts_end(tmp_path):
    """autocast 381: rank 1 waits at the end for rank 0, which has stopped: the training was done. At most a low word."""
    from tests.evidence_texts import watchdog, work

    log = text([*steps(20), "`Trainer.fit` stopped: `max_epochs=3` reached.", *watchdog(1, work(900))])
    hold(
        tmp_path, log, Truth(kinds=("early-exit", "stuck", "transport", "missing"), or_cannot_tell=True, not_ranks=(1,))
    )


def test_json_lines_of_a_trainer(tmp_path):
    log = text(
        [json.dumps({"message": f"step {number} done", "level": "info", "seconds": 0.5}) for number in range(50)]
    )
    hold(tmp_path, log, RUNS_ON)


def test_a_packed_log(tmp_path):
    hold(tmp_path, {"job.log.gz": gzip.compress(text([*HARMLESS[:5], *steps(50)]).encode())}, SILENT)


def test_a_checkpoint_and_a_core_beside(tmp_path):
    files = {
        "job.log": text([*steps(50), END]),
        "model.pt": b"PK\x03\x04" + bytes(5000) + b"Traceback (most recent call last):",
        "core.811": b"\x7fELF" + bytes(3000),
    }
    hold(tmp_path, files, SILENT)


def test_stacks_of_a_job_that_moves(tmp_path):
    """Two looks at each rank, at other lines."""
    files = {}
    for rank in range(2):
        for look, line in enumerate((40, 61)):
            files[f"look{look}/rank{rank}.txt"] = pyspy(
                520 + rank, f"forward (model.py:{line + rank})", "main (train.py:99)"
            )
    hold(tmp_path, files, SILENT)


def test_a_restart_that_went_on(tmp_path):
    """A failure that the launcher has overcome, and progress after it."""
    log = text([
        *steps(5),
        *raised("OSError: [Errno 5] Input/output error", 1),
        "W0309 14:02:19.000000 4011 torch/distributed/elastic/agent/server/api.py:879] [default] Worker group FAILED. 2/3 attempts left;  will restart worker group",
        *steps(30, 4),
        END,
    ])  # fmt: skip
    hold(tmp_path, log, SILENT)


def test_a_requeue_in_one_file(tmp_path):
    log = text([
        "NCCL version 2.27.3+cuda12.9", *steps(5),
        "slurmstepd: error: *** JOB 912 ON g001 CANCELLED AT 2026-03-09T14:12:11 DUE TO PREEMPTION ***",
        "NCCL version 2.27.3+cuda12.9", *steps(30, 4),
        "`Trainer.fit` stopped: `max_steps=33` reached.",
    ])  # fmt: skip
    hold(tmp_path, log, SILENT)


def test_an_old_error_of_another_attempt(tmp_path):
    files = {
        "log/none_a/attempt_0/0/stderr.log": text(raised("OSError: [Errno 5] Input/output error", 0)),
        "log/none_a/attempt_1/0/stdout.log": text(
            [*steps(30), "Training completed. Do not forget to share your model"]
        ),
        "log/none_a/attempt_1/1/stdout.log": text(steps(30)),
    }
    hold(tmp_path, files, SILENT)


def test_ranks_with_labels_that_interleave(tmp_path):
    hold(tmp_path, interleaved(*([f"[rank{rank}]: {line}" for line in steps(20)] for rank in range(4))), RUNS_ON)


def test_a_log_that_just_ends(tmp_path):
    """It moved until its end; whether it hangs since cannot be told from it."""
    hold(tmp_path, text(steps(30)), Truth(collect=("attach", "the log ends")))


def test_a_rank_that_failed_and_ended_in_order(tmp_path):
    """No twin: the warning at the exit of a process is no sign that its error was caught."""
    leak = "[rank{0}]:[W309 14:02:51.000000257 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources."
    logs = [[*closed_by(0), leak.format(0)], [*raised("KeyError: 'labels'", 1), leak.format(1)]]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("crash",), ranks=(1,), says=("KeyError",)))


def test_a_rank_that_failed_while_another_logs_one_step_more(tmp_path):
    """No twin: rank 0 was one step ahead in printing, and then waits."""
    log = text([*steps(20), *raised("KeyError: 'labels'", None), *steps(1, 21)])
    hold(tmp_path, log, Truth(kinds=("crash",), says=("KeyError",)))
