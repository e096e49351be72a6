"""Where a run begins in a log, and which lines only look like that."""

import pytest

from ddpdoctor.evidence.frameworks import LaunchReader
from ddpdoctor.model.evidence import Launched
from tests.unit.evidence.feeding import feed


@pytest.mark.parametrize(
    "text",
    [
        "NCCL version 2.27.3+cuda12.9",
        "h1:20100:20100 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
        "W0309 14:02:19 4011 torch/distributed/run.py:766] Setting OMP_NUM_THREADS environment variable for each process to",
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2",
    ],
)
def test_lines_with_which_a_run_begins(text: str) -> None:
    assert [type(fact) for fact in feed(LaunchReader(), text)] == [Launched]


@pytest.mark.parametrize(
    "text",
    [
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1970, unhandled system error, NCCL version 2.20.5",
        "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2",
        "checked OMP_NUM_THREADS",
        "NCCL version 2.29.7 compiled with CUDA 12.9",
    ],
)
def test_lines_that_begin_nothing(text: str) -> None:
    assert feed(LaunchReader(), text) == []
