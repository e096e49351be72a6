"""What `tune` tries and predicts, how speed scales, and how two runs differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Place

BASE = "base"  # the settings of the script
AGAIN = "again"  # the settings of the script once more: what differs between the two is noise


class Bound(str, Enum):
    """What the predicted ratio is."""

    RANGE = "range"  # the step is expected between ``low`` and ``high``
    AT_LEAST = "at least"  # the change saves at least so much
    UP_TO = "up to"  # the change saves so much at most


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The step after a change, as a ratio to the present one: 0.8 is a step that is 20 % shorter."""

    setting: str  # which change: "bucket_cap=1048576", "workers=4", "without=straggler"
    change: str  # the same in the user's words
    ratio: float | None = None  # None if it was refused
    low: float | None = None
    high: float | None = None
    bound: Bound = Bound.RANGE
    assumes: str = ""  # what must hold, as a phrase
    reason: str = ""  # why it was refused

    @property
    def gain(self) -> float:
        """The share of the step that is saved, 0 if unknown."""
        return 0.0 if self.ratio is None else 1 - self.ratio


class LaunchKind(str, Enum):
    """What a launch shows."""

    ALONE = "alone"  # one rank with all cores
    SHARE = "share"  # one rank with as many cores and threads as it has among all ranks
    JOB = "job"  # all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaunch:
    """One launch."""

    kind: LaunchKind
    ranks: int  # of a share: among how many ranks it is one
    step_ms: float
    unreduced_ms: float  # the step without any reduction
    rows: float | None = None  # the batch of a rank in a step; None if it was not recorded
    spread_ms: float = 0.0  # standard deviation, over ranks and steps, of the time that a rank needs for itself
    noise: float = 0.0  # how far the ratio of the script's settings to themselves reaches from 1


class ScalingKind(str, Enum):
    """What grew with the number of ranks. The batch per rank decides."""

    WEAK = "weak"  # the batch of a rank stayed the same
    STRONG = "strong"  # the total batch stayed the same
    NEITHER = "neither"
    UNKNOWN = "unknown"  # The batch was not recorded. Taken for weak.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """The efficiency at one size, and its factors: ``efficiency = threads * contention * communication``."""

    ranks: int
    kind: ScalingKind
    step_ms: float
    rows: float | None
    efficiency: float  # samples per second of a rank, as a share of those of one rank that has all cores
    threads: float  # what a rank's own share of the cores and threads costs
    contention: float  # what the other ranks' use of memory, caches and cores costs
    communication: float  # What reductions and waiting for other ranks cost. DDP changes this factor only.
    noise: float  # smaller differences mean nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSize:
    """A number of ranks that was not run."""

    ranks: int
    low_ms: float
    high_ms: float  # the step by the better and the worse of ring and tree
    waiting_ms: float  # in it: waiting that comes with the spread of the ranks' own times
    low: float
    high: float  # the efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingResult:
    """What the launches showed."""

    launches: tuple[ScalingLaunch, ...]
    rows: tuple[ScalingRow, ...]
    predicted: tuple[PredictedSize, ...] = ()
    reason: str = ""  # why nothing is predicted
    spread: float = 0.0  # of the ranks' own times, as a share of the step
    measured_ranks: int = 0  # the most ranks at which it was measured
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeed:
    """One of the two runs."""

    name: str  # the path that the user gave
    wall_ms: float  # the mean step
    count: int  # steps of the whole run
    status: str  # how the job ended: "finished", "hung"
    ranks: int | None
    samples_per_s: float | None
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """How much longer something takes per step in the second run. ``low_ms`` to ``high_ms`` is the 95 % interval."""

    first_ms: float
    second_ms: float
    low_ms: float
    high_ms: float
    is_change: bool  # the interval excludes zero, and the change is no trifle

    @property
    def change_ms(self) -> float:
        """Return how much longer it takes; negative: it takes less time."""
        return self.second_ms - self.first_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """The change of one phase on the rank that the others wait for."""

    phase: str
    time: TimeChange


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalSetting:
    """A setting that the runs do not share."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """Two runs side by side."""

    first: RunSpeed
    second: RunSpeed
    step: TimeChange
    phases: tuple[PhaseChange, ...]
    unequal: tuple[UnequalSetting, ...]


class Topic(str, Enum):
    """What a difference is about. The order is how significant a difference usually is, the most significant first."""

    VERDICT = "verdict"
    VERSION = "version"
    VARIABLE = "variable"
    SETTING = "setting"
    MACHINE = "machine"
    MODEL = "model"
    DATA = "data"
    BANDWIDTH = "bandwidth"
    PACE = "pace"  # a symptom more often than a cause, so it comes last


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """One thing that differs. A side is empty if that run does not have it."""

    topic: Topic
    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the two runs."""

    name: str  # the path that the user gave
    ended: str  # how it ended: "hung", "no problem found"
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifferences:
    """Two runs and what differs between them, the most significant first."""

    first: ComparedRun
    second: ComparedRun
    differences: tuple[RunDifference, ...]
    compared: tuple[str, ...]  # the topics that both runs have facts about
    not_compared: tuple[str, ...]  # the topics that only one of them has facts about


