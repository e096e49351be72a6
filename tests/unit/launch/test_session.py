"""A failure of ddpdoctor's own changes nothing about the job, and is said while the job runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.launch.hang import Examining
from ddpdoctor.launch.placement import Placement, Style, WrapOptions
from ddpdoctor.launch.session import JobOutcome, Notifier, Session
from ddpdoctor.model.findings import Check, Judgment, Outcome
from ddpdoctor.recorder.settings import RecorderSettings

WAITS_FOR_A_FILE = "import pathlib, sys, time\nwhile not pathlib.Path({file!r}).exists(): time.sleep(0.02)\nsys.exit(7)"
FAILS = "import sys; sys.exit(7)"
FAILS_WHEN_ENDED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
"""As if somebody ended the job: whoever started this gets the signal first."""


def options(folder: Path, *command: str) -> WrapOptions:
    return WrapOptions(
        hang_timeout_s=1.0, on_hang="auto", debug_level=None, report_dir=folder, report_file=folder / "report.json",
        placement=Placement(style=Style.COMMAND), format="text", quiet=False, ignore=(), ranks=RecorderSettings(),
        allow_different=(), torchrun_args=(), script=command[0], is_module=False, is_command=True, no_python=False,
        script_args=command[1:], nproc_note=None, command=command, speed=False,
    )  # fmt: skip


def cannot_import() -> None:
    raise ImportError("code was replaced")


def crashes(*_: Any) -> Judgment:
    check = Check(id="stuck", code="DD603", outcome=Outcome.CRASHED, seen="ImportError: code was replaced")
    return Judgment(findings=(), checks=(check, check), certain=False)


def raises(*_: Any) -> Judgment:
    raise ImportError("code was replaced")


@pytest.mark.parametrize(
    ("load_judge", "said", "fails"),
    [
        (cannot_import, "ImportError('code was replaced')", True),
        (lambda: raises, "ImportError('code was replaced')", True),
        (lambda: crashes, "DD603 stuck: ImportError: code was replaced", False),
    ],
    ids=["rules that cannot be loaded", "a judge that raises", "a rule that crashes"],
)
def test_a_job_that_cannot_be_judged_goes_on_and_that_is_said_once(
    load_judge: Any, said: str, tmp_path: Path, *, fails: bool
) -> None:
    reported: list[str] = []
    saved: list[JobOutcome] = []
    release = tmp_path / "release"

    def hear(what: str) -> None:
        reported.append(what)
        release.touch()

    ignore = {name: lambda *_: None for name in ("started", "show", "go_on", "withdraw", "report_replicas")}
    notifier = Notifier(save=saved.append, report_crash=hear, **ignore)  # type: ignore[arg-type]
    command = (sys.executable, "-c", WAITS_FOR_A_FILE.format(file=str(release)))
    folder = tmp_path / "run"
    folder.mkdir()
    outcome = Session(options(folder, *command), load_judge, notifier).run()
    assert reported == [said]
    assert outcome.exit_status == 7
    assert (outcome.failure is not None) == fails


def test_who_interrupts_a_job_gets_that_status_though_another_node_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Judgment(findings=(), checks=(), certain=True)
    monkeypatch.setattr(Examining, "take_stop", lambda _: stop)
    ignore = {name: lambda *_: None for name in ("started", "show", "go_on", "withdraw", "report_replicas", "save")}
    notifier = Notifier(report_crash=lambda _: None, **ignore)  # type: ignore[arg-type]
    folder = tmp_path / "run"
    folder.mkdir()
    statuses = [
        Session(options(folder, sys.executable, "-c", code), lambda: lambda *_: stop, notifier).run().exit_status
        for code in (FAILS, FAILS_WHEN_ENDED)
    ]
    assert statuses == [124, 7]
