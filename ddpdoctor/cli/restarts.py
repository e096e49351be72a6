"""Tries settings by restarts, for ``tune``: what a running job cannot change gets a launch of its own in each round."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.cli.launches import launch_quietly, with_threads
from ddpdoctor.cli.output import say
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.tuning import AGAIN, BASE

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ddpdoctor.launch.command_line import WrapOptions
    from ddpdoctor.launch.session import JobOutcome
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.tuning import RestartPlan, TrialRecord, TriedBlock

    Prepare = Callable[[str, Path], WrapOptions]
    """Prepares a launch with a setting, in a folder."""

INTERRUPTED = "interrupted before it was tried in every round"


class Restarts:
    """The launches of a trial, and what came of them so far."""

    def __init__(self, plan: RestartPlan, rounds: int, folder: Path, prepare: Prepare) -> None:
        self.plan = plan
        self.rounds = rounds
        self.folder = folder
        """The run folder of the first launch. Each other launch has a folder in it."""
        self.prepare = prepare
        self.blocks: list[TriedBlock] = []
        self.refused = dict(plan.refused)
        self.stopped = ""
        """Why no more launches are made."""
        self.status = int(ExitStatus.OK)
        """If the launches were stopped: the exit status of the last one."""

    def run(self) -> TrialRecord:
        """Make all launches, and return what they measured. Ctrl-C ends the one that runs, and no other begins."""
        from ddpdoctor.diagnose.tuning import describe_plan, order_launches, restarts_record

        say(sys.stderr, describe_plan(self.plan, self.rounds))
        launches = order_launches(self.plan, self.rounds)
        try:
            for count, (number, setting) in enumerate(launches, 1):
                if not self.stopped and setting not in self.refused:
                    self._launch(f"launch {count} of {len(launches)}", number, setting)
        except KeyboardInterrupt:
            self.stopped, self.status = INTERRUPTED, ExitStatus.INTERRUPTED
        return restarts_record(self.plan, self.rounds, self.blocks, self.refused, self.stopped)

    def _launch(self, label: str, number: int, setting: str) -> None:
        """Make one launch. A setting under which the job fails is not tried again; without its own, nothing is."""
        from ddpdoctor.diagnose.tuning import read_launch, why_unmeasured, words_of_setting

        say(sys.stderr, f"{label}: {words_of_setting(setting)} (round {number + 1} of {self.rounds})")
        make_report = partial(self._report, setting, number)
        prepared = self.prepare(setting, self.folder / f"round-{number + 1}-{setting.replace('=', '-')}")
        with _threads_of(setting):
            outcome = launch_quietly(prepared, make_report)
        block = None if outcome.end.interrupted else read_launch(outcome.folder, setting, number)
        if block is not None:
            self.blocks.append(block)
            return
        reason = (
            INTERRUPTED if outcome.end.interrupted else why_unmeasured(outcome.folder, make_report(outcome), setting)
        )
        say(sys.stderr, f"{label} has no result: {words_of_setting(setting)}: {reason}")
        if outcome.end.interrupted or setting in {BASE, AGAIN}:
            self.stopped = INTERRUPTED if outcome.end.interrupted else f"{reason}: the script's own settings"
            self.status = outcome.exit_status or ExitStatus.INCONCLUSIVE
        else:
            self.refused[setting] = reason

    def _report(self, setting: str, number: int, outcome: JobOutcome) -> Report:
        from ddpdoctor.diagnose.tuning import build_launch_report

        return build_launch_report(
            outcome.folder, outcome.judgment, outcome.end, setting=setting, number=number, rounds=self.rounds
        )


def _threads_of(setting: str) -> AbstractContextManager[None]:
    name, _, value = setting.partition("=")
    return with_threads(value) if name == "threads" else nullcontext()
