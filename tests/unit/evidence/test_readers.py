"""What readers of logs make of lines: tests/data/readers has a file for each, with its name.

A case is "==== NAME" (and "| host h" or "| rank 3" for a file whose name says that), and then logs or files, each with
what is read in it below: "=> LINE: FACT FIELD=...", for each field that is not its default, or "=> nothing". "#: " begins
a comment. Lines stand as programs write them; those with "@" stand for several, see `tests.evidence_texts.written`.

``python -m tests.unit.evidence.test_readers`` writes anew what is read, after a change or below a new log and a line "=> ".
Read its diff: it writes what is, and not what should be.
"""

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest

from ddpdoctor.evidence.errors import classify
from ddpdoctor.evidence.lines import LogSplitter, split_line
from ddpdoctor.evidence.reader import Document, condense, condensed_triggers
from ddpdoctor.evidence.registry import document_readers, line_readers
from ddpdoctor.evidence.tracebacks import TracebackReader
from ddpdoctor.evidence.watchdog import WatchdogReader
from ddpdoctor.model.evidence import Failed, Finished, Moving, Nature, Waiting, Who
from ddpdoctor.model.stacks import Frame
from ddpdoctor.report.lines import format_ranks
from tests.evidence_texts import text, written

DATA = Path(__file__).parents[2] / "data" / "readers"


def read_text(reader, text, who=None):
    """Return the facts of a text, and check that it is read in a large log too: progress counts at its end only."""
    facts = [fact for line in LogSplitter("job.log", who or Who()).lines(text, 1) for fact in reader.read(line)]
    facts += reader.end()
    if any(not isinstance(fact, Moving | Finished) for fact in facts):
        condensed = condense(text.encode())
        assert any(trigger in condensed for trigger in condensed_triggers([reader])), f"no trigger of {reader.name}"
    return facts


def blocks(path):
    """Return the parts of a file: its lines as they stand, and whose log, the log, and the facts below it."""
    named, log, facts = [], [], []
    lines = path.read_text(encoding="utf-8").split("\n")
    for line, following in zip(lines, [*lines[1:], "==== "], strict=True):
        if line.startswith("=> "):
            facts.append(line)
            if not following.startswith("=> "):
                yield named, log, facts
                log, facts = [], []
        elif line.startswith(("==== ", "#: ")) or (not line and following.startswith("==== ")):
            named = line.partition(" | ")[2].split() if line.startswith("==== ") else named
            yield line
        else:
            log.append(line)


def logs():
    for path in sorted(DATA.glob("*.txt")):
        for named, log, facts in (block for block in blocks(path) if isinstance(block, tuple)):
            yield pytest.param(path.stem, named, log, facts, id=f"{path.stem}: {log[0][:60]}")


def read(reader, named, log):
    """Return the facts of a log, a line for each."""
    who = Who(
        **{key: int(value) if key == "rank" else value for key, value in zip(named[::2], named[1::2], strict=True)}
    )
    for_lines = [one for one in line_readers() if _is_called(one, reader)]
    found = (
        read_text(for_lines[0], text(written(log)), who) if for_lines else read_file(reader, text(written(log)), who)
    )
    return [f"=> {shown(fact)}" for fact in found] or ["=> nothing"]


@pytest.mark.parametrize(("reader", "named", "log", "facts"), list(logs()))
def test_the_facts_of_a_log(reader, named, log, facts):
    assert read(reader, named, log) == facts


def read_file(reader, text, who):
    """Return the facts of a file that is read as a whole."""
    body = text.encode()
    (one,) = [one for one in document_readers() if _is_called(one, reader) and one.recognizes(body)]
    return one.read(Document(source="job.log", path=None, body=body, who=who)).facts


def _is_called(reader, name):
    return reader.name.lower().replace(" ", "-") == name


def shown(fact):
    """Return a fact in a line: the number of its line in the log, and what it says beyond the defaults."""
    return " ".join([f"{fact.spot.line}: {type(fact).__name__}", *_fields(fact)])


def _fields(value, before=""):
    for name in [one.name for one in fields(value) if one.name not in {"spot", "time", "said"}]:
        what = getattr(value, name)
        if is_dataclass(what) and not isinstance(what, Frame):
            yield from _fields(what, f"{before}{name}.")
        elif what not in (None, "", ()) and what is not False:
            yield f"{before}{name}={_words(what)}"


