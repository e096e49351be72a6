"""Jobs in which one rank failed and the others lost it: who was first, and who is only a victim."""

import json

import pytest

from tests.evidence_texts import (
    ALL_REDUCE,
    BACKWARD,
    MAIN,
    SITE,
    WRAPPER,
    agent,
    closed_by,
    gloo_timeout,
    interleaved,
    labeled,
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


def crash(rank: int, **more) -> Truth:
    return Truth(kinds=("crash",), ranks=(rank,), **more)


def test_a_table_of_victims(tmp_path):
    """torch 2.13 lists the ranks that the agent stopped, with the tracebacks that @record kept of them."""
    victim = "\n".join(
        traceback(
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61594.",
            BACKWARD,
        )
    )
    own = "\n".join(traceback("KeyError: 'labels'", ("/workspace/run/data.py", 12, "collate", "batch['labels']")))
    content = text(
        [*agent(1, 2, 802, [800, 801]), *table((0, -15, 800, victim), (1, -15, 801, victim), (2, 1, 802, own))]
    )
    hold(tmp_path, content, crash(2, where="data.py:12", says=("KeyError",)))


def test_the_root_cause_of_a_table_is_a_victim(tmp_path):
    """Two nodes: the one where nothing was wrong calls its first victim the root cause."""
    files = {
        "node0.log": text(
            [
                *closed_by(0, "10.0.0.8"),
                *closed_by(1, "10.0.0.8"),
                *agent(1, 0, 500, [501]),
                *table((0, 1, 500, ""), host="n0"),
            ]
        ),
        "node1.log": text(
            [
                *raised("ValueError: bad sample", 3),
                *closed_by(2, "10.0.0.8"),
                *agent(1, 0, 700, [701]),
                *table((3, 1, 701, ""), (2, 1, 700, ""), host="n1", local=2),
            ]
        ),
    }
    hold(tmp_path, files, crash(3, where="train.py:40", says=("ValueError",)))


def test_a_victim_is_no_root_if_the_other_nodes_log_is_lacking(tmp_path):
    """All that can be told is whom they lost."""
    log = text(
        [
            *closed_by(0, "10.0.0.8"),
            *closed_by(1, "10.0.0.8"),
            *agent(1, 0, 500, [501]),
            *table((0, 1, 500, ""), host="n0"),
        ]
    )
    truth = Truth(kinds=ABSENT, ranks=(), hosts=("10.0.0.8",), confidence=("low",), collect=("10.0.0.8", "other ranks"))
    hold(tmp_path, log, truth)


def test_one_victim_alone_accuses_nobody(tmp_path):
    hold(tmp_path, text([*steps(3), *closed_by(1, "10.0.0.8")]), Truth(collect=("10.0.0.8", "other ranks")))


def test_victims_on_one_machine_name_nobody(tmp_path):
    hold(tmp_path, interleaved(closed_by(0), closed_by(1)), Truth(collect=("other ranks",)))


def test_victims_that_name_each_other_accuse_nobody(tmp_path):
    logs = [closed_by(0, "10.0.0.2"), closed_by(1, "10.0.0.1"), closed_by(2, "10.0.0.1"), closed_by(3, "10.0.0.2")]
    hold(tmp_path, interleaved(*logs), Truth(collect=("other ranks",)))


def test_local_ranks_of_two_nodes_are_no_ranks(tmp_path):
    """Both logs have a local rank 1: it is rank 1 or rank 3."""
    files = {
        "a.log": text(labeled("[default1]:", raised(ZERO, None))),
        "b.log": text([f"[default{rank}]:{line}" for line in steps(3) for rank in (0, 1)]),
    }
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(), says=("train.py:40",)))


def test_a_kill_without_a_word(tmp_path):
    logs = [closed_by(rank) for rank in (0, 2, 3)]
    content = interleaved(*logs) + text([*agent(-9, 1, 16222, [16221, 16223]), *table((1, -9, 16222, ""))])
    hold(tmp_path, content, Truth(kinds=("killed",), ranks=(1,), says=("SIGKILL",), collect=("dmesg",)))


