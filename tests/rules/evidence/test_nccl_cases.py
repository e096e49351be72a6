"""Jobs of which NCCL's log tells: whose warning it is, who is behind, and what is no warning at all."""

import pytest

from tests.evidence_texts import interleaved, nccl, nccl_start, nccl_warn, raised, steps, text
from tests.rules.evidence.truths import ABSENT, Truth, hold

HOSTS = {0: ("h1", "10.0.0.1"), 1: ("h2", "10.0.0.2"), 2: ("h3", "10.0.0.3")}


def started(ranks: int = 2) -> list[list[str]]:
    """One process a host."""
    return [nccl_start(*HOSTS[rank], 20100 + rank, rank=rank, ranks=ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    "said",
    [
        "socketPollConnect: Connect to 10.0.0.2<41001> returned 113(No route to host) errno 115(Operation now in progress)",
        "Connect to 10.0.0.2<41001> failed : No route to host",
        "Net : Connect to 10.0.0.2<41001> failed : Connection refused",
        "socketStartConnect: Connect to 10.0.0.2<41001> failed : Connection timed out",
        "socketPollConnect: Connect to 10.0.0.2<41001> returned 110(Connection timed out) errno 115(Operation now in progress)",
    ],
)
def test_a_host_that_cannot_be_reached(tmp_path, said):
    log = text([*started()[0][:4], *nccl_warn("h1", 20100, said)])
    hold(
        tmp_path,
        {"h1.log": log, "h2.log": text(started()[1][:4])},
        Truth(kinds=("transport",), says=("10.0.0.2|h2",), ranks=()),
    )


def test_an_address_of_docker(tmp_path):
    said = "socketPollConnect: Connect to 172.17.0.1<41001> returned 111(Connection refused) errno 115(Operation now in progress)"
    log = text([*started()[0][:4], *nccl_warn("h1", 20100, said)])
    truth = Truth(kinds=("transport", "ifname-exists"), says=("172.17.0.1",), mentions=("NCCL_SOCKET_IFNAME",))
    hold(tmp_path, log, truth)


def test_no_interface(tmp_path):
    files = {
        "h1.log": text(started()[0][:1]),
        "h2.log": text(nccl_warn("h2", 20101, "Bootstrap : no socket interface found", place="bootstrap.cc:45")),
    }
    truth = Truth(kinds=("ifname-exists", "interface", "transport"), hosts=("h2",), mentions=("NCCL_SOCKET_IFNAME",))
    hold(tmp_path, files, truth)


def test_the_peer_ran_out_of_memory(tmp_path):
    """nccl 1235: [0] says that the peer closed; [3] had no memory."""
    start = [
        line for rank in range(4) for line in nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank)
    ]
    log = [
        *nccl_warn("h1", 100, "Connection closed by remote peer h1<41003>", gpu=0),
        *nccl_warn("h1", 103, "Cuda failure 'out of memory'", gpu=3, place="include/alloc.h:66"),
        *nccl_warn("h1", 103, "Failed to CUDA calloc 6291456 bytes", gpu=3, place="include/alloc.h:72"),
    ]
    hold(tmp_path, text([*start, *log]), Truth(kinds=("crash",), ranks=(3,), says=("memory",)))


def test_the_lowest_code_of_the_way_up_counts(tmp_path):
    """nccl 795: 6, a remote error, becomes 3 higher up: no internal error of this process."""
    way = [
        *nccl_warn("h1", 20100, "Call to recv from 10.0.0.2<41001> failed : Broken pipe", place="misc/socket.cc:50"),
        nccl("h1", 20100, "misc/socket.cc:773 -> 6"),
        nccl("h1", 20100, "transport/net_socket.cc:493 -> 6"),
        nccl("h1", 20100, "transport/net.cc:1298 -> 3"),
        nccl("h1", 20100, "proxy.cc:698 -> 3 [Progress Thread]"),
    ]
    truth = Truth(kinds=(*ABSENT, "transport"), ranks=(1,), or_cannot_tell=True, collect=("h2|10.0.0.2|rank 1|other",))
    hold(tmp_path, text([*started()[0], *way]), truth)


def test_the_host_that_most_name_ended_first(tmp_path):
    start = started(3)
    for rank in (0, 1):
        host = HOSTS[rank][0]
        start[rank] += nccl_warn(host, 20100 + rank, "Connection closed by remote peer h3<41003>")
    truth = Truth(kinds=ABSENT, hosts=("h3",), confidence=("low",))
    hold(tmp_path, {f"{HOSTS[rank][0]}.log": text(start[rank]) for rank in (0, 1)}, truth)


