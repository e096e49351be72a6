"""Known errors: real messages of torch and Python are distinguished, those of other code are left alone."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpdoctor.evidence.reader import condense
from ddpdoctor.model.known_errors import FAULTS, find_known, read_known_errors

DATA = Path(__file__).parents[1] / "data"


def raised(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of whatever type
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not raise")


def env_init():
    held = {name: os.environ.pop(name, None) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    try:
        dist.init_process_group("gloo")
    finally:
        os.environ.update({name: value for name, value in held.items() if value is not None})


def taken_port():
    first = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", first.port, 1, is_master=True, wait_for_workers=False)


def changed_in_place():
    weight = torch.ones(2, requires_grad=True)
    held = torch.ones(2)
    product = weight * held
    held.add_(1)
    product.sum().backward()


def other_sizes():
    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())


def prefixed():
    model = torch.nn.Linear(2, 2)
    model.load_state_dict({f"module.{name}": tensor for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (env_init, "environment variable RANK"),
        (dist.get_rank, "Default process group has not"),
        (taken_port, "The server socket has failed"),
        (lambda: torch.nn.BatchNorm1d(3)(torch.ones(1, 3)), "Expected more than 1 value"),
        (changed_in_place, "one of the variables needed"),
        (lambda: pickle.dumps(lambda: None), "Can't pickle local"),
        (other_sizes, "size mismatch for"),
        (prefixed, "Error(s) in loading state_dict"),
    ],
)  # fmt: skip
def test_real_errors(call, shown):
    text = raised(call)
    known = find_known(text)
    assert known is not None, text
    assert known.shown.startswith(shown), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", "CUDA out of memory"),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error, NCCL version 2.21.5",
         "NCCL error: unhandled system error"),
        ("Error: DataLoader worker (pid 7) is killed by signal: Bus error", "DataLoader worker (pid "),
        ("Error: DataLoader worker (pid(s) 7) exited unexpectedly", "DataLoader worker (pid("),
        ("DistNetworkError: Timed out after 1801 seconds waiting for clients. 1/2 joined", "The client socket"),
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:1", "Connection closed"),
        ("DistNetworkError: The IPv6 network addresses of (n0, 29500) cannot be retrieved (gai error: -2 - Name or",
         "The IPv6 network"),
        ("RuntimeError: received 0 items of ancdata", "Too many open files"),
        ("ValueError: trying to initialize the default process group twice!", "trying to initialize"),
        ("AcceleratorError: CUDA error: device-side assert triggered", "CUDA error: device-side"),
    ],
)  # fmt: skip
def test_messages_that_need_a_gpu_or_a_peer(text, shown):
    known = find_known(text)
    assert known is not None
    assert known.shown.startswith(shown)


@pytest.mark.parametrize(
    "text",
    [
        "ConnectionError: HTTPSConnectionPool(host='mirror', port=443): [Errno 111] Connection refused",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "gaierror: [Errno -2] Name or service not known",
        "OSError: [Errno 98] Address already in use",
        "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
        "ValueError: invalid literal for int() with base 10: 'x'",
        "KeyError: 'weights'",
    ],
)
def test_errors_of_other_code_are_left_alone(text):
    assert find_known(text) is None


def test_each_has_a_source_and_can_be_distinguished_from_those_before_it():
    rows = read_known_errors()
    assert len(rows) >= 200
    assert all(known.source and known.fix and known.means and known.fault in FAULTS.values() for known in rows)
    assert len({known.shown for known in rows}) == len({known.pattern for known in rows}) == len(rows)
    natures = {"own", "peer-lost", "timed-out", "stopped", "follows", "link", "note"}
    assert {known.nature for known in rows} <= natures
    assert all(known.nature != "own" for known in rows if known.fault == FAULTS["peer"])
    assert all(len(condense(mark.encode())) > 1 for known in rows for mark in known.marks)


@pytest.mark.parametrize(
    "message",
    [
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this",
    ],
)
def test_a_shared_gpu_is_known_as_nccl_words_it_before_and_since_2_30(message):
    known = find_known(f"DistBackendError: NCCL error: invalid usage\nLast error:\n{message}")
    assert known is not None
    assert known.shown.startswith("Duplicate GPU")


PASTED = [line.split("\t") for line in (DATA / "known_errors.tsv").read_text(encoding="utf-8").splitlines()[1:]]
"""Lines in the forms that people paste, with invented values."""


@pytest.mark.parametrize(("text", "shown", "nature"), PASTED)
def test_pasted_lines_are_known_and_a_reader_of_logs_would_see_them(text, shown, nature):
    known = find_known(text)
    assert known is not None
    assert shown in known.shown
    assert known.nature == nature
    assert nature == "note" or any(mark in text for mark in ("rror", "RROR", "xception", *known.marks))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("AssertionError: Rank 6: found NaN in local grad norm in backwards pass. Device: 6", (6,)),
        ("Unexpected result nan on rank 2 at iteration #40", (2,)),
        ("Parameters which did not receive grad for rank 3: aux.weight", (3,)),
        ("Duplicate GPU detected : rank 6 and rank 2 both on CUDA device 4b000", (6, 2)),
        ("RuntimeError: CUDA out of memory. GPU 3 has a total capacity of 23.69 GiB", ()),
    ],
)
def test_ranks_in_a_text(text, ranks):
    known = find_known(text)
    assert known is not None
    assert known.ranks(text) == ranks
