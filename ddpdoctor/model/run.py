"""The records of a whole job in a run folder: its launch (run.json) and its end (end.json)."""

from __future__ import annotations

from dataclasses import dataclass, field

RUN_FORMAT = "ddpdoctor-run"
RUN_VERSION = 1
END_NAME = "end.json"
"""A ``JobEnd``, in the run folder."""
REACHED_NAME = "reached.json"
"""A node's attempts to connect to the other nodes: a list of ``Connecting``."""
RECORD_NAME = "record.json"
"""A ``RecordPlace``, in a run folder whose record is elsewhere while the job runs."""
REPLICAS_NAME = "replicas.json"
"""The comparison of replicas so far, a ``Consistency``, written every few seconds while the job runs."""
MEMBERS_NAME = "members.json"
"""What a member knows of all members while the job runs: a ``NodesSeen``, written every few seconds."""


def attempt_name(stem: str, attempt: int | None = None) -> str:
    """Return the name of a file of a restarted attempt, or (by default) of the last: "watch-0.json", "watch.json"."""
    return f"{stem}.json" if attempt is None else f"{stem}-{attempt}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The launch of a job. `wrap` writes this before it starts anything. None: unknown or not requested."""

    format: str = RUN_FORMAT
    version: int = RUN_VERSION
    command: tuple[str, ...] | None = None
    """Without secrets."""
    started_at: str | None = None
    """ISO 8601, UTC."""
    launched_ns: int | None = None
    """CLOCK_MONOTONIC of this host."""
    hang_timeout_s: float | None = None
    debug_level: str | None = None
    check_every: int | None = None
    """Steps between two comparisons of replicas, 0 for none. None in runs of versions without this comparison."""
    allow_different: tuple[str, ...] = ()
    speed: bool = False
    """The user asked where the time of a step goes."""
    host: str = ""
    torch_version: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of an allow-list."""
    entry: str = "wrap"
    """What started the watch, with its own name for each setting: "wrap", "pytest", "ddpdoctor.watch" or the class of a
    callback."""
    launcher: str | None = None
    """How the ranks are started; "command" if the user's own command starts them."""
    nproc: int | None = None
    """Ranks on this node."""
    nnodes: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    watcher_pid: int | None = None
    """The process of `wrap`."""
    watcher_ticks: int | None = None
    """Its start time, which distinguishes it from a later process with the same pid."""
    run_dir: str = ""
    """The run folder, if this record is elsewhere while the job runs. Only then does its ``RecordPlace`` count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlace:
    """Where a job's record is while it runs, if its run folder is on a shared file system or full."""

    host: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended, or its state when it was reported. Ranks do not record this.

    It is saved with each report, so that the folder can be judged again without the report.
    """

    hung: bool
    """ddpdoctor stopped it because it hung."""
    interrupted: bool
    exit_status: int | None
    """Exit status of `wrap`, or None if it was cut off and the status is unknown."""
    started_at: str
    """ISO 8601, UTC, like ``ended_at``."""
    ended_at: str
    ignore: tuple[str, ...] = ()
    """Codes of findings that the user hides."""