def test_a_local_rank_that_closed(tmp_path):
    start = [nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank) for rank in range(4)]
    for rank in (0, 1, 2):
        start[rank] += nccl_warn(
            "h1", 100 + rank, "[Service thread] Connection closed by localRank 3", rank, "misc/ipcsocket.cc:12"
        )
    hold(tmp_path, interleaved(*start), Truth(kinds=ABSENT, ranks=(3,), confidence=("low",)))


def test_retries_of_infiniband_are_used_up(tmp_path):
    said = "NET/IB: Got completion from peer 10.0.0.3<41003> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fe80::1 remoteGidsfe80::3 hca mlx5_0"
    start = started(3)
    for rank in (0, 1):
        start[rank] += nccl_warn(HOSTS[rank][0], 20100 + rank, said, place="transport/net_ib.cc:1295")
    files = {f"{HOSTS[rank][0]}.log": text(start[rank]) for rank in range(3)}
    hold(tmp_path, files, Truth(kinds=("transport",), hosts=("h3",), says=("10.0.0.3|h3",), ranks=()))


def test_a_flush_is_a_consequence(tmp_path):
    said = "NET/IB: Got completion from peer 10.0.0.2<41003> with status=5 opcode=0 len=0 vendor err 249 (Send)"
    files = {
        "h1.log": text([*started()[0], *nccl_warn("h1", 20100, said, place="transport/net_ib.cc:1295")]),
        "h2.log": text([*started()[1], *raised("ValueError: NaN in loss", 1)]),
    }
    hold(tmp_path, files, Truth(kinds=("crash",), ranks=(1,), says=("NaN in loss",)))


def test_the_status_of_nccl_2_29(tmp_path):
    said = "NET/IB: Got completion from peer 10.0.0.2<41003> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=129 req_type=Send localGid fe80::1 remoteGid fe80::2 hca mlx5_3"
    log = text([*started()[0], *nccl_warn("h1", 20100, said, place="transport/net_ib/p2p.cc:512 (ncclIbTest)")])
    hold(tmp_path, log, Truth(kinds=("transport",), says=("10.0.0.2|h2", "12", "mlx5_3")))


def test_an_adapter_that_fails(tmp_path):
    said = "NET/IB : mlx5_2:1 async fatal event: local catastrophic error"
    log = text([*started()[0], *nccl_warn("h1", 20100, said, place="transport/net_ib.cc:112")])
    hold(tmp_path, log, Truth(kinds=("transport",), hosts=("h1",), says=("mlx5_2",)))


def test_an_adapter_that_the_container_lacks(tmp_path):
    said = "NET/IB : Unable to open device mlx5_0"
    files = {
        "h1.log": text(started()[0][:4]),
        "h2.log": text([*started()[1][:3], *nccl_warn("h2", 20101, said, place="transport/net_ib.cc:234")]),
    }
    hold(tmp_path, files, Truth(kinds=("transport",), hosts=("h2",), says=("mlx5_0",)))


@pytest.mark.parametrize(
    "said",
    [
        "Error: failed to extend /dev/shm/nccl-Xa81bc to 33030532 bytes, error: No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-Xa81bc (size 9637888)",
        "Call to posix_fallocate failed : No space left on device",
    ],
)
def test_shared_memory_is_full(tmp_path, said):
    """Every rank prints it: it is the environment."""
    logs = [
        [
            *nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=2, gpu=rank)[:5],
            *nccl_warn("h1", 100 + rank, said, rank, "misc/shmutils.cc:72"),
        ]
        for rank in range(2)
    ]
    truth = Truth(kinds=("shm", "crash", "transport"), ranks=(), says=("/dev/shm",), mentions=("shm-size",))
    hold(tmp_path, interleaved(*logs), truth)


def test_versions_differ(tmp_path):
    said = "Mismatched NCCL version detected : rank 1 version 22703 rank 0 version 22605"
    log = text([*started()[0][:4], *nccl_warn("h1", 20100, said, place="init.cc:1022")])
    hold(tmp_path, log, Truth(kinds=("version-same", "version"), says=("version",)))


def test_two_ranks_on_one_gpu(tmp_path):
    said = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5e000"
    logs = [
        [
            *nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=2)[:5],
            *nccl_warn("h1", 100 + rank, said, place="init.cc:943"),
        ]
        for rank in range(2)
    ]
    hold(tmp_path, interleaved(*logs), Truth(kinds=("dup-gpu", "duplicate-gpu"), says=("GPU",)))


