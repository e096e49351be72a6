"""Whose code a frame is, by the path alone, and what is quoted."""

import pytest

from ddpdoctor.evidence.foreign_frames import foreign_frame, is_foreign_user_file
from ddpdoctor.evidence.quotes import MOST_QUOTED, quote
from ddpdoctor.evidence.reader import Line
from ddpdoctor.evidence.torch_heads import time_of
from ddpdoctor.model.evidence import Time, Who


@pytest.mark.parametrize(
    "file",
    [
        "/workspace/train.py", "train.py", "src/model.py", "./train.py", "<stdin>", "<string>", "C:\\work\\train.py",
        "/home/me/torch/train.py", "/home/me/lib/model.py",
    ],
)  # fmt: skip
def test_files_of_the_user(file: str) -> None:
    assert is_foreign_user_file(file)
    assert foreign_frame(file, 5, "main").user


@pytest.mark.parametrize(
    "file",
    [
        "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", "/usr/lib/python3/dist-packages/yaml/x.py",
        "/opt/conda/lib/python3.10/threading.py", "/pytorch/torch/distributed/distributed_c10d.py", "<frozen runpy>",
        "torch/autograd/graph.py", "threading.py", "multiprocessing/queues.py", "transformers/trainer.py",
        "C:\\Python311\\Lib\\threading.py",
    ],
)  # fmt: skip
def test_files_of_libraries(file: str) -> None:
    assert not is_foreign_user_file(file)


def test_a_quote_is_one_short_line_without_secrets() -> None:
    assert quote("a\n  b\tc") == "a b c"
    assert "hunter2" not in quote("export WANDB_API_KEY=hunter2hunter2 before")
    assert len(quote("x y " * 500)) == MOST_QUOTED


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("[E309 14:12:11.043307900 ProcessGroupNCCL.cpp:616] [Rank 2] text", 5839931.0433079),
        ("[W1122 12:32:07.602000000 x.cpp:1] text", 28125127.602),
        ("W0309 14:02:19.300000 4011 torch/distributed/elastic/api.py:1028] text", 5839339.3),
        ("100%|###| 3/3 [E309 14:12:11.043307900 x.cpp:616] text", 5839931.0433079),
        ("[E ProcessGroupNCCL.cpp:475] [Rank 2] text", None),
        ("[E1399 14:12:11.043307900 x.cpp:616] text", None),
    ],
)
def test_times_of_torchs_own_heads_are_on_a_clock_of_their_own(text: str, seconds: float | None) -> None:
    line = Line(text=text, number=1, source="job.log", who=Who(host="h1"))
    time = time_of(line)
    assert (time.seconds if time else None) == (pytest.approx(seconds) if seconds is not None else None)
    assert time is None or time.clock == "h1, no year"


def test_the_time_of_a_prefix_is_better_than_that_of_a_head() -> None:
    time = Time(seconds=1.0, clock="h1")
    assert time_of(Line(text="[E309 14:12:11.043307900 x.cpp:1] ", number=1, source="f", time=time)) is time
