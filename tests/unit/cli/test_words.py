"""What is typed, and what the command line prints while it works."""

import errno
import fcntl
import io
import os
import struct
import tempfile
import termios
from functools import partial

import pytest

from ddpdoctor.cli import options
from ddpdoctor.cli.actions import Entry, _write
from ddpdoctor.cli.app import came_of_interrupt
from ddpdoctor.cli.demo import FAULTS, describe, read_script
from ddpdoctor.cli.mcp import answer
from ddpdoctor.cli.output import LiveText, ShownProgress, has_color, read_width, say, write
from ddpdoctor.cli.running import after_the_job
from ddpdoctor.cli.verbs import read_command_line
from ddpdoctor.launch.session import JobOutcome
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import JobEnd, Logger
from ddpdoctor.model.findings import Judgment
from tests.golden import words
from tests.needs import need_module

# What ends the command, and with which status.


class Struck:
    """A part of a class, in the making of which Ctrl-C strikes."""

    def __set_name__(self, owner, name):
        raise KeyboardInterrupt


def test_an_interrupt_is_one_as_a_class_is_made_and_before_another_error():
    # A RuntimeError before Python 3.12.
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one depends on the version
        type("Made", (), {"part": Struck()})
    assert came_of_interrupt(caught.value)
    ended, defect = OSError("gone"), RuntimeError("b")
    ended.__context__, defect.__cause__ = KeyboardInterrupt(), KeyError("a")
    assert [came_of_interrupt(error) for error in (ended, defect)] == [True, False]


