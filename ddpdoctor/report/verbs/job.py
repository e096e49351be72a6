"""The content of `wrap`: how the job ended, where its ranks are, earlier attempts, and the comparison of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.consistency import Consistency, StreamClock
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.findings import Attempt, JobStatus, Outcome, Severity, as_earlier
from ddpdoctor.model.rank_words import count_of, rank_list
from ddpdoctor.report.blocks import Content, FactEntry, FactList, Heading, Text
from ddpdoctor.report.classes import places_of
from ddpdoctor.report.findings import LABEL_WIDTH, TONES, count_findings
from ddpdoctor.report.grids.loader import loader_pictures
from ddpdoctor.report.grids.replica import NOUNS, replica_pictures
from ddpdoctor.report.grids.speed import speed_pictures
from ddpdoctor.report.names import merge_places, title_of
from ddpdoctor.report.pictures import job_pictures
from ddpdoctor.report.time_budget import speed_sections

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.findings import Finding, Report
    from ddpdoctor.report.blocks import Section

SPARSE_STEPS = 256
"""Our choice: a distance from here on is said, because a difference may then have begun that many steps earlier."""
NOTABLE_S = 10.0
"""Our choice: shorter waits for a core are usual where several programs share a machine."""
_BEST_FIRST = (StreamClock.STEP, StreamClock.FORWARD, StreamClock.END, StreamClock.SYNC)


def job_content(report: Report) -> Content:
    """Return the content of a job. If it ended well without findings, that is a line, or two with compared replicas."""
    attempts = read_attempts(report)
    earlier = {finding for attempt in attempts[:-1] for finding in as_earlier(attempt)}
    ended_badly = report.job is not None and report.job.ended_badly
    shows_places = ended_badly or (report.job is not None and report.job.status is JobStatus.RUNNING)
    replicas = None if ended_badly else replica_words(report)
    restarts = len(attempts) - 1
    return Content(
        headline=_headline(report, restarts),
        status=status_words(report, restarts),
        sections=(
            *_attempt_sections(attempts),
            *(places_of(report.ranks, report.verdict) if shows_places else speed_sections(report)),
        ),
        remarks=(*(() if replicas is None else (replicas,)), *_starved(report)),
        ends_with_verdict=True,
        others=tuple(one for one in report.findings if one != report.verdict and one not in earlier),
        pictures=(
            *job_pictures(report),
            *replica_pictures(report),
            *loader_pictures(report),
            *(() if ended_badly else speed_pictures(report)),
        ),
    )


def read_attempts(report: Report) -> tuple[Attempt, ...]:
    """Return the attempts of a job that was restarted, or nothing if it was not.

    Raises:
        UserError: the attempts are damaged.
    """
    try:
        return tuple(decode(Attempt, section) for section in report.data.get("sections") or ())
    except (WrongValue, TypeError) as error:
        raise UserError(f"the attempts in the report cannot be read: {error}") from error


def _starved(report: Report) -> tuple[str, ...]:
    """Say that ranks lacked cores, which is why they made no progress for a while."""
    most_s = max((row.starved_s for row in report.ranks), default=0.0)
    if most_s < NOTABLE_S:
        return ()
    ranks = rank_list(row.rank for row in report.ranks if row.starved_s >= NOTABLE_S)
    without = f"without a core, {ranks} made no progress for up to {most_s:.0f} s"
    return (f"cores are short: {without}; this time does not count as a hang",)


def _headline(report: Report, restarts: int) -> str:
    """Return the verdict. If there is none, a job that ended badly must not read like one that ended well."""
    if report.verdict is not None:
        return report.verdict.summary
    if report.job is not None and report.job.status is JobStatus.INTERRUPTED:
        by_user = report.job.exit_status == ExitStatus.INTERRUPTED
        how = "Ctrl-C (SIGINT) interrupted the job" if by_user else "the job was interrupted"
        return f"{how}, and no fault was found before"
    if report.job is not None and report.job.ended_badly:
        return "no cause found"
    if report.job is not None and report.job.exit_status:
        if report.job.status is JobStatus.NOT_RUN:
            return f"no rank ran: the launcher ended with status {report.job.exit_status}"
        at_exit = (finding.summary for finding in report.findings if finding.kind == "exit-abort")  # an info
        return next(at_exit, f"the ranks finished, but the launcher ended with status {report.job.exit_status}")
    if restarts > 0:
        return f"the job finished after {count_of(restarts, 'restart')}"
    crashed = sum(check.outcome is Outcome.CRASHED for check in report.checks)
    return "no problem found" + (f", but {count_of(crashed, 'check')} crashed" if crashed else "")


def status_words(report: Report, restarts: int) -> str:
    """Say how the job ended, and how many findings there are without a verdict."""
    words = []
    if report.job is not None:
        words.append(report.job.status.value)
        words += [] if report.job.world_size is None else [count_of(report.job.world_size, "rank")]
        words += [f"exit status {report.job.exit_status}"] if report.job.exit_status else []
    words += [f"after {count_of(restarts, 'restart')}"] if restarts > 0 else []
    words += [count_findings(report.findings)] if report.findings and not report.verdict else []
    return ", ".join(words)


def _attempt_sections(attempts: tuple[Attempt, ...]) -> Iterator[Section]:
    """Yield the sections of the restarted attempts, and the heading of the last one."""
    for attempt in attempts[:-1]:
        yield (Heading(text=f"attempt {attempt.attempt}: {_ending(attempt)}, then restarted"),)
        yield from places_of(attempt.ranks, attempt.verdict)
        yield _verdict_section(attempt.verdict)
    if attempts:
        yield (Heading(text=f"attempt {attempts[-1].attempt}, the last: {_ending(attempts[-1])}"),)


def _ending(attempt: Attempt) -> str:
    return attempt.status.value + (f" after {attempt.seconds:.1f} s" if attempt.seconds is not None else "")


def _verdict_section(verdict: Finding | None) -> Section:
    if verdict is None:
        return (Text(text="no cause found", indent=2),)
    facts = (
        FactEntry(label="wrong", texts=(verdict.summary,)),
        FactEntry(label="where", texts=merge_places(verdict.where)),
    )
    title = Text(text=title_of(verdict, hosts=False), tone=TONES[verdict.severity], indent=2)
    return (title, FactList(facts=facts, width=LABEL_WIDTH))


def replica_words(report: Report) -> str | None:
    """Return how often replicas were compared, and the result. None if they were not compared or findings say it.

    Raises:
        UserError: the report is damaged.
    """
    consistency = _read(report)
    if consistency is None or any(map(_says_it, report.findings)):
        return None
    compared = [stream for stream in consistency.streams if stream.compared and stream.model > 0]
    if not compared:
        return None
    checks = _checks(compared)
    differing = dict.fromkeys(one.what for stream in compared for one in stream.differences)
    if not differing:
        every = max(stream.every for stream in compared)
        chosen = f"; every {every} steps, to take less than 1 % of the time" if every >= SPARSE_STEPS else ""
        return f"replicas equal: {checks}{chosen}"
    nouns = " and ".join(NOUNS[what] for what in differing)
    return f"replicas compared: {checks}; {nouns} differ, but no rule reports this as wrong"


def _says_it(finding: Finding) -> bool:
    return finding.code.startswith("DD50") and finding.severity is not Severity.INFO


def _checks(streams: Sequence[Stream]) -> str:
    """Say how often and up to which step, by the best clock only, because other clocks check the same tensors."""
    clock = next(clock for clock in _BEST_FIRST if any(stream.clock is clock for stream in streams))
    those = [stream for stream in streams if stream.clock is clock]
    last = max(stream.last_number or 0 for stream in those)
    until = {StreamClock.STEP: f"up to optimizer step {last}", StreamClock.END: "at the end"}
    checks = count_of(sum(stream.compared for stream in those), "check")
    models = len({(stream.group, stream.ranks, stream.model) for stream in those})
    parts = [
        *([count_of(models, "model")] if models > 1 else []),
        count_of(sum(stream.tensors for stream in those), "tensor"),
        count_of(len({rank for stream in those for rank in stream.ranks}), "rank"),
    ]
    return f"{checks} {until.get(clock, f'up to backward {last}')} ({', '.join(parts)})"


def _read(report: Report) -> Consistency | None:
    plain = report.data.get("consistency")
    try:
        return None if plain is None else decode(Consistency, plain)
    except WrongValue as error:
        raise UserError(f"the replicas in the report cannot be read: {error}") from error