def test_a_bus_error_is_shared_memory_most_likely(tmp_path):
    content = text([*steps(3), *agent(-7, 1, 16222, [16221]), *table((1, -7, 16222, ""))])
    hold(tmp_path, content, Truth(kinds=("killed", "crash", "shm"), ranks=(1,), says=("SIGBUS",)))


def test_a_kill_and_the_kernels_words(tmp_path):
    files = {
        "train.log": text([*closed_by(0), *agent(-9, 1, 51232, [51231]), *table((1, -9, 51232, ""), host="n042")]),
        "dmesg.txt": "[Mon Mar  9 14:02:18 2026] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0-1,oom_memcg=/slurm/job_88,task_memcg=/slurm/job_88/step_0,task=python3,pid=51232,uid=1004\n"
        "[Mon Mar  9 14:02:18 2026] Memory cgroup out of memory: Killed process 51232 (python3) total-vm:91231231kB, anon-rss:60231231kB, file-rss:0kB\n",
    }
    hold(tmp_path, files, Truth(kinds=("killed",), ranks=(1,), says=("memory",)))


def test_status_1_without_a_word(tmp_path):
    content = text([*agent(1, 3, 804, [800, 801]), *table((3, 1, 804, ""))])
    truth = Truth(kinds=("crash",), ranks=(3,), confidence=("low",), or_cannot_tell=True, collect=("redirects|record",))
    hold(tmp_path, content, truth)


def test_bare_tracebacks_before_init(tmp_path):
    """No "[rank1]:" before init_process_group has ended: torchrun's status tells whose traceback it is."""
    content = text(
        [
            *steps(2),
            *raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-1.tar'", None),
            *agent(1, 1, 802, [801, 803]),
            *table((1, 1, 802, "")),
        ]
    )
    hold(tmp_path, content, crash(1, where="train.py:40", says=("FileNotFoundError",)))


def test_bare_tracebacks_of_all_ranks(tmp_path):
    """The same mistake everywhere is the script's."""
    logs = [raised("ModuleNotFoundError: No module named 'flash_attn'", None, 3, "import flash_attn") for _ in range(2)]
    content = interleaved(*logs) + text([*agent(1, 0, 801, [802]), *table((1, 1, 802, ""), (0, 1, 801, ""))])
    hold(tmp_path, content, Truth(kinds=("crash",), says=("flash_attn",), where="train.py:3"))


def test_the_agents_own_traceback_is_no_rank(tmp_path):
    own = traceback(
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        (f"{SITE}/torch/distributed/run.py", 892, "main", "run(args)"),
    )
    content = text([*raised(ZERO, 1), *agent(1, 1, 802, [801]), *own[:-1], *table((1, 1, 802, ""))])
    hold(tmp_path, content, crash(1, says=("ZeroDivisionError",), where="train.py:40"))


def test_told_to_stop_is_no_cause(tmp_path):
    log = text(
        [
            *steps(4),
            "W0309 14:02:19.000000 4011 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers",
            "W0309 14:02:19.000000 4011 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 801 closing signal SIGTERM",
            *traceback(
                "torch.distributed.elastic.multiprocessing.api.SignalException: Process 310 got signal: 15",
                (f"{SITE}/torch/distributed/run.py", 892, "main", "run(args)"),
            ),
        ]
    )
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(), hosts=(), or_cannot_tell=True))


def test_an_error_file_for_each_rank(tmp_path):
    def error(message: str, stamp: str, frames) -> str:
        stack = "\n".join(traceback(message, *frames)) + "\n"
        return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": stamp}}})

    lost = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.8]:4711."
    files = {
        f"run/none_ab12/attempt_0/{rank}/error.json": error(lost, "1773065000", (MAIN, BACKWARD, WRAPPER, ALL_REDUCE))
        for rank in (0, 2)
    }
    files["run/none_ab12/attempt_0/1/error.json"] = error(
        "IndexError: list index out of range",
        "1773065000",
        (MAIN, ("/workspace/run/sampler.py", 7, "__iter__", "order[at]")),
    )
    truth = Truth(kinds=("crash",), ranks=(1,), where="sampler.py:7", says=("IndexError",))
    hold(tmp_path, files, truth)


