"""One rank of a trial: join, agree, build, compare, train, compare, report, leave. All end if one fails or hangs."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.consistency import Consistency, What
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.trial import Participant, Trial, TrialSettings
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.probes.consistency import comparing, training
from ddpdoctor.probes.consistency.reference import ReferenceProcess
from ddpdoctor.probes.loading import is_installed
from ddpdoctor.probes.ranks import ABOVE_OURS, LEAVE_LIMIT_S, Ended, meet_ranks, propose, run_agreed, unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from ddpdoctor.model.bandwidth import Member
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.ranks import Ranks

LOOK_EVERY_S = 0.25
# Our choice: how long rank 0 waits for other ranks with the same failure. If all ranks have it, no rank is named.
ALIKE_LIMIT_S = 1.0
PLACES_LIMIT_S = 3.0  # Our choice: how long rank 0 waits for the others to say where they are. Some may be gone.
STATUS_LIMIT_S = 15.0  # our choice: how long the others wait for rank 0's last message


def run_rank(
    launch: Launch,
    env: Mapping[str, str],
    settings: TrialSettings,
    report: Callable[[Trial], int],
    show_error: Callable[[UserError], None],
) -> int:
    """Take part in a trial and return the exit status, which is the same on all ranks.

    ``report`` is called on rank 0: it judges and shows a trial, and returns the exit status. Raises ``UserError`` if
    the ranks cannot connect. Ends the process if a rank fails or makes no progress.
    """
    limit_s = settings.limit_s

    def run(backend: str, members: tuple[Member, ...]) -> int:
        with TrialWatch(ranks, show_error, limit_s) as watch:
            trial = _Run(launch, replace(settings, backend=backend), members, ranks, watch).run()
        return ranks.end(lambda: report(trial) if trial is not None else 0)

    try:
        with meet_ranks(launch, env, meet_limit_s=limit_s, limit_s=2 * limit_s) as ranks:
            own = propose(launch, env, settings)
            # Two builds of one version may compute other bits.
            own = replace(own, asked=own.asked | {"the version of torch": own.member.torch})
            return run_agreed(ranks, own, limit_s, show_error, run)
    except StoreError as error:
        raise unreachable(launch, error) from error


class _Run:
    def __init__(
        self, launch: Launch, settings: TrialSettings, members: tuple[Member, ...], ranks: Ranks, watch: TrialWatch
    ) -> None:
        self._launch, self._settings, self._members = launch, settings, members
        self._ranks, self._watch = ranks, watch
        self._device = torch.device(members[launch.rank].device)
        self._notes: list[str] = []

    def run(self) -> Trial | None:
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
        first = self._build()
        models = self._ranks.gather("model", training.see_model(first.built.module, comparing.GROUP))
        alike = None if models is None else len({model.digest for model in models}) == 1
        if not self._ranks.agree(bool, "alike", alike):
            self._notes.append("DDP was not tried: if models differ, its constructor raises or waits a long time")
            return None if models is None else self._trial(first, models)
        reference = None
        with ExitStack() as opened:
            if self._settings.reference and self._launch.rank == 0:
                dropout = first.built.dropout
                reference = ReferenceProcess(self._settings, self._launch.world_size, self._device, dropout)
                opened.callback(reference.close)
            own, steps = self._train(first, "", reference)
        rerun = None
        if self._settings.twice:  # build and train again, and compare with the first run on each rank
            second, _ = self._train(self._build(), "-again", None)
            reruns = self._ranks.gather("rerun", comparing.compare_runs(own, second, self._launch.rank))
            rerun = None if reruns is None else comparing.merge_reruns(reruns)
        if models is None or steps is None:
            return None
        streams = comparing.compare_steps(steps)
        return replace(
            self._trial(first, models),
            consistency=Consistency(check_every=1, streams=streams, allowed=self._settings.allow_different),
            reference=None if reference is None else reference.result,
            rerun=rerun,
        )

    def _build(self) -> training.Training:
        self._watch.mark("building the model")
        settings, launch = self._settings, self._launch
        built = training.build_seeded(settings, self._device)
        return training.Training(settings, built, launch.rank, launch.world_size, self._device, self._watch.mark)

    def _train(
        self, replica: training.Training, run: str, reference: ReferenceProcess | None
    ) -> tuple[comparing.RunRecord, list[tuple[comparing.StepRecord, ...]] | None]:
        """Make all steps. Return this rank's record, and on rank 0 the records of all ranks, step by step."""
        module = replica.built.module
        built = comparing.digest_rows(comparing.model_rows(module, What.PARAMETER, What.BUFFER))
        all_built = self._ranks.gather(f"built{run}", comparing.RunRecord(built=built, records=()))
        if all_built is not None and not run and (note := describe_built([record.built for record in all_built])):
            self._notes.append(note)
        replica.wrap()
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

    def _trial(self, replica: training.Training, models: Any) -> Trial:
        names = [field.name for field in fields(Participant)]
        return Trial(
            settings=self._settings, models=models, optimizer=type(replica.built.optimizer).__name__,
            participants=tuple(Participant(**{name: getattr(each, name) for name in names}) for each in self._members),
            batch=replica.batches.words, loss=replica.steps.words, notes=tuple(self._notes),
        )  # fmt: skip


