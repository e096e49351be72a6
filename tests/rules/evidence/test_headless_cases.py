"""Errors without what stood around them in the log: no traceback, no head of a table, one line of many."""

from pathlib import Path

import pytest

from tests.evidence_texts import agent, closed_by, labeled, steps, table, text, watchdog, work
from tests.rules.evidence.truths import Truth, analyzed, hold

DATA = Path(__file__).parents[2] / "data"

PASTED = [line.split("\t") for line in (DATA / "known_errors.tsv").read_text(encoding="utf-8").splitlines()[1:]]
LOW = ("low",)
WEAK = ("low", "medium")
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 3 has a total capacity of 23.69 GiB"
)
NO_LIBUV = "torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it."


def crash(*ranks: int, **more) -> Truth:
    return Truth(kinds=("crash",), ranks=ranks, **more)


def monitored(late: int) -> list[str]:
    return [f"RuntimeError: [Rank 0]: Ranks {late} failed to pass monitoredBarrier in 60000 ms"]


CASES = {
    "a known error alone": ([NO_LIBUV], crash(says=("libuv",), mentions=("USE_LIBUV=0",), confidence=LOW)),
    "an unknown error alone": (
        ["mypkg.errors.ShardError: shard 7 is damaged"], crash(says=("shard 7 is damaged", "unknown"), confidence=LOW)),
    "an exception without a message": (["AssertionError"], crash(confidence=LOW)),
    "the source lines above it": (
        ["    raise RuntimeError('CUDA out of memory')", "    ^^^^^^^^^", OOM], crash(says=("out of memory",))),
    "a rank in the prefix": (labeled("[rank3]: ", [OOM]), crash(3, says=("out of memory",))),
    "a rank in the text": (
        ["AssertionError: Rank 6: found NaN in local grad norm in backwards pass. Device: 6, node: n-14"],
        crash(6, says=("NaN",), confidence=LOW)),
    "a number within a group": (
        ["RuntimeError: found NaN in local grad norm for bucket #2 in backward pass before data-parallel communication "
         "collective. Device: 3, node: n-14"], crash(mentions=("another GPU",), confidence=LOW)),
    "a line that is known explains the one above it": (
        ["FileNotFoundError: [Errno 2] No such file or directory: '/torch_771_4_0'",
         "RuntimeError: unable to open shared memory object </torch_771_4_0> in read-write mode: No such file or directory (2)"],
        crash(says=("unable to open shared memory", "/torch_771_4_0'"), mentions=("ulimit -n",), confidence=LOW)),
    "a local rank of an unknown number of hosts": (
        agent(-9, 5, 903), Truth(kinds=("killed",), ranks=(5,), says=("taken from the local rank",), confidence=WEAK)),
    "a process of an unknown number of hosts": (
        ["torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"],
        Truth(kinds=("killed",), ranks=(1,), says=("taken from the local rank",), confidence=WEAK)),
    "a task of an unknown number of ranks": (
        ["srun: error: n02: task 9: Out Of Memory"],
        Truth(kinds=("killed",), ranks=(9,), says=("taken from Slurm's task",), confidence=WEAK)),
    "a local rank beside ranks of one host": (
        [*labeled("[rank3]: ", steps(4)), *agent(-9, 5, 903)],
        Truth(kinds=("killed",), ranks=(5,), confidence=("high",))),
    "a NaN is no progress": (
        [*steps(5), "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 5 at iteration #17 invocation #1",
         "ERROR:megatron.core.rerun_state_machine:Rank 5, node n1, device 5, iteration #17: First rerun: reproducible"],
        crash(5, says=("nan",))),
    "two ranks of a pair": (
        ["ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", "Last error:",
         "Duplicate GPU detected : rank 6 and rank 2 both on CUDA device 4b000"],
        Truth(kinds=("dup-gpu",), ranks=(2, 6), says=("one GPU",))),
    "NCCL's last error alone": (
        ["Last error:", "socketStartConnect: Connect to 10.0.0.7<41022> failed : No route to host"],
        Truth(kinds=("transport",), says=("10.0.0.7",))),
    "a mark that is no exception": (
        [*steps(5), *["HW Exception by GPU node-4 (Agent handle: 0x50d1) reason :GPU Hang"] * 3],
        crash(hosts=(), says=("GPU Hang",), confidence=LOW)),
    "oneCCL": (
        ["2026:05:25-09:14:11:(771) |CCL_ERROR| base_thread.cpp:36 start: error while creating worker thread #0 "
         "pthread_create returns 22"], crash(mentions=("CCL_WORKER_AFFINITY",))),
    "Ascend's leftover": (
        ["EJ0001: 2026-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training "
         "process is running."], crash(says=("HCCP",), mentions=("npu-smi",))),
    "Gloo's mesh is the network": (
        ["[rank1]:[E408 09:15:08.000000583 ProcessGroupGloo.cpp:145] Gloo connectFullMesh failed with "
         "[/gloo/transport/tcp/pair.cc:144] no error"], Truth(kinds=("transport",), mentions=("GLOO_SOCKET_IFNAME",))),
    "argparse before torchrun's line": (
        ["usage: fuse.py [-h] [--local_rank LOCAL_RANK]", "fuse.py: error: unrecognized arguments: --local-rank=1",
         "fuse.py: error: unrecognized arguments: --local-rank=0",
         "failed (exitcode: 2) local_rank: 0 (pid: 7210) of binary: /opt/py/bin/python"],
        Truth(kinds=("crash",), says=("local-rank",), mentions=("torchrun",), confidence=WEAK)),
    "one error and a silent end": (
        [OOM, *table((2, 1, 902, ""))], crash(2, says=("out of memory",), confidence=("medium",))),
    "a certain error beats one that stands alone": (
        [OOM, *labeled("[rank1]: ", ["Traceback (most recent call last):", '  File "/w/train.py", line 7, in <module>',
                                     "    main()", "KeyError: 'labels'"])], crash(1, where="train.py:7")),
    "the vague after the exact": (
        ["torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:133, unhandled system error",
         "OSError: [Errno 28] No space left on device: '/out/a.pt'"], crash(says=("No space left",))),
    "a network fault beats the vague": (
        ["n1:7:9 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.7<41022> failed : No route to host",
         "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:133, unhandled system error"],
        Truth(kinds=("transport",))),
    "a table without its head": (
        ["  time      : 2026-05-25_09:14:17", "  host      : n1", "  rank      : 3 (local_rank: 3)",
         "  exitcode  : -9 (pid: 802)", "  error_file: <N/A>", "  traceback : Signal 9 (SIGKILL) received by PID 802"],
        Truth(kinds=("killed",), ranks=(3,), says=("SIGKILL",))),
    "Lightning names the child": (
        ["[rank: 3] Child process with PID 77 terminated with code -9. Forcefully terminating all other processes to "
         "avoid zombies 🧟"], Truth(kinds=("killed",), ranks=(3,))),
    "mpirun names the rank": (
        ["mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 11 (Segmentation fault)."],
        Truth(kinds=("killed",), ranks=(3,), hosts=("n2",))),
    "Intel's mpirun names the rank": (
        ["=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   RANK 2 PID 4711 RUNNING AT n7",
         "=   KILLED BY SIGNAL: 9 (Killed)"], Truth(kinds=("killed",), ranks=(2,), hosts=("n7",))),
    "Open MPI's first process": (
        ["mpirun detected that one or more processes exited with non-zero status, thus causing", "",
         "  Process name: [[30425,1],2]", "  Exit code:    3"], crash(2, says=("status 3",))),
    "a closed terminal": (
        ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 93 got signal: 1"],
        Truth(kinds=("killed",), ranks=(), says=("SIGHUP",), mentions=("tmux",))),
    "AMD's kernel driver": (
        ["[Mon Mar  9 14:02:18 2026] amdgpu 0000:43:00.0: amdgpu: GPU reset begin!"],
        Truth(kinds=("xid",), says=("43:00",))),
    "a GPU that is gone, over three lines": (
        ["[ 2210.101000] NVRM: The NVIDIA GPU 0000:4b:00.0", "               NVRM: (PCI ID: 10de:2330) installed in this system has",
         "               NVRM: fallen off the bus and is not responding to commands."], Truth(kinds=("xid",), says=("4b:00", "fallen off"))),
    "wrong results of nccl-tests": (
        ["# Collective test starting: all_reduce_perf", "# Out of bounds values : 2 FAILED", "# Avg bus bandwidth    : 9.6"],
        Truth(kinds=("wrong-data",))),
    "a notebook's traceback of mp.spawn": (
        ["ProcessExitedException                    Traceback (most recent call last)", "<ipython-input-9-dbc8> in <module>()",
         "---> 91     xmp.spawn(_mp_fn, nprocs=8)", "ProcessExitedException: process 3 terminated with signal SIGKILL"],
        Truth(kinds=("killed",), ranks=(3,))),
    "accelerate's one process": (
        ["subprocess.CalledProcessError: Command '['/opt/conda/bin/python', 'train.py']' died with <Signals.SIGKILL: 9>."],
        Truth(kinds=("killed",), ranks=(), says=("SIGKILL",))),
    "a word after a progress bar": (
        ["Loading checkpoint shards:  57%|#####     | 4/7 [00:41<00:30, 10.01s/it]Killed"],
        Truth(kinds=("killed",), ranks=(), says=("SIGKILL",))),
    "the frames of a paste that begins late": (
        labeled("[rank4]: ", ['  File "/w/model.py", line 31, in forward', "    return self.head(x)", OOM,
                              "Including non-PyTorch memory, this process has 23.27 GiB memory in use."]),
        crash(4, where="model.py:31")),
    "the C library's words before the signal": (
        ["double free or corruption (!prev)", "Aborted (core dumped)"], crash(says=("double free",), confidence=WEAK)),
    "an error of nobody, and the one rank that the others wait for": (
        [OOM, *labeled("[rank0]: ", monitored(1)), *labeled("[rank2]: ", ["RuntimeError: Rank 2 successfully reached "
         "monitoredBarrier, but received errors while waiting for send/recv from rank 0."])],
        crash(1, says=("out of memory", "rank 1"), confidence=LOW)),
    "an error of nobody after a time limit follows from it": (
        [*watchdog(0, work(7)), *watchdog(1, work(7)), OOM],
        Truth(kinds=("transport", "stuck", "missing"), or_cannot_tell=True)),
    "XLA's words of one device": (
        ["Exception in device=TPU:5: Resource exhausted: Attempting to reserve 1.14G at the bottom of memory."],
        crash(5, says=("Resource exhausted",), confidence=LOW)),
    "a loss that stays NaN": (
        [f"2026-03-09 14:00:0{n} INFO train: step {n} loss {'nan' if n > 2 else 4.1} lr 3.0e-04" for n in range(1, 9)],
        Truth(kinds=("nonfinite-grad",), ranks=(), says=("NaN", "step 3"))),
    "a crash outranks the NaN before it": (
        [*(f"step {n} loss nan" for n in range(1, 9)), *labeled("[rank1]: ", [OOM])], crash(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_an_answer(tmp_path, name):
    lines, truth = CASES[name]
    hold(tmp_path, text(lines), truth)


VICTIMS = {
    "Ascend, with the report above it": "[rank8]: RuntimeError: create:HCCLUtils.hpp:105 HCCL function error: HcclBroadcast, error code is 6\n"
    "[rank8]: [ERROR] 2026-06-06-10:00:00 (PID:1, Device:0, RankID:8) ERR02200 DIST call hccl api failed.\n"
    "[rank8]: EI0006: [PID: 1] Getting socket times out. Reason: Remote Rank did not send the data in time.",
    "Ascend": "[rank3]: EI0006: 2026-03-03 Getting socket times out. Reason: Remote Rank did not send the data in time.",
    "the store": "[rank3]: torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    "the store's flag": '[rank3]:[E309 14:02:51.000000257 ProcessGroupNCCL.cpp:1] Failed to check the "should dump" flag '
    "on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection reset by peer",
    "NCCL": "[rank3]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
    "XLA": "[rank3]: RuntimeError: mesh_service.cc:243 : Failed to meet rendezvous 'init': Socket closed (14)",
    "rendezvous": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "a report": "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.",
}


@pytest.mark.parametrize("name", VICTIMS)
def test_a_victims_error_alone_blames_nobody(tmp_path, name):
    hold(tmp_path, text([VICTIMS[name]]), Truth(collect=("log",)))


@pytest.mark.parametrize("line", [text for text, _, nature in PASTED if nature in {"peer-lost", "timed-out"}])
def test_no_pasted_line_of_a_victim_blames_the_rank_that_wrote_it(tmp_path, line):
    hold(tmp_path, f"[rank3]: {line}\n", Truth(kinds=("transport", "missing"), not_ranks=(3,), or_cannot_tell=True))


@pytest.mark.parametrize("line", [text for text, _, nature in PASTED if nature == "own"])
def test_every_other_known_line_is_an_answer(tmp_path, line):
    assert analyzed(tmp_path, f"{line}\n").verdict is not None


def test_a_cut_table_names_the_rank_and_no_cause(tmp_path):
    lines = ["Root Cause (first observed failure):", "[0]:", "  time      : 2026-05-25_09:14:17", "  host      : nq",
             "  rank      : 1 (local_rank: 1)"]  # fmt: skip
    hold(tmp_path, text(lines), Truth(mentions=("rank 1 failed first",), collect=("log",)))


@pytest.mark.parametrize(
    "line",
    ["2026-03-09 14:02:12 ERROR trainer: giving up on shard 7", "[E408 09:15:08.000000583 loader.cpp:7] bad page"],
)
def test_beside_an_error_line_it_never_says_that_there_was_none(tmp_path, line):
    told = hold(tmp_path, text([*steps(3), line]), Truth(mentions=("has an error that ddpdoctor does not know",)))
    assert not [check for check in told.checks if "no failure was found" in str(check.reason)]


def test_advice_for_an_unknown_line_claims_no_traceback_and_no_victims(tmp_path):
    told = analyzed(tmp_path, "mypkg.errors.ShardError: shard 7 is damaged\n").verdict
    assert "other ranks" not in told.fix
    assert "in the traceback" not in told.fix


COMMAND = "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1."


def test_the_report_of_who_called_a_command_is_not_its_error(tmp_path):
    hold(tmp_path, COMMAND + "\n", Truth(mentions=("only has reports of a failure",), collect=("log",)))


def test_a_command_that_failed_in_a_job_that_ended_well_is_silent(tmp_path):
    hold(tmp_path, text([COMMAND, *steps(10), "Training finished"]), Truth(silent=True))


@pytest.mark.parametrize("error", [OOM, "mypkg.errors.ShardError: shard 7 is damaged"])
def test_an_error_after_which_the_job_went_on_is_a_note(tmp_path, error):
    log = text([*steps(10), error, *steps(10, 11)])
    hold(tmp_path, log, Truth(silent=True, ended=False))


@pytest.mark.parametrize("bad", [{3}, {3, 4, 5, 6}, {6, 8}])
def test_losses_that_are_numbers_again_are_no_fault(tmp_path, bad):
    lines = [f"2026-03-09 14:00:0{n} INFO train: step {n} loss {'nan' if n in bad else 4.1}" for n in range(1, 9)]
    hold(tmp_path, text(lines), Truth(silent=True, ended=False))


def test_the_rank_that_lost_its_peer_is_not_the_one_whose_error_stands_alone(tmp_path):
    lines = [*closed_by(0), OOM, *agent(1, 1, 901, [900])]
    hold(tmp_path, text(lines), Truth(kinds=("crash",), not_ranks=(0,), says=("out of memory",)))