class TrialStop(str, Enum):
    """How a trial ended. The values are those that the ranks write."""

    DONE = "done"
    NO_STEP = "no optimizer step"
    NO_MODEL = "no model"
    SEVERAL_MODELS = "several models"
    SPAWNED = "spawned"
    CANNOT_SWITCH = "cannot switch"
    FAILED = "failed"
    CUT_SHORT = "cut short"  # the job ended, by itself or not, before the trial did


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBlock:
    """Some steps in a row under one setting."""

    round: int
    setting: str
    ranks_ms: tuple[tuple[float, ...], ...]  # by rank: how long each step took


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """What the ranks of this host recorded of a trial."""

    settings: tuple[str, ...] = ()  # those to try, ``BASE`` and ``AGAIN`` first
    late: tuple[str, ...] = ()  # those that were tried after all others, since they could stop the job
    rounds: int = 0
    blocks: tuple[TriedBlock, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()  # setting and reason
    stop: TrialStop = TrialStop.CUT_SHORT
    reason: str = ""
    models: int = 0  # the number of DDP models, if there were several
    forwards: int = 0  # training forwards in each step; 0 if that varied
    trying: str = ""  # the setting that was tried last
    round: int = 0  # the round in which that was, from 0
    needed_steps: int = 0  # optimizer steps of the whole trial; 0 if the plan was not made
    fits: tuple[str, ...] = ()  # what launches can have from their start, if it was measured
    by_restarts: bool = False  # each block is a launch of its own

    @property
    def has_result(self) -> bool:
        """Whether every setting that is not tried late was tried in every round, or refused."""
        refused = {setting for setting, _ in self.refused}
        done = {(block.setting, block.round) for block in self.blocks}
        tried = [setting for setting in self.settings if setting not in refused]
        wanted = ((setting, number) for setting in tried for number in range(self.rounds))
        return bool(self.settings) and self.rounds > 0 and done.issuperset(wanted)


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
    note: str = ""  # what else it changes, such as the numerics
    rounds: int = 0
    predicted: RatioRange | None = None
    measured: RatioRange | None = None  # the range is the 95 % interval
    reason: str = ""  # why it was not measured
    is_gain: bool = False
    by_restarts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    """What launches of a job try, each with one setting from its start."""

    settings: tuple[str, ...]  # those to try, besides the script's own
    refused: tuple[tuple[str, str], ...] = ()  # what was asked for and cannot be tried: setting and reason
    why: str = ""  # why launches are needed, as a sentence
    launch_s: float = 0.0  # about how long a launch takes


class TuneVerdict(str, Enum):
    """What to do after a trial."""

    CHANGE = "change"
    NOTHING = "nothing"
    NOISY = "noisy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a trial showed."""

    step_ms: float  # the median step under the script's settings
    rounds: int
    noise: RatioRange  # the script's settings against themselves
    rows: tuple[TriedSetting, ...]
    verdict: TuneVerdict
    conclusion: str  # one sentence
    fix: str = ""  # the setting to change, in the words of the framework in use
    where: tuple[Place, ...] = ()  # where the model is built, or batches are taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOutcome:
    """A trial in the report: its result, or why it has none."""

    result: TuneResult | None = None
    problem: str = ""  # why there is no result, if the job itself ended well
    help: str = ""  # what to do about that
    trying: str = ""  # the setting that was tried when the job hung, failed or was interrupted; "" if none was yet
    round: int = 0  # the round in which that was, from 1
    rounds: int = 0