def describe_built(built: Sequence[Sequence[comparing.TensorDigest]]) -> str:
    """Return which parameters were built with different values across ranks, or "". ``built`` is in rank order."""
    (splits,) = comparing.split(dict(enumerate(built)), [What.PARAMETER])
    if not splits:
        return ""
    sides = " and ".join(rank_list(side) for side in splits[0].sides[:2])
    return (
        f"built with one seed, {len(splits)} parameters differed between ranks, such as {splits[0].row.name} "
        f"({sides}); DDP's constructor gave all ranks those of rank 0"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWord:
    """A rank's report when a trial cannot continue: why, or where it was."""

    rank: int
    message: str
    help: str = ""
    status: int = ExitStatus.INCONCLUSIVE
    still: bool = False  # nothing failed, but a rank made no progress


class TrialWatch:
    """A context manager. Its thread ends this rank if a phase takes ``limit_s``, or if another rank fails."""

    def __init__(self, ranks: Ranks, show_error: Callable[[UserError], None], limit_s: float) -> None:
        self._conversation, self._show = ranks.conversation, show_error
        self._rank, self._size = ranks.rank, ranks.world_size
        self._phase, self._since, self._limit_s, self._times = "its start", time.monotonic(), limit_s, 1
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Stop watching. After an error, unless the store is lost, all ranks end instead."""
        if isinstance(error, Exception) and not isinstance(error, StoreError):
            if not isinstance(error, UserError):
                message = f"internal error in ddpdoctor: {type(error).__name__}: {error}"
                error = UserError(message, status=ExitStatus.DEFECT)
            self._raise(TrialWord(rank=self._rank, message=error.message, help=error.help, status=error.status))
            self._thread.join(timeout=2 * STATUS_LIMIT_S)
            os._exit(error.status)
        self._over.set()
        self._thread.join(timeout=2 * STATUS_LIMIT_S)

    def mark(self, phase: str, *, times: int = 1) -> None:
        self._phase, self._times, self._since = phase, times, time.monotonic()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                if self._conversation.news().alarm:
                    self._end()
            except StoreError:
                return  # the main thread will notice by itself
            if self._limit_s and time.monotonic() - self._since > self._times * self._limit_s:
                self._raise(
                    TrialWord(
                        rank=self._rank,
                        message=f"the ranks made no progress for {self._limit_s:g} s",
                        help="Run the script under `ddpdoctor wrap`, which names the rank at fault. --timeout gives "
                        "ranks more time.",
                        still=True,
                    )
                )

    def _raise(self, trouble: TrialWord) -> None:
        with suppress(StoreError):
            self._conversation.send(f"trouble/{self._rank}", trouble)
            self._conversation.raise_alarm(trouble)

    def _end(self) -> None:
        trouble = self._conversation.alarm(TrialWord)
        if trouble.still:
            stack = walk_stack(sys._current_frames()[self._main])  # noqa: SLF001 - the documented way to a stack
            codes = ((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack)
            own = next((f", at {file}:{line} in {name}" for file, line, name in codes if not is_installed(file)), "")
            self._conversation.send(f"place/{self._rank}", TrialWord(rank=self._rank, message=f"in {self._phase}{own}"))
        if self._rank == 0:
            # On rank 0: show the trouble to the user, then send the others the status
            name, limit_s = ("place", PLACES_LIMIT_S) if trouble.still else ("trouble", ALIKE_LIMIT_S)
            heard = self._conversation.gather(TrialWord, name, lambda: range(self._size), limit_s)
            self._show(UserError(describe_trouble(trouble, heard, self._size), help=trouble.help))
            self._conversation.say_goodbye(Ended(status=int(trouble.status)), lambda: self._size - 1, LEAVE_LIMIT_S)
        else:
            with suppress(StoreError):
                self._conversation.hear_goodbye(Ended, STATUS_LIMIT_S)
        sys.stderr.flush()
        os._exit(trouble.status)


def describe_trouble(trouble: TrialWord, heard: Mapping[int, TrialWord], size: int) -> str:
    """Return what went wrong, on which ranks or, if nothing failed, where each rank was; which were silent then too."""
    alike = grouped((heard[rank].message, rank) for rank in sorted(heard))
    if not trouble.still:
        ranks = alike.get(trouble.message, [])
        return trouble.message if len(ranks) == size else f"{rank_list(ranks)}: {trouble.message}"
    places = [f"{rank_list(ranks)} {place}" for place, ranks in alike.items()]
    silent = [rank for rank in range(size) if rank not in heard]
    places += [f"no message from {rank_list(silent)}"] if heard and silent else []
    return "; ".join([trouble.message, *places])