def test_an_error_file_with_a_plain_string(tmp_path):
    files = {"run/none_x/attempt_0/1/error.json": json.dumps({"message": "RuntimeError: shard 7 is damaged"})}
    hold(tmp_path, files, Truth(kinds=("crash",), says=("shard 7 is damaged",)))


def test_a_restart_that_finished_is_no_verdict(tmp_path):
    log = text(
        [
            *steps(4),
            *raised(ZERO, 1),
            "E0309 14:02:19.300000 4011 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 15786) of binary: /opt/venv/bin/python",
            "I0309 14:02:20.300000 4011 torch/distributed/elastic/agent/server/api.py:879] [default] Worker group FAILED. 3/3 attempts left; will restart worker group",
            *steps(9, 5),
            "I0309 14:09:20.300000 4011 torch/distributed/elastic/agent/server/api.py:860] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
        ]
    )
    hold(tmp_path, log, Truth(silent=True))


def test_the_last_attempt_is_judged(tmp_path):
    files = {
        "log/none_a/attempt_0/0/stderr.log": text(raised(ZERO, 0)),
        "log/none_a/attempt_0/1/stderr.log": text(closed_by(1)),
        "log/none_a/attempt_1/0/stderr.log": text(closed_by(0)),
        "log/none_a/attempt_1/1/stderr.log": text(raised("OSError: [Errno 5] Input/output error", 1)),
    }
    hold(tmp_path, files, crash(1, says=("Input/output",)))


def test_cuda_out_of_memory_on_one_rank(tmp_path):
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.02 GiB is free."
    logs = [closed_by(0), closed_by(1), raised(error, 3, 52, "logits = model(batch)"), closed_by(2)]
    hold(tmp_path, interleaved(*logs), crash(3, where="train.py:52", says=("memory",)))


def test_a_loader_worker_that_was_killed(tmp_path):
    error = "RuntimeError: DataLoader worker (pid 411) is killed by signal: Killed. "
    logs = [gloo_timeout(0), raised(error, 1, 44, "for batch in loader:"), gloo_timeout(2)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("crash", "killed"), ranks=(1,), says=("Killed", "worker")))


def test_gloo_names_the_host_that_is_no_victim(tmp_path):
    """The first wave names h3 at 10.0.0.13; the second names ranks of the first wave. The log of h3 is lacking."""
    files = {f"h{rank}.log": text([*steps(2), *closed_by(rank, "10.0.0.13")]) for rank in (0, 1)}
    files["h2.log"] = text([*steps(2), *closed_by(2, "10.0.0.10")])
    truth = Truth(kinds=ABSENT, ranks=(), hosts=("10.0.0.13",), confidence=("low",), collect=("10.0.0.13",))
    hold(tmp_path, files, truth)


def test_monitored_barrier_names_the_late_ones(tmp_path):
    log = interleaved(
        raised("RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 5000 ms", 0),
        raised(
            "RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2951",
            3,
        ),
    )
    hold(tmp_path, log, Truth(kinds=ABSENT, ranks=(1, 2)))


def test_a_store_key_names_the_rank(tmp_path):
    error = "torch.distributed.DistStoreError: wait timeout after 8000ms, keys: /default_pg/0//cpu//0/2"
    logs = [raised(error, None, 9, "dist.init_process_group('gloo')") for _ in range(3)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(2,)))


def test_the_unique_id_is_rank_0s(tmp_path):
    error = "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
    logs = [raised(error.replace("[3]", f"[{rank}]"), rank) for rank in (1, 2, 3)]
    hold(tmp_path, interleaved(*logs), Truth(kinds=ABSENT, ranks=(0,)))


def test_params_of_a_victim(tmp_path):
    """0 parameters on rank 0: it had failed before."""
    victim = "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 212 params, while rank 0 has inconsistent 0 params."
    logs = [
        raised("ValueError: unknown optimizer 'adamx'", 0),
        raised(victim, 1),
        raised(victim.replace("Rank 1", "Rank 2"), 2),
    ]
    hold(tmp_path, interleaved(*logs), crash(0, says=("adamx",)))


def test_clients_that_did_not_join(tmp_path):
    error = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined."
    truth = Truth(kinds=ABSENT, or_cannot_tell=True, not_ranks=(0,), collect=("other",))
    hold(tmp_path, text(raised(error, None, 9, "dist.init_process_group('gloo')")), truth)


