"""One rank of a trial from start to end: meet, agree, build, compare, train, compare, report, leave.

A rank that fails or stops progressing ends the trial: all ranks exit with one status and say where each was.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.trial import Participant, Trial, TrialSettings
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.probes.consistency import comparing, training
from ddpdoctor.probes.consistency.reference import ReferenceProcess
from ddpdoctor.probes.loading import is_installed, load_callable
from ddpdoctor.probes.ranks import ABOVE_OURS, LEAVE_LIMIT_S, Ended, meet_ranks, propose, run_agreed, unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.ranks import Ranks

Kind = TypeVar("Kind")
LOOK_EVERY_S = 0.25
# Our choice: how long rank 0 waits for other ranks with the same failure. If all ranks have it, no rank is named.
ALIKE_LIMIT_S = 1.0
PLACES_LIMIT_S = 3.0  # Our choice: how long rank 0 waits for the others to say where they are. Some may be gone.
STATUS_LIMIT_S = 15.0  # our choice: how long the others wait for rank 0's last message


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """What the command line hands to a rank."""

    launch: Launch
    env: Mapping[str, str]
    settings: TrialSettings
    report: Callable[[Trial], int]  # called on rank 0: judges and shows a trial, and returns the exit status
    show_error: Callable[[UserError], None]


def run_rank(job: TrialTask) -> int:
    """Take part in a trial and return the exit status, which is the same on all ranks.

    Raises ``UserError`` if the ranks cannot meet. Ends the process if a rank fails or makes no progress.
    """
    settings = job.settings
    limit_s = settings.limit_s
    try:
        with meet_ranks(job.launch, job.env, meet_limit_s=limit_s, limit_s=2 * limit_s) as ranks:
            own = propose(job.launch, job.env, settings)
            # Two builds of one version may compute other bits.
            own = replace(own, asked=own.asked | {"the version of torch": own.member.torch})
            return run_agreed(
                ranks,
                own,
                limit_s,
                job.show_error,
                lambda backend, members: _run(job, replace(settings, backend=backend), members, ranks),
            )
    except StoreError as error:
        raise unreachable(job.launch, error) from error


def _run(job: TrialTask, settings: TrialSettings, members: tuple[Member, ...], ranks: Ranks) -> int:
    with TrialWatch(ranks, job.show_error, settings.limit_s) as watch:
        try:
            trial = _Run(job, settings, members, ranks, watch).run()
        except UserError as error:
            watch.fail(error)
            raise
        except StoreError:
            raise
        except Exception as error:
            watch.fail(
                UserError(f"internal error in ddpdoctor: {type(error).__name__}: {error}", status=ExitStatus.DEFECT)
            )
            raise
    return ranks.end(lambda: job.report(trial) if trial is not None else 0)


class _Run:
    def __init__(
        self, job: TrialTask, settings: TrialSettings, members: tuple[Member, ...], ranks: Ranks, watch: TrialWatch
    ) -> None:
        import torch

        self._launch, self._settings, self._members = job.launch, settings, members
        self._ranks, self._watch = ranks, watch
        self._device = torch.device(members[job.launch.rank].device)
        self._notes: list[str] = []

    def run(self) -> Trial | None:
        """Return the trial's facts on rank 0, None on the others."""
        from torch import distributed

        self._watch.mark("the process group")
        backend, limit_s = self._settings.backend, self._settings.limit_s
        device = self._members[self._launch.rank].device
        store = self._ranks.open_process_group(backend, device, limit_s, ABOVE_OURS * limit_s)
        trial = self._try()
        # The DDP model is in a cycle with its hooks. If it outlives its group, it can deadlock with a thread of Gloo.
        gc.collect()
        distributed.destroy_process_group()
        del store
        return trial

    def _try(self) -> Trial | None:
        setting, dropout = self._build()
        models = self._ranks.gather("model", training.see_model(setting.built.module, comparing.GROUP))
        alike = None if models is None else len({one.digest for one in models}) == 1
        if not self._ranks.agree(bool, "alike", alike):
            self._notes.append("DDP was not tried: with models that differ its constructor raises, or waits for long")
            return None if models is None else self._trial(setting, models)
        reference = None
        with ExitStack() as opened:
            if self._settings.reference and self._launch.rank == 0:
                reference = ReferenceProcess(self._settings, self._launch.world_size, self._device, dropout)
                opened.callback(reference.close)
            own, steps = self._train(setting, "", reference)
        rerun = None
        if self._settings.twice:  # build and train again, and compare with the first run on each rank
            second, _ = self._train(self._build()[0], "-again", None)
            reruns = self._ranks.gather("rerun", comparing.compare_runs(own, second, self._launch.rank))
            rerun = None if reruns is None else comparing.merge_reruns(reruns)
        if models is None or steps is None:
            return None
        return replace(
            self._trial(setting, models),
            consistency=Consistency(
                check_every=1, streams=comparing.compare_steps(steps), allowed=self._settings.allowed
            ),
            reference=None if reference is None else reference.result,
            rerun=rerun,
        )

    def _build(self) -> tuple[training.TrainingSetup, int]:
        self._watch.mark("building the model")
        settings = self._settings
        training.set_seed(settings.seed, training.BUILD)
        built = training.build(load_callable(settings.model, "--model"), settings.model, self._device)
        dropout = training.quiet_dropout(built.module) if settings.reference else 0
        setting = training.TrainingSetup(
            settings=settings, rank=self._launch.rank, world_size=self._launch.world_size, device=self._device,
            built=built, batches=training.choose_batches(settings, built.module, self._device),
            steps=training.TrainingStep(settings.step, built.loss_fn), mark=self._watch.mark,
        )  # fmt: skip
        return setting, dropout

    def _train(
        self, setting: training.TrainingSetup, run: str, reference: ReferenceProcess | None
    ) -> tuple[comparing.RunRecord, list[tuple[comparing.StepRecord, ...]] | None]:
        """Make all steps. Return this rank's record, and on rank 0 the records of all ranks, step by step."""
        module = setting.built.module
        built = comparing.digest_rows([*comparing.parameter_rows(module), *comparing.buffer_rows(module)])
        all_built = self._ranks.gather(f"built{run}", comparing.RunRecord(built=built, records=()))
        if all_built is not None and not run and (note := describe_built([one.built for one in all_built])):
            self._notes.append(note)
        replica = training.Training(setting)
        own: list[comparing.StepRecord] = []
        steps: list[tuple[comparing.StepRecord, ...]] = []
        for step in range(1, self._settings.steps + 1):
            with reference.keeping(module) if reference is not None else nullcontext():
                loss = replica.compute(step)
            record = replica.finish(step, loss)
            own.append(record)
            self._watch.mark(f"step {step}: the comparison")
            records = self._ranks.gather(f"record{run}/{step}", record)
            if records is not None:
                steps.append(records)
            if self._settings.reference and not run:
                # One process computes the step while the ranks wait. It may take as long as all ranks together.
                self._watch.mark(f"step {step}: the reference", times=6 + 6 * self._launch.world_size)
                if reference is not None and records is not None:
                    reference.ask(step, records)
                self._ranks.agree(int, f"asked/{step}", step if self._launch.rank == 0 else None)
        return comparing.RunRecord(built=built, records=tuple(own)), steps if self._launch.rank == 0 else None

    def _trial(self, setting: training.TrainingSetup, models: Any) -> Trial:
        names = [one.name for one in fields(Participant)]
        return Trial(
            settings=self._settings, models=models, optimizer=type(setting.built.optimizer).__name__,
            participants=tuple(Participant(**{name: getattr(one, name) for name in names}) for one in self._members),
            batch=setting.batches.words, loss=setting.steps.words, notes=tuple(self._notes),
        )  # fmt: skip


