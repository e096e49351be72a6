"""Files, folders, packed and hostile ones, and how runs are told apart."""

import bz2
import gzip
import io
import lzma
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.logs import reading
from ddpdoctor.logs.files import HEAD_BYTES
from ddpdoctor.logs.lines import Document, Found, Line, condense, condensed_triggers
from ddpdoctor.logs.reading import BLOCK_BYTES, MOST_ALIKE, read_logs
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.log_facts import Exited, Fact, Hint, Launched, Spot

START = "Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
PLAIN = "2026-03-09 14:02:11 INFO train: step 1 loss 4.1538\n"


class Errors:
    """Reads lines such as "Error 3": a rank ended with that status."""

    name = "errors"
    triggers = (b"Error ",)
    begins = ()

    def read(self, line: Line) -> Iterable[Fact]:
        if line.text.startswith("Error "):
            return (Exited(who=line.who, spot=line.spot(), code=int(line.text[6:]), said=line.text),)
        return ()

    def end(self) -> Iterable[Fact]:
        return (Hint(spot=Spot(source="-"), words="end"),)


class Dumps:
    """Recognizes files that begin with "DUMP"."""

    name = "dump"

    def recognizes(self, head: bytes) -> bool:
        return head.startswith(b"DUMP")

    def read(self, document: Document) -> Found:
        return Found(facts=[Hint(spot=Spot(source=document.source), words=str(len(document.body)))], lines=1)


@pytest.fixture(autouse=True)
def _readers(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = reading.line_readers
    monkeypatch.setattr(reading, "line_readers", lambda: (Errors(), *launches()[-1:]))
    monkeypatch.setattr(reading, "document_formats", lambda: (Dumps(),))


def codes(path: Path | str) -> list[int | None]:
    return [fact.code for run in read_logs([str(path)]).runs for fact in run.facts if isinstance(fact, Exited)]


def passing(text: bytes) -> list[bytes]:
    """Return the condensed triggers of all readers in a text."""
    condensed, triggers = condense(text), frozenset(one for reader in reading.line_readers() for one in reader.triggers)
    return [trigger for trigger in condensed_triggers(triggers) if trigger in condensed]


def test_every_reader_is_reached_through_the_funnel() -> None:
    for reader in reading.line_readers():
        assert reader.triggers
        for trigger in reader.triggers:
            assert passing(trigger), (reader.name, trigger)


@pytest.mark.parametrize(
    "line",
    [
        b"[rank3]: 2026-03-09 14:02:11 INFO train: step 1 loss 4.1538 rank 3 of 8 on 8 ranks",
        b"(RayTrainWorker pid=19799, ip=10.72.0.6) iteration 100/5000 | loss 2.1 | grad norm: 1.2 | tokens/s 90211",
        b" 40%|\xe2\x96\x88\xe2\x96\x88  | 4/10 [00:03<00:05,  1.1it/s] this run: 3, buffer filled, exit in 5 min",
        b"3: INFO data: shard 00123.tar opened; room for 12 more; shuffling with a threshold of 5",
        b"{'loss': 2.1, 'grad_norm': 0.3, 'learning_rate': 1e-05, 'epoch': 0.01, 'signal': 3, 'thread': 7}",
    ],
)
def test_progress_does_not_pass_the_funnel(line: bytes) -> None:
    assert passing((line + b"\n") * 3) == []


def test_nccls_info_lines_reach_its_own_reader_only_and_idle_ones_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Collects(Errors):
        def __init__(self, *triggers: bytes) -> None:
            self.triggers = triggers
            self.seen: list[str] = []

        def read(self, line: Line) -> Iterable[Fact]:
            self.seen.append(line.text)
            return ()

    nccl, other = Collects(b"NCCL INFO"), Collects(b"NCCL")
    monkeypatch.setattr(reading, "line_readers", lambda: (nccl, other))
    head = "a:1:2 [0] NCCL "
    lines = ["INFO Connected all rings", "INFO NCCL version 2.27.3", "INFO Using network IB", "WARN Net"]
    (tmp_path / "log").write_text("".join(f"{head}{line}\n" for line in lines))
    assert read_logs([str(tmp_path / "log")]).counts["lines"] == 4
    assert nccl.seen == [f"{head}{line}" for line in lines[1:]]
    assert other.seen == [f"{head}{lines[1]}", f"{head}{lines[3]}"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_packed_logs_are_read_also_through_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    """It is longer than the first bytes, by which it is recognized, and a pipe cannot go back to them."""
    noise = random.Random(1).randbytes(2 * HEAD_BYTES).hex()
    (tmp_path / "log").write_bytes(pack(f"{noise}\n[rank1]: Error 3\n".encode()))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((tmp_path / "log").read_bytes())))
    for source in (str(tmp_path / "log"), "-"):
        assert codes(source) == [3]
    assert read_logs([str(tmp_path / "log")]).counts["lines"] == 2


