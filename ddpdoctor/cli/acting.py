"""Acts on a verdict of ``wrap``: runs the user's command, calls a webhook, excludes hosts, and sets the exit status.

Nothing here can harm the job: actions run beside it, have time limits, and their failures only cost a message.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.cli.output import say
from ddpdoctor.cli.webhook import WebhookFormat, call_webhook
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.findings import FaultOrigin, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ddpdoctor.model.findings import Finding, Report

COMMAND_LIMIT_S = 60.0
"""Our choice: a command that runs longer is killed with all that it started."""
END_LIMIT_S = 90.0
"""Our choice: how long the end of ``wrap`` waits for actions that still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOptions:
    """What the user wants to be done with a verdict."""

    on_finding: str | None = None
    """A command for the shell."""
    webhook: str | None = None
    webhook_format: WebhookFormat = "json"
    exclude_file: Path | None = None


@dataclass(slots=True, kw_only=True)
class Actor:
    """Acts once on each verdict of a job."""

    options: ActionOptions
    _done: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _threads: list[threading.Thread] = field(default_factory=list)

    def act(self, report: Report, file: Path) -> None:
        """Start what is wanted for the verdict of a report, which is saved in ``file``. Returns at once."""
        verdict = report.verdict
        if verdict is None or (verdict.code, verdict.ranks) in self._done or not self._is_wanted():
            return
        self._done.add((verdict.code, verdict.ranks))
        thread = threading.Thread(target=self._run, args=(report, verdict, file), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait until all actions have ended, or for the time limit."""
        for thread in self._threads:
            thread.join(END_LIMIT_S)

    def _is_wanted(self) -> bool:
        return bool(self.options.on_finding or self.options.webhook or self.options.exclude_file)

    def _run(self, report: Report, verdict: Finding, file: Path) -> None:
        for act in _actions(self.options, report, verdict, file):
            try:
                problem = act()
            except Exception as error:  # noqa: BLE001 - an action that fails must not cost the job or its report
                problem = f"an action failed: {type(error).__name__}: {error}"
            if problem:
                say(sys.stderr, problem)


def _actions(options: ActionOptions, report: Report, verdict: Finding, file: Path) -> Iterator[Callable[[], str]]:
    """Yield what is wanted, as functions that return a message for the user or an empty string."""
    from ddpdoctor.cli.exclusion import exclude_hosts

    if options.exclude_file is not None:
        yield partial(exclude_hosts, options.exclude_file, report, file)
    if options.on_finding:
        yield partial(run_command, options.on_finding, report, verdict, file)
    if options.webhook:
        yield partial(call_webhook, options.webhook, options.webhook_format, report, file)


def run_command(command: str, report: Report, verdict: Finding, file: Path, limit_s: float = COMMAND_LIMIT_S) -> str:
    """Run the user's command with the report on stdin. Return what went wrong, or an empty string.

    It gets the verdict in variables. What it prints goes to stderr, because stdout belongs to the script.
    """
    from ddpdoctor.report.formats.json_format import render_json

    child = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), env={**os.environ, **verdict_variables(verdict, file)},
        start_new_session=True,
    )  # fmt: skip
    try:
        child.communicate(render_json(report).encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"--on-finding: the command was killed after {limit_s:.0f} s"
    return f"--on-finding: the command ended with status {child.returncode}" if child.returncode else ""


def verdict_variables(verdict: Finding, file: Path) -> dict[str, str]:
    """Return the environment variables that tell a command about a verdict."""
    return {
        "DDPDOCTOR_REPORT": str(file),
        "DDPDOCTOR_CODE": verdict.code,
        "DDPDOCTOR_KIND": verdict.kind,
        "DDPDOCTOR_SEVERITY": verdict.severity.value,
        "DDPDOCTOR_SUMMARY": verdict.summary,
        "DDPDOCTOR_FIX": verdict.fix,
        "DDPDOCTOR_RANKS": ",".join(map(str, verdict.ranks)),
        "DDPDOCTOR_HOSTS": ",".join(verdict.hosts),
        "DDPDOCTOR_ORIGIN": verdict.origin.value if verdict.origin is not None else "",
    }


def status_of_verdict(report: Report, status: int) -> int:
    """Return the exit status for a scheduler: whether to start the job again. A job that succeeded keeps its status."""
    verdict = report.verdict
    if not status or verdict is None or verdict.severity is not Severity.ERROR or verdict.origin is None:
        return status
    return ExitStatus.RETRY if verdict.origin in {FaultOrigin.MACHINE, FaultOrigin.NETWORK} else ExitStatus.GIVE_UP
