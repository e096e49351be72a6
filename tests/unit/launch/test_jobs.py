"""What ``wrap`` says of simulated jobs, second by second, and how it ends: ``jobs.txt``, a program beside a transcript.

``python -m tests.unit.launch.test_jobs`` writes the transcripts anew; read what has changed.
"""

import ast
import json
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from ddpdoctor.model.findings import Check, Judgment, Outcome
from tests.simulated import STUCK_LINE, World, train

CRASHED = Check(id="stuck", code="DD603", outcome=Outcome.CRASHED, seen="ImportError: code was replaced")


def cannot_load():
    raise ImportError("code was replaced")


def end_alone(rank):
    """Train, and end one rank's script before the others'."""
    train(rank, 60 if rank.number == 0 else 20)


NAMES = {
    "cannot_load": cannot_load,
    "raises": lambda: lambda *_: cannot_load(),
    "crashes": lambda: lambda *_: Judgment(findings=(), checks=(CRASHED, CRASHED), certain=False),
    "end_alone": end_alone,
}
TABLE = Path(__file__).with_name("jobs.txt")


def read_table():
    """Return each job's name, and the lines of its options, of its events, and of its transcript."""
    for text in TABLE.read_text().split("\n\n")[1:]:
        name, *lines = text.strip().splitlines()
        options = [word for line in lines if line.startswith("with ") for word in line.split()[1:]]
        events = [line.split()[1:] for line in lines if line.startswith("at ")]
        yield name, options, events, [line for line in lines if line.startswith("dd")]


def value_of(word):
    """Return what a word of the table stands for: a number, a tuple, a signal, or itself."""
    if word.isupper():
        return getattr(signal, word)
    try:
        return ast.literal_eval(word)
    except ValueError:
        return word


def transcript(folder, options, events):
    """Run a job; return what each node said."""
    pairs = (word.split("=") for word in options if word != "full")
    named = {
        name: NAMES.get(word, value_of(word)) if name in {"judge", "script"} else value_of(word) for name, word in pairs
    }
    world = World(folder, [tuple(map(value_of, event)) for event in events], **named)
    world.run()
    return [f"{node.host} {line}" for node in world.here if node.outcome for line in node.said]


JOBS = {name: job for name, *job in read_table()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * ("full" in JOBS[name][0])) for name in JOBS]
)
def test_what_is_said_of_a_job(name, tmp_path):
    options, events, expected = JOBS[name]
    assert transcript(tmp_path, options, events) == expected


def works_then_calls(rank):
    """Spend most of the time before the last call at one line, some at another, and some before the first call."""
    rank.work(9 + 2 * rank.number, 3)
    rank.call()
    rank.work(4, 7)
    rank.work(2, 8)
    rank.call(line=20)


@pytest.mark.parametrize(("number", "until", "lines"), [(0, True, [7, 8]), (1, False, [STUCK_LINE, 3])])
def test_where_a_rank_was_before_its_last_call_and_since(number, until, lines, tmp_path):
    events = [(14, "stands", 1)] if number else [(17, "freezes", 1)]
    World(tmp_path, events, script=works_then_calls, on_hang="kill").run()
    rows = json.loads((tmp_path / "n0" / "watch.json").read_text())["processes"]
    seen = rows[str(min(map(int, rows)) + number)]["before_call"]
    assert (seen["until_ns"] > 0, [line for _, line, _ in seen["lines"]]) == (until, lines)


if __name__ == "__main__":
    parts = [TABLE.read_text().split("\n\n")[0]]
    for name, (options, events, before) in JOBS.items():
        wanted = not sys.argv[1:] or any(word in name for word in sys.argv[1:])
        lines = [
            name,
            *(["with " + " ".join(options)] if options else []),
            *("at " + " ".join(event) for event in events),
        ]
        with tempfile.TemporaryDirectory() as folder:
            parts.append("\n".join([*lines, *(transcript(Path(folder), options, events) if wanted else before)]))
    TABLE.write_text("\n\n".join(parts) + "\n")
