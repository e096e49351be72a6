"""What readers of logs make of lines: tests/data/readers has a file for each, with its name.

A case is "==== NAME" (and "| host h" or "| rank 3" for a file whose name says that), and then logs or files, each with
what is read in it below: "=> LINE: FACT FIELD=...", for each field that is not its default, or "=> nothing". "#: " begins
a comment. Lines stand as programs write them; those with "@" stand for several, see `tests.log_texts.written`.

``DDPDOCTOR_GOLDEN=write`` writes anew what is read, after a change or below a new log and a line "=> ", see `tests.golden`.
"""

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest

from ddpdoctor.logs.errors import classify
from ddpdoctor.logs.lines import Document, LogSplitter, condense, condensed_triggers, split_line
from ddpdoctor.logs.reading import document_formats, line_readers
from ddpdoctor.logs.tracebacks import TracebackReader
from ddpdoctor.logs.watchdog import WatchdogReader
from ddpdoctor.model.log_facts import Failed, Finished, Moving, Waiting, Who
from ddpdoctor.model.stacks import Frame
from ddpdoctor.report.lines import format_ranks
from tests.golden import WRITES, words
from tests.log_texts import text, written

DATA = Path(__file__).parents[2] / "data" / "readers"


def read_text(reader, text, who=None):
    """Return the facts of a text, and check that it is read in a large log too: progress counts at its end only."""
    lines = [*LogSplitter("job.log", who or Who()).lines(text, 1)]
    facts = [fact for line in lines for fact in reader.read(line)]
    facts += reader.end()
    if facts and reader.begins:
        assert any(words in line.text for line in lines for words in reader.begins), f"nothing begins {reader.name}"
    if any(not isinstance(fact, Moving | Finished) for fact in facts):
        condensed, triggers = condense(text.encode()), condensed_triggers(frozenset(reader.triggers))
        assert any(trigger in condensed for trigger in triggers), f"no trigger of {reader.name}"
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


@pytest.mark.parametrize("path", sorted(DATA.glob("*.txt")), ids=lambda path: path.stem)
def test_the_facts_of_a_log(path):
    now = []
    for part in blocks(path):
        now += [part] if isinstance(part, str) else [*part[1], *read(path.stem, *part[:2])]
    if WRITES:
        path.write_text("\n".join(now), encoding="utf-8")
    assert now == path.read_text(encoding="utf-8").split("\n")


def read_file(reader, text, who):
    """Return the facts of a file that is read as a whole."""
    body = text.encode()
    (one,) = [one for one in document_formats() if _is_called(one, reader) and one.recognizes(body)]
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


# What an error says about who caused it, and the ranks and hosts that it names.


def classified(text):
    kind, _, message = text.partition(": ")
    found = classify(kind, message)
    return found.nature.value, found.peers, found.peer_hosts


test_words = words(__name__, classify=classified)