def describe_built(built: Sequence[Sequence[comparing.TensorDigest]]) -> str:
    """Return which parameters were built with other values on other ranks, or "". ``built`` is in rank order."""
    (splits,) = comparing.split(dict(enumerate(built)), [What.PARAMETER])
    if not splits:
        return ""
    sides = " and ".join(rank_list(side) for side in splits[0].sides[:2])
    return (
        f"built with one seed, {len(splits)} parameters had other values on other ranks, as {splits[0].row.name} "
        f"({sides}); DDP's constructor gave all rank 0's"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTrouble:
    """Why a trial cannot go on."""

    rank: int
    message: str
    help: str
    status: int
    still: bool = False  # nothing failed, but a rank made no progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank was when the trial was ended."""

    rank: int
    phase: str
    line: str  # the innermost line of the user's code, or "" if there is none


class TrialWatch:
    """A context manager. Its thread ends this rank if it makes no progress or if another rank fails."""

    def __init__(self, ranks: Ranks, show_error: Callable[[UserError], None], limit_s: float) -> None:
        """``show_error`` shows an error to the user. One phase may take ``limit_s``."""
        self._conversation, self._show = ranks.conversation, show_error
        self._rank, self._size = ranks.rank, ranks.world_size
        self._phase, self._since, self._limit_s, self._times = "its start", time.monotonic(), limit_s, 1
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=2 * STATUS_LIMIT_S)

    def mark(self, phase: str, *, times: int = 1) -> None:
        """Start a new phase, which may take ``times`` as long as usual."""
        self._phase, self._times, self._since = phase, times, time.monotonic()

    def fail(self, error: UserError) -> None:
        """End all ranks because of an error here, unless another rank failed first. Does not return."""
        self._raise(TrialTrouble(rank=self._rank, message=error.message, help=error.help, status=error.status))
        self._thread.join(timeout=2 * STATUS_LIMIT_S)
        os._exit(error.status)

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                if self._conversation.news().alarm:
                    self._end()
            except StoreError:
                return  # the main thread will notice by itself
            if self._limit_s and time.monotonic() - self._since > self._times * self._limit_s:
                self._raise(
                    TrialTrouble(
                        rank=self._rank,
                        message=f"the ranks made no progress for {self._limit_s:g} s",
                        help="Run the script under `ddpdoctor wrap`, which names the rank at fault. --timeout gives "
                        "ranks more time.",
                        status=ExitStatus.INCONCLUSIVE,
                        still=True,
                    )
                )

    def _raise(self, trouble: TrialTrouble) -> None:
        with suppress(StoreError):
            self._conversation.send(f"trouble/{self._rank}", trouble)
            self._conversation.raise_alarm(trouble)

    def _end(self) -> None:
        trouble = self._conversation.alarm(TrialTrouble)
        if trouble.still:
            stack = walk_stack(sys._current_frames()[self._main])  # noqa: SLF001 - the documented way to a stack
            codes = ((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack)
            own = next((f"{file}:{line} in {name}" for file, line, name in codes if not is_installed(file)), "")
            self._conversation.send(f"place/{self._rank}", RankPlace(rank=self._rank, phase=self._phase, line=own))
        if self._rank == 0:
            # On rank 0: show the trouble to the user, then send the others the status
            if trouble.still:
                places = self._gather(RankPlace, "place", PLACES_LIMIT_S)
                said = "; ".join([trouble.message, *describe_places(places, self._size)])
            else:
                troubles = self._gather(TrialTrouble, "trouble", ALIKE_LIMIT_S)
                alike = [one.rank for one in troubles if one.message == trouble.message]
                said = trouble.message if len(alike) == self._size else f"{rank_list(alike)}: {trouble.message}"
            self._show(UserError(said, help=trouble.help))
            self._conversation.say_goodbye(Ended(status=int(trouble.status)), lambda: self._size - 1, LEAVE_LIMIT_S)
        else:
            with suppress(StoreError):
                self._conversation.hear_goodbye(Ended, STATUS_LIMIT_S)
        sys.stderr.flush()
        os._exit(trouble.status)

    def _gather(self, kind: type[Kind], name: str, limit_s: float) -> list[Kind]:
        """Return what the ranks sent within the limit, in rank order."""
        found = self._conversation.gather(kind, name, lambda: range(self._size), limit_s)
        return [found[rank] for rank in sorted(found)]


def describe_places(places: Sequence[RankPlace], size: int) -> list[str]:
    """Return where the ranks were, grouped by place, and which ranks did not answer."""
    found = grouped((f"in {one.phase}" + (f", at {one.line}" if one.line else ""), one.rank) for one in places)
    silent = set(range(size)).difference(*found.values())
    said = [f"{rank_list(ranks)} {place}" for place, ranks in found.items()]
    return said + ([f"no message came from {rank_list(silent)}"] if found and silent else [])