def _words(what):
    if isinstance(what, Frame):
        return f"{what.file}:{what.line} {what.function}" + (" (user)" if what.user else "")
    if is_dataclass(what):
        return f"({' '.join(_fields(what))})"
    if isinstance(what, Enum):
        return what.value
    if isinstance(what, list | tuple | set | frozenset):
        items = sorted(what) if isinstance(what, set | frozenset) else what
        return (
            "["
            + (format_ranks(items) if all(type(one) is int for one in items) else ", ".join(map(_words, items)))
            + "]"
        )
    return json.dumps(what[:80], ensure_ascii=False) if isinstance(what, str) and " " in what else str(what)


CAUGHT = """\
[rank2]:[E309 14:12:11.043947946 ProcessGroupNCCL.cpp:684] [Rank 2] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600011 milliseconds before \
timing out."""
RAISED = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/t.py", line 9, in f
[rank0]: KeyError: 1"""
RESTART = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
LAUNCH = "Setting OMP_NUM_THREADS environment variable for each process to be 1"


@pytest.mark.parametrize(
    ("reader", "log", "start", "kind"),
    [(WatchdogReader(), CAUGHT, RESTART, Waiting), (TracebackReader(), RAISED, LAUNCH, Failed)],
)
def test_what_was_held_back_comes_before_the_next_launch(reader, log, start, kind):
    for number, line in enumerate(log.split("\n"), 1):
        assert not reader.read(split_line(line, number, "f"))
    assert [type(fact) for fact in reader.read(split_line(start, 4, "f"))] == [kind]
    assert reader.end() == []


def test_a_run_after_a_restart_may_fail_at_the_same_number():
    facts = read_text(WatchdogReader(), f"{CAUGHT}\n{RESTART}\n{CAUGHT}\n")
    assert [(type(fact), fact.spot.line) for fact in facts] == [(Waiting, 1), (Waiting, 3)]


# What an error says about who caused it.


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
NATURES = [
    ("RuntimeError", f"{GLOO} Connection closed by peer [127.0.0.1]:61594.", Nature.PEER_LOST),
    ("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.4]:51: Connection reset by peer", Nature.PEER_LOST),
    ("RuntimeError", "Application timeout caused pair closure, gloo", Nature.PEER_LOST),
    ("DistNetworkError", "failed to recv, got 0 bytes", Nature.PEER_LOST),
    ("RuntimeError", "NCCL communicator was aborted on rank 7.  Original reason for failure was: x", Nature.PEER_LOST),
    ("DistStoreError", "wait timeout after 8000ms, keys: /default_pg/0//cpu//0/1", Nature.TIMED_OUT),
    ("DistNetworkError", "The client socket has timed out after 60000ms while trying to connect to (h1, 29500).", Nature.TIMED_OUT),
    ("RuntimeError", "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 6000 ms", Nature.TIMED_OUT),
    ("RuntimeError", "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.", Nature.TIMED_OUT),
    ("RuntimeError", "Detected mismatch between collectives on ranks. Rank 0 is running", Nature.FOLLOWS),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", Nature.OWN),
    ("RuntimeError", "CUDA out of memory. Tried to allocate more than 1EB memory.", Nature.FOLLOWS),
    ("KeyboardInterrupt", "", Nature.STOPPED),
    ("CalledProcessError", "Command '['torchrun', 'x.py']' returned non-zero exit status 1.", Nature.FOLLOWS),
    ("CalledProcessError", "Command '['ffmpeg']' returned non-zero exit status 1.", Nature.OWN),
    ("ConnectionError", "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))", Nature.OWN),
    ("ValueError", "Broken pipeline", Nature.OWN),
    ("ReadTimeout", "HTTPSConnectionPool: Read timed out.", Nature.OWN),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "nature"), NATURES)
def test_what_an_error_says_about_who_caused_it(kind: str, message: str, nature: Nature) -> None:
    assert classify(kind, message).nature is nature


def test_the_ranks_and_hosts_that_an_error_names() -> None:
    assert classify("RuntimeError", "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 6000 ms").peers == (1, 2)
    assert classify("RuntimeError", f"{GLOO} Connection closed by peer [127.0.0.1]:61594.").peer_hosts == ()
    innocent = (
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
    )
    assert classify("RuntimeError", innocent).peers == (0,)


if __name__ == "__main__":
    for changed in sorted(DATA.glob("*.txt")):
        lines = []
        for block in blocks(changed):
            lines += [block] if isinstance(block, str) else [*block[1], *read(changed.stem, *block[:2])]
        changed.write_text("\n".join(lines), encoding="utf-8")