def test_only_blocks_around_triggers_are_read_and_all_lines_are_counted(tmp_path: Path) -> None:
    many = 3 * BLOCK_BYTES // len(PLAIN)
    (tmp_path / "log").write_text(PLAIN * many + "[rank1]: Error 3\n" + PLAIN * many + "[rank2]: Error 4")
    evidence = read_logs([str(tmp_path / "log")])
    found = [(fact.who.rank, fact.spot.line) for fact in evidence.runs[0].facts if isinstance(fact, Exited)]
    assert found == [(1, many + 1), (2, 2 * many + 2)]
    assert evidence.counts == {"files": 1, "lines": 2 * many + 2, "bytes": (tmp_path / "log").stat().st_size}


def test_lines_are_found_over_the_edge_of_a_block_in_a_progress_bar_and_after_a_line_without_end(
    tmp_path: Path,
) -> None:
    """Repetitions are kept a few times only."""
    bar = b" 40%|####  | 4/10\r 50%|#####\rError 5\r 60%|\nError 6\r\n"
    texts = [(bar, [5, 6]), (b"x" * (4 * BLOCK_BYTES) + b"\nError 5\n", [5])]
    texts += [(b"x" * (BLOCK_BYTES + n - 1) + b"\nError 7\n" + PLAIN.encode(), [7]) for n in range(-12, 3)]
    alike = "".join(f"Error {n}\n" for n in range(1000)) + "[rank1]: Error 5\n"
    for text, expected in [*texts, (alike.encode(), [*range(MOST_ALIKE), 5])]:
        (tmp_path / "log").write_bytes(text)
        assert codes(tmp_path / "log") == expected


def test_folders_standard_input_and_several_paths_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs" / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "logs" / "attempt_0" / "1" / "stderr.log").write_text("Error 1\n")
    (tmp_path / "rank_12.txt").write_text("Error 2\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Error 3\n")))
    evidence = read_logs([str(tmp_path / "logs"), str(tmp_path / "rank_12.txt"), "-"])
    facts = [fact for run in evidence.runs for fact in run.facts if isinstance(fact, Exited)]
    assert [(fact.code, fact.who.rank, fact.who.local_rank) for fact in facts] == [
        (1, None, 1), (2, 12, None), (3, None, None)
    ]  # fmt: skip
    assert [read.source.rpartition("/")[2] for read in evidence.read] == ["stderr.log", "rank_12.txt", "-"]


def test_documents_are_read_whole_and_unknown_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"DUMP" + b"x" * (2 * BLOCK_BYTES))
    (tmp_path / "b").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "c").write_bytes(b"")
    evidence = read_logs([str(tmp_path)])
    assert [(read.formats, read.problem) for read in evidence.read] == [(("dump",), ""), ((), ""), ((), "empty")]
    (fact,) = evidence.runs[0].facts
    assert isinstance(fact, Hint)
    assert fact.words == str(2 * BLOCK_BYTES + 4)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_logs([str(tmp_path / "nothing")])


def test_a_launch_after_an_end_begins_another_run(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{START}{START}{PLAIN}Error 1\n{START}{PLAIN}Error 2\n")
    runs = read_logs([str(tmp_path / "log")]).runs
    assert [[fact.code for fact in run.facts if isinstance(fact, Exited)] for run in runs] == [[1], [2]]
    assert [len([fact for fact in run.facts if isinstance(fact, Launched)]) for run in runs] == [2, 1]
    assert runs[1].name == f"from {tmp_path}/log:5"


def test_a_file_with_one_run_belongs_to_the_last(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f"{START}Error 1\n{START}Error 2\n")
    (tmp_path / "b").write_text("Error 3\n")
    runs = read_logs([str(tmp_path)]).runs
    assert [[fact.code for fact in run.facts if isinstance(fact, Exited)] for run in runs] == [[1], [2, 3]]


def test_logs_of_two_slurm_jobs_and_of_two_attempts_are_different_runs(tmp_path: Path) -> None:
    for job in (9, 10):
        (tmp_path / f"slurm-{job}.out").write_text(f"Error {job}\n")
    runs = read_logs([str(tmp_path)]).runs
    assert [(run.name, [fact.code for fact in run.facts if isinstance(fact, Exited)]) for run in runs] == [
        ("job 9", [9]), ("job 10", [10])
    ]  # fmt: skip
    for attempt in (0, 1):
        (tmp_path / "logs" / f"attempt_{attempt}" / "0").mkdir(parents=True)
        (tmp_path / "logs" / f"attempt_{attempt}" / "0" / "stderr.log").write_text(f"Error {attempt}\n")
    names = [run.name for run in read_logs([str(tmp_path / "logs")]).runs]
    assert names == [["attempt 0", "attempt 1"][n] for n in (0, 1)]