def test_nvlink_sharp(tmp_path):
    said = "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'."
    log = text([*started()[0][:5], *nccl_warn("h1", 20100, said, place="transport/nvls.cc:244")])
    hold(
        tmp_path, log, Truth(kinds=("transport", "crash", "nvls"), hosts=("h1",), says=("NVLS",), mentions=("fabric",))
    )


def test_a_communicator_that_never_comes_up(tmp_path):
    """Ranks 0 and 2 began; rank 1 was seen until its bootstrap and no further."""
    logs = started(3)
    files = {"h1.log": text(logs[0][:5]), "h2.log": text(logs[1][:1]), "h3.log": text(logs[2][:5])}
    truth = Truth(
        kinds=(*ABSENT, "transport"), ranks=(1,), or_cannot_tell=True, not_ranks=(0, 2), collect=("rank 1|other ranks",)
    )
    hold(tmp_path, files, truth)


def called(host: str, pid: int, count: str, op: str, elements: int = 9984512, ranks: int = 4) -> str:
    return nccl(
        host,
        pid,
        f"{op}: opCount {count} sendbuff 0x7f01 recvbuff 0x7f02 count {elements} datatype 7 op 0 root 0 comm 0x55d1000{pid % 10:x}a0 [nranks={ranks}] stream 0x55",
    )


def test_calls_that_differ(tmp_path):
    """rccl 429: three make an AllReduce at opCount 28c, rank 2 an AllGather."""
    logs = []
    for rank in range(4):
        log = nccl_start("h1", "10.0.0.1", 100 + rank, rank=rank, ranks=4, gpu=rank)
        log += [called("h1", 100 + rank, f"{count:x}", "AllReduce") for count in range(0x289, 0x28C)]
        log.append(called("h1", 100 + rank, "28c", "AllGather" if rank == 2 else "AllReduce"))
        logs.append(log)
    hold(tmp_path, interleaved(*logs), Truth(kinds=("mismatch",), ranks=(2,), says=("all_gather|AllGather",)))


def test_only_info_is_nothing_wrong(tmp_path):
    """nccl 541. Whether the job hangs cannot be told."""
    report = hold(tmp_path, interleaved(*started()), Truth(or_cannot_tell=True))
    assert report.verdict is None


ERROR = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {}, NCCL version 2.21.5\n{}\nLast error:\n{}"


@pytest.mark.parametrize(
    ("kind", "last", "truth"),
    [
        (
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
            "socketPollConnect: Connect to 10.0.0.2<41001> returned 113(No route to host) errno 115(Operation now in progress)",
            Truth(kinds=("transport",), ranks=(), says=("10.0.0.2",)),
        ),
        (
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
            "Error while creating shared memory segment /dev/shm/nccl-0YqDGx (size 9637888), error: No space left on device (28)",
            Truth(kinds=("shm",), ranks=(), says=("/dev/shm",)),
        ),
        (
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5e000",
            Truth(kinds=("dup-gpu",), ranks=(0, 1), says=("GPU",)),
        ),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 2 'out of memory'",
            Truth(kinds=("crash",), ranks=(0, 1), says=("out of memory",)),
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "NET/IB: Got completion from peer 10.0.0.3<41003> with status=12 opcode=0 len=0 vendor err 129",
            Truth(kinds=("transport",), ranks=(), says=("10.0.0.3",)),
        ),
    ],
)
def test_nccls_own_words_in_errors_of_torch(tmp_path, kind, last, truth):
    logs = [raised(ERROR.format(kind.partition(":")[0], kind, last), rank) for rank in (0, 1)]
    hold(tmp_path, interleaved(*logs), truth)


def test_a_host_that_gives_an_address_of_docker(tmp_path):
    """nccl-tests 15: nobody says why; the addresses show it."""
    wrong = [nccl("h2", 20101, "Bootstrap: Using docker0:172.17.0.1<0>"), *started()[1][1:5]]
    hold(
        tmp_path,
        {"h1.log": text(started()[0][:5]), "h2.log": text(wrong)},
        Truth(kinds=("transport",), ranks=(), hosts=("h2",), says=("172.17.0.1",)),
    )


def test_docker_on_one_host_that_works(tmp_path):
    """Its twin: the communicator is there, and the steps go on."""
    log = [
        line.replace("eth0:10.0.0.1", "docker0:172.17.0.1") for line in nccl_start("h1", "10.0.0.1", 1, rank=0, ranks=1)
    ]
    hold(tmp_path, text([*log, *steps(30), "`Trainer.fit` stopped: `max_epochs=3` reached."]), Truth(silent=True))