FAILURES = {
    "an update": (ImportError("gone"), None, "was updated or removed while the job ran"),
    "no space": (OSError(errno.ENOSPC, "No space left on device"), None, "No space left on device. The exit status is"),
    "a damaged record": (UserError("it is damaged", help="Copy it."), None, "it is damaged"),
    "a defect": (TypeError("bad"), None, "internal error in ddpdoctor: TypeError"),
    "a run folder that is gone": (TypeError("bad"), "run.json", "was removed while the job ran"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_after_the_job_is_said_once_and_changes_no_status(case, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failure, removed, said = FAILURES[case]
    (tmp_path / "run.json").write_text("{}")
    end = JobEnd(hung=False, interrupted=False, exit_status=0, started_at="", ended_at="")
    judgment = Judgment(findings=(), checks=(), certain=False)
    outcome = JobOutcome(folder=tmp_path, run_dir=tmp_path, judgment=judgment, end=end, failure=None)
    taken = []

    def fail():
        if removed is not None:
            (tmp_path / removed).unlink(missing_ok=True)
        raise failure

    ended = after_the_job(outcome, fail, lambda: taken.append(1), lambda: 1 / 0)
    assert (ended.exit_status, ended.failure, taken) == (0, failure, [1])
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert shown.count("internal error") == (case == "a defect")
    assert after_the_job(ended, fail) == ended  # it was said
    assert capsys.readouterr().err == ""


# The demo's scripts: complete, described, with one marked fault each.


@pytest.mark.parametrize("fault", FAULTS)
def test_each_script_is_valid_and_marks_its_fault_once(fault):
    source = read_script(fault)
    compile(source, fault, "exec")
    assert source.count("# the fault") == 1
    assert describe(fault).endswith(".")
    assert len(describe(fault)) < 110


# A text that is shown again and again: in place on a terminal, one after the other elsewhere.


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 93 columns to write to, and what reads all that was written."""
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 93, 0, 0))
    stream = os.fdopen(writer, "w")

    def read():
        stream.close()
        text = b""
        while True:
            try:
                text += os.read(reader, 65536)
            except OSError:  # Linux's way to say that the other side is closed
                return text.decode()

    yield stream, read
    stream.close()
    os.close(reader)


def test_on_a_terminal_the_next_text_takes_the_place_of_the_one_before(terminal):
    stream, read = terminal
    with LiveText(stream, in_place=True) as screen:
        assert screen.show("step 1\nrank \x1b[1m0\x1b[0m [/dev/shm]\n")
        assert screen.show("step 2\nrank 0\n")
    before, _, _ = read().partition("step 2")
    assert "step 1" in before
    assert "[/dev/shm]" in before  # what looks like markup stays as it is
    assert "\x1b[1A" in before.partition("step 1")[2]


def test_in_a_pipe_texts_have_an_empty_line_between_them_and_objects_are_lines():
    for in_place, texts, shown in ((True, ("one\n", "two\n"), "one\n\ntwo\n"), (False, ("{}\n",) * 2, "{}\n{}\n")):
        stream = io.StringIO()
        with LiveText(stream, in_place=in_place) as screen:
            for text in texts:
                screen.show(text)
        assert stream.getvalue() == shown


# ``--log-findings`` where a log cannot be written: a message that says why.


ENTRY = Entry(verdict="rank 1 died (DD605)", step=7, has_finished=False, text="# report")


def test_a_folder_that_is_gone(tmp_path):
    need_module("tensorboard", extra="tensorboard")
    logger = Logger(name="tensorboard", place={"folder": str(tmp_path / "gone")})
    assert _write(logger, ENTRY) == f"tensorboard did not log the findings: its folder {tmp_path / 'gone'} is gone"


@pytest.mark.full
def test_a_run_that_is_gone(tmp_path, monkeypatch):
    need_module("mlflow", extra="mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = {"folder": str(tmp_path), "id": "no-such-run", "tracking_uri": (tmp_path / "store").as_uri()}
    problem = _write(Logger(name="mlflow", place=place), ENTRY)
    assert problem.startswith("mlflow did not log the findings: ")
    assert "no-such-run" in problem


def test_a_library_that_is_not_installed(tmp_path, monkeypatch):
    """The child's Python finds a wandb that cannot be imported."""
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = {"folder": str(tmp_path), "id": "run7", "project": "faces", "entity": "", "mode": "offline", "base_url": ""}
    problem = _write(Logger(name="wandb", place=place), ENTRY)
    assert problem.startswith("wandb is not installed for ")
    assert problem.endswith(": pip install wandb")


# What a tool of the server says of a defect.


def test_a_defect_is_an_error_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    error = answer("report", {"another": 3})["error"]
    assert "internal error in ddpdoctor: TypeError" in error
    assert "github.com/ddpdoctor" in error
    assert "Traceback" not in error
    (saved,) = tmp_path.glob("ddpdoctor-defect-*.txt")
    assert "TypeError" in saved.read_text()
    assert str(saved) in error


# What a stream can show.


def test_a_terminal_has_a_width_and_colors_and_a_pipe_has_neither(terminal):
    stream, _ = terminal
    colors = {"": True, "NO_COLOR=": True, "NO_COLOR=1": False, "TERM=dumb": False}
    assert {text: has_color(stream, dict([text.split("=")] if text else [])) for text in colors} == colors
    assert not has_color(io.StringIO(), {"TERM": "xterm"})
    assert (read_width(stream), read_width(io.StringIO())) == (93, None)


def test_what_the_stream_cannot_say_is_escaped_and_a_line_of_ours_says_whose_it_is():
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, encoding="latin-1")
    write(narrow, "größe → \udcff\n")
    assert raw.getvalue() == "größe ".encode("latin-1") + b"\\u2192 \\udcff\n"
    stream = io.StringIO()
    say(stream, "a\x1b[31mb")
    assert stream.getvalue() == "ddpdoctor: a\\x1b[31mb\n"


# A bar on a terminal, and nothing anywhere else.


def test_a_terminal_shows_what_is_measured_and_the_time_left(terminal):
    stream, read = terminal
    with ShownProgress(stream, wanted=True) as progress:
        progress.show("all_reduce [float32] 1 MiB", 0.5, 75.0)
    text = read()
    assert "all_reduce [float32] 1 MiB" in text
    assert "1 min 15 s left" in text
    assert "\x1b[2K" in text  # it is taken away in the end


def test_other_ranks_and_streams_show_nothing_and_nobody_does_after_it_was_stopped(terminal):
    stream, read = terminal
    pipe = io.StringIO()
    for shown in (ShownProgress(stream, wanted=False), ShownProgress(pipe, wanted=True)):
        with shown as progress:
            progress.show("all_reduce", 0.5, None)
    with ShownProgress(stream, wanted=True) as progress:
        progress.stop()
        progress.show("all_reduce", 0.5, 3.0)
    assert (read(), pipe.getvalue()) == ("", "")


@pytest.mark.parametrize(
    ("words", "rank", "is_shown"),
    [("check-env shm", None, True), ("check-env shm", "1", False), ("explain DD601", None, False),
     ("check-consistency", None, False), ("check-consistency", "0", True), ("allreduce-bench", "0", True)],
)  # fmt: skip
def test_a_slow_command_says_what_it_does_until_its_first_output(terminal, monkeypatch, words, rank, is_shown):
    """Of several ranks the first does, and not the process that starts them."""
    stream, read = terminal
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.stderr", stream)
    read_command_line(words.split())
    say(stream, "done")
    before, _, after = read().partition("ddpdoctor: done")
    assert (f"ddpdoctor {words.split()[0]}: " in before, "\x1b[2K" in before, after.strip()) == (is_shown, is_shown, "")


# Values as people type them.


PARSERS = {name: parse for name, parse in vars(options).items() if name.startswith("parse_")}
test_words = words(__name__, **{name: partial(parse, option="--it") for name, parse in PARSERS.items()})