def test_a_server_that_nobody_reaches(tmp_path):
    error = "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (n000, 29500)."
    files = {f"n00{node}.log": text(raised(error, None, 9, "dist.init_process_group('nccl')")) for node in (1, 2)}
    truth = Truth(kinds=("transport", "missing", "unreachable"), says=("n000",), or_cannot_tell=True, collect=("n000",))
    hold(tmp_path, files, truth)


def test_more_workers_than_the_world(tmp_path):
    """yolov5 4574: a second job on the port."""
    line = "[INFO] Waiting in store based barrier to initialize process group for rank: {}, key: store_based_barrier_key:1 (world_size=4, worker_count=8, timeout=0:30:00)"
    log = text([line.format(rank) for rank in range(4)])
    truth = Truth(kinds=("port-free", "transport", "crash"), ranks=(), says=("8", "4"))
    hold(tmp_path, log, truth)


def test_fewer_workers_than_the_world(tmp_path):
    """Lightning 4420: rank 5 never came."""
    line = "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: {}, key: store_based_barrier_key:1 (world_size=8, worker_count=7, timeout=0:30:00)"
    log = text([line.format(rank) for rank in (0, 1, 2, 3, 4, 6, 7)])
    truth = Truth(kinds=ABSENT, ranks=(5,), or_cannot_tell=True, not_ranks=(0, 1, 2, 3, 4, 6, 7))
    hold(tmp_path, log, truth)


@pytest.mark.parametrize(
    "labels",
    [
        "[rank{}]:",
        "{}: ",
        "0{}: ",
        "[default{}]:",
        "[default{0}]:[rank{0}]: ",
        "[1,{}]<stderr>:",
        "2026-03-09T22:22:51.874Z | [rank{}]: ",
        "[2026-03-09 03:38:02] {}: ",
        "[pod/job-worker-{0}/pytorch] [rank{0}]: ",
        "worker-1: [rank{}]: ",
        "(RayTrainWorker pid=1979{0}, ip=10.72.0.6) [rank{0}]: ",
        "(VllmWorker rank={} pid=85) ",
        "\x1b[36m(RayTrainWorker pid=1979{0}, ip=10.72.0.6)\x1b[0m [rank{0}]: ",
        "[80746] 18:11:06.680 [rank{}]: ",
        "2026-03-09 14:02:11,104 | n01 | [rank{}]: ",
    ],
)
def test_prefixes_in_any_nesting(tmp_path, labels):
    victim = traceback(
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61594.",
        MAIN,
        BACKWARD,
        WRAPPER,
        ALL_REDUCE,
    )
    own = traceback(ZERO, MAIN, ("/workspace/run/train.py", 40, "main", "scale = 1 / n_valid"))
    logs = [labeled(labels.format(rank), own if rank == 1 else victim) for rank in range(3)]
    hold(tmp_path, interleaved(*logs), crash(1, where="train.py:40", says=("ZeroDivisionError",)))


def test_a_dropped_line_of_ray_stands_for_other_workers(tmp_path):
    victim = "(RayTrainWorker pid=1979{}, ip=10.72.0.6) [rank{}]:[E309 14:12:11.019022791 ProcessGroupNCCL.cpp:632] [Rank {}] {}"
    from tests.evidence_texts import caught

    lines = [
        victim.format(1, 1, 1, caught(work(71))) + " [repeated 2x across cluster]",
        *labeled("(RayTrainWorker pid=19790, ip=10.72.0.6) ", raised(ZERO, 0)),
    ]
    hold(tmp_path, text(lines), crash(0, says=("ZeroDivisionError",)))


def test_the_victims_came_first_in_the_file(tmp_path):
    files = {
        "a_rank2.log": text(watchdog(2, work(71))),
        "b_rank0.log": text(watchdog(0, work(71))),
        "c_rank1.log": text(raised(ZERO, 1)),
    }
    hold(tmp_path, files, crash(1, says=("ZeroDivisionError",)))


