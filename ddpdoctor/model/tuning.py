"""What a trial of settings recorded, and what came of it. Times are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Place

BASE = "base"
"""The settings of the script."""
AGAIN = "again"
"""The settings of the script once more: what differs between the two is noise."""


class TrialStop(str, Enum):
    """How a trial ended. The values are those that the ranks write."""

    DONE = "done"
    NO_STEP = "no optimizer step"
    NO_MODEL = "no model"
    SEVERAL_MODELS = "several models"
    SPAWNED = "spawned"
    CANNOT_SWITCH = "cannot switch"
    FAILED = "failed"
    CUT_SHORT = "cut short"
    """The job ended, by itself or not, before the trial did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBlock:
    """Some steps in a row under one setting."""

    round: int
    setting: str
    ranks_ms: tuple[tuple[float, ...], ...]
    """By rank: how long each step took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """What the ranks of this host recorded of a trial."""

    settings: tuple[str, ...] = ()
    """Those to try, ``BASE`` and ``AGAIN`` first."""
    late: tuple[str, ...] = ()
    """Those that were tried after all others, since they could stop the job."""
    rounds: int = 0
    blocks: tuple[TriedBlock, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Setting and reason."""
    stop: TrialStop = TrialStop.CUT_SHORT
    reason: str = ""
    models: int = 0
    """The number of DDP models, if there were several."""
    forwards: int = 0
    """Training forwards in each step; 0 if that varied."""
    trying: str = ""
    """The setting that was tried last."""
    round: int = 0
    """The round in which that was, from 0."""
    needed_steps: int = 0
    """Optimizer steps of the whole trial; 0 if the plan was not made."""
    fits: tuple[str, ...] = ()
    """Settings that launches of this job can have from their start. Known if its own settings were measured alone."""
    by_restarts: bool = False
    """Each block is a launch of its own."""

    @property
    def has_result(self) -> bool:
        """Whether every setting that is not tried late was tried in every round, or refused."""
        refused = {setting for setting, _ in self.refused}
        done = {(block.setting, block.round) for block in self.blocks}
        wanted = ((one, number) for one in self.settings if one not in refused for number in range(self.rounds))
        return bool(self.settings) and self.rounds > 0 and all(pair in done for pair in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRange:
    """The step time under a setting, as a ratio to that under the script's settings, with a range."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSetting:
    """One row of the table."""

    setting: str
    title: str
    note: str = ""
    """What else it changes, such as the numerics."""
    rounds: int = 0
    predicted: RatioRange | None = None
    measured: RatioRange | None = None
    """The range is the 95 % interval."""
    reason: str = ""
    """Why it was not measured."""
    is_gain: bool = False
    by_restarts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    """What launches of a job try, each with one setting from its start."""

    settings: tuple[str, ...]
    """Those to try, besides the script's own."""
    refused: tuple[tuple[str, str], ...] = ()
    """What was asked for and cannot be tried: setting and reason."""
    why: str = ""
    """Why launches are needed, as a sentence."""
    launch_s: float = 0.0
    """About how long a launch takes."""


class TuneVerdict(str, Enum):
    """What to do after a trial."""

    CHANGE = "change"
    NOTHING = "nothing"
    NOISY = "noisy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a trial showed."""

    step_ms: float
    """The median step under the script's settings."""
    rounds: int
    noise: RatioRange
    """The script's settings against themselves."""
    rows: tuple[TriedSetting, ...]
    verdict: TuneVerdict
    conclusion: str
    """One sentence."""
    fix: str = ""
    """The setting to change, in the words of the framework in use."""
    where: tuple[Place, ...] = ()
    """The line to change: where the DDP model is built, or where batches are taken from the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOutcome:
    """A trial as the report has it: its result, or why there is none."""

    result: TuneResult | None = None
    problem: str = ""
    """Why there is no result, if the job itself ended well."""
    help: str = ""
    """What to do about that."""
    trying: str = ""
    """The setting that was tried when the job hung, failed or was interrupted; "" if none was yet."""
    round: int = 0
    """The round in which that was, from 1."""
    rounds: int = 0