def test_a_second_run_that_only_its_steps_show(tmp_path):
    """The steps fall to the checkpoint: what failed before is over."""
    first = [
        *steps(60),
        *raised("OSError: [Errno 5] Input/output error", 0),
        *agent(1, 0, 801, [802]),
        *table((0, 1, 801, "")),
    ]
    second = [*steps(9, 20), *closed_by(0), *raised(ZERO, 1), *agent(1, 1, 902, [901]), *table((1, 1, 902, ""))]
    hold(tmp_path, text([*first, *second]), crash(1, says=("ZeroDivisionError",)))


def test_what_a_dying_rank_had_still_to_print(tmp_path):
    """Into a pipe Python prints in blocks: the steps come out after the error that ended the process."""
    log = text([*raised("KeyError: 'labels'", None), *steps(30), "srun: error: n1: task 0: Exited with exit code 1"])
    hold(tmp_path, log, Truth(kinds=("crash",), says=("KeyError",)))


def test_a_segmentation_fault_with_its_stack(tmp_path):
    fatal = [
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x00007f12 (most recent call first):",
        '  File "/usr/lib/python3.12/threading.py", line 355 in wait',
        "",
        "Current thread 0x00007f11 (most recent call first):",
        '  File "/opt/venv/lib/python3.12/site-packages/flash_attn/ops.py", line 88 in run',
        '  File "/workspace/run/model.py", line 40 in forward',
        '  File "/workspace/run/train.py", line 99 in <module>',
        "",
        "Extension modules: numpy, torch._C (total: 2)",
    ]
    log = interleaved(closed_by(0), fatal) + text([*agent(-11, 1, 802, [801]), *table((1, -11, 802, ""))])
    hold(tmp_path, log, Truth(kinds=("killed", "crash"), ranks=(1,), where="model.py:40", says=("SIGSEGV",)))


def test_an_abort_is_how_a_victim_ends(tmp_path):
    """faulthandler tells of the watchdog's abort too."""
    fatal = [
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x00007f11 (most recent call first):",
        "  <no Python frame>",
    ]
    logs = [[*watchdog(0, work(71)), *fatal], raised(ZERO, 1)]
    hold(tmp_path, interleaved(*logs), crash(1, says=("ZeroDivisionError",)))


def test_a_rendezvous_that_nobody_else_joined(tmp_path):
    own = (f"{SITE}/torch/distributed/run.py", 892, "main", "run(args)")
    log = text(traceback("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", own))
    hold(tmp_path, log, Truth(collect=("RendezvousTimeoutError",)))


def test_ctrl_c_is_no_cause(tmp_path):
    log = text([*steps(9), *traceback("KeyboardInterrupt", MAIN)])
    hold(tmp_path, log, Truth(kinds=("killed",), ranks=(), or_cannot_tell=True, collect=("told to stop",)))


SECRETS = (
    "hunter2",
    "hf_AbCdEfGhIjKlMnOpQrSt",
    "s3cr3tpw",
    "0123456789abcdef0123456789abcdef01234567",
    "AKIAIOSFODNN7EXAMPLE",
)


def test_secrets_come_out_nowhere(tmp_path):
    error = f"OSError: cannot open https://alice:{SECRETS[2]}@data.example.com/x with --password {SECRETS[0]}, HF_TOKEN={SECRETS[1]}"
    command = f"['/opt/venv/bin/python', '-u', 'train.py', '--local_rank=1', '--wandb_key', '{SECRETS[3]}']"
    log = text(
        [
            f"WANDB_API_KEY={SECRETS[3]} torchrun train.py",
            f"[2026-03-09 14:02:11,111] [INFO] [launch.py:256:main] process 901 spawned with command: {command}",
            f"step 3 loss 2.1 key {SECRETS[4]}",
            *raised(error, 1),
            f"[2026-03-09 14:02:19,111] [ERROR] [launch.py:325:sigkill_handler] {command} exits with return code = 1",
        ]
    )
    hold(tmp_path, log, crash(1, says=("OSError",), never_says=SECRETS))


def test_the_rank_whose_log_just_ends(tmp_path):
    """The others lost a rank; only rank 2 complains of nothing."""
    files = {f"rank_{rank}.log": text([*steps(9), *closed_by(rank)]) for rank in (0, 1, 3)}
    files["rank_2.log"] = text(steps(9))
    hold(tmp_path, files, Truth(kinds=ABSENT, ranks=(2,), confidence=("low",)))
