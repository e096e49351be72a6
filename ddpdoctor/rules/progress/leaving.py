"""DD609 and DD612: the script has ended, but its process does not end, or dies on the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.causes import clues_of
from ddpdoctor.rules.progress.clues import sentences
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.places import innermost_user, is_file, lines_seen, main_frames, other_threads, places
from ddpdoctor.rules.progress.states import Activity, aborted_at_exit
from ddpdoctor.rules.progress.words import place_words, seconds, verb

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.stacks import Frame

QUEUES_FILE = "/multiprocessing/queues.py"
"""The interpreter waits here at its end until everything that was put into a queue has been read."""
AT_WORK_SHARE = 0.02
"""Share of a core above which an ending process counts as working. Our choice: one that waits uses none."""
TEARDOWN_CPU_S = 10.0
"""CPU seconds that an interpreter gets to shut down, however long that takes on crowded cores. Our choice: freeing
torch takes about 1 s."""


@rule("DD609", "exit-hang", Severity.ERROR, "The script has finished, but its process does not exit")
def check_exit_hang(job: JobState) -> Answer:
    """Report a rank whose script has ended but whose process lives on."""
    if job.failures:
        return skipped(Cause.FAILURE.value)
    ended = [n for n in job.living if job.states[n].doing is Activity.SHUTTING_DOWN and n not in job.early]
    now = job.time_ns
    blamed = tuple(n for n in ended if _is_held_up(job, n))
    if not blamed:
        return unknown(f"{rank_list(ended)} finished just now") if ended and not job.facts.ended else passed()
    where = tuple(place for n in blamed for place in _exit_places(job.rank(n)))
    first = next(iter(where), None)
    since = seconds(now - (job.rank(blamed[0]).main_ended_ns or now))
    clues = sentences({n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]})
    seen = [*_exit_evidence(job, blamed), *clues, *say.process_words(job, blamed), *say.others(job, blamed)]
    finding = Problem(
        confidence=Confidence.HIGH if where else Confidence.MEDIUM,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        summary=f"{say.who(job, blamed)} finished the script, but the "
        f"{verb(blamed, 'process does', 'processes do')} not exit"
        + (f": code is still running {place_words(first)}" if first is not None else ""),
        evidence=(f"the process has kept running {since} after the script finished", *seen),
        fix=_exit_fix(job.rank(blamed[0])),
    )
    return judged([finding], certain=set(job.living) <= {*blamed, *job.quiet}, may_resume=True)


def _is_held_up(job: JobState, number: int) -> bool:
    """Return whether a rank whose script is over should have ended by now."""
    rank = _since_end(job.rank(number))
    since_ns = job.time_ns - (rank.main_ended_ns or job.time_ns)
    return since_ns >= job.timeout_ns and not _takes_itself_down(rank, since_ns)


def _takes_itself_down(rank: Rank, since_ns: int) -> bool:
    """Return whether the interpreter has joined its threads, including ddpdoctor's, and still computes."""
    share = rank.cpu_share or 0.0
    at_work = rank.proc_state == "R" or share > AT_WORK_SHARE
    return at_work and not rank.samples and share * since_ns / 1e9 < TEARDOWN_CPU_S


def _since_end(rank: Rank) -> Rank:
    """Return a rank without what was seen of it while its script still ran."""
    return replace(
        rank, samples=tuple(sample for sample in rank.samples if sample.time_ns >= (rank.main_ended_ns or 0))
    )


def _exit_fix(rank: Rank) -> str:
    if any(is_file(frame, QUEUES_FILE) for frame in main_frames(_since_end(rank))):
        return "empty the multiprocessing queue before the script ends, or call its cancel_join_thread()"
    return "stop that thread, child process or atexit function before the script ends, or make the thread a daemon"


def _exit_places(rank: Rank) -> tuple[Place, ...]:
    """Return what keeps the process of an ended script alive: a thread, an exit function, or a child."""
    rank = _since_end(rank)
    threads = [stack for stack in other_threads(rank, skip_idle=False) if not stack.is_daemon]
    lines: list[Frame | None] = [innermost_user(stack.frames) for stack in threads]
    lines += [frame for frame in lines_seen(rank.samples) if frame.user]
    lines += [innermost_user(main_frames(child)) for child in rank.children]
    return places(rank.rank, lines)


def _exit_evidence(job: JobState, blamed: tuple[int, ...]) -> list[str]:
    found = []
    for number in blamed[: say.MAX_CLASSES]:
        rank = _since_end(job.rank(number))
        names = [s.thread for s in other_threads(rank, skip_idle=False) if not s.is_daemon]
        found += [f"threads of rank {number} that the interpreter waits for: {', '.join(names)}"] if names else []
        found += [f"children of rank {number}: {', '.join(c.name for c in rank.children)}"] if rank.children else []
        frames = main_frames(rank)
        if frames and innermost_user(frames) is None:
            found.append(f"Python itself is {place_words(frames[-1])} on rank {number}")
    return found


@rule("DD612", "exit-abort", Severity.INFO, "A rank aborted at exit, after its script had finished")
def check_exit_abort(job: JobState) -> Answer:
    """Report a rank that died of SIGABRT, SIGSEGV or SIGBUS after its script had ended well."""
    aborted = tuple(n for n in sorted(job.states) if aborted_at_exit(job.rank(n)) and n not in job.early)
    if not aborted:
        return passed()
    alike: dict[tuple[str, Frame | None], list[int]] = {}
    for n in aborted:
        alike.setdefault((job.rank(n).signal or "a signal", job.rank(n).fatal_place), []).append(n)
    return judged([_abort(job, signal, line, tuple(ranks)) for (signal, line), ranks in alike.items()])


def _abort(job: JobState, signal: str, line: Frame | None, ranks: tuple[int, ...]) -> Problem:
    """Return the problem of ranks that the same signal ended, at the same line of the script or at none."""
    died = "aborted" if signal == "SIGABRT" else f"died of {signal}"
    seen = "a known bug in Gloo, pytorch#190489"
    if line is not None:
        seen = f"the stack dump shows it {place_words(line)}"
    elif signal != "SIGABRT":
        seen = f"native code has failed, or it is a dump of the abort that is {seen}"
    status = job.facts.launcher_status
    return Problem(
        ranks=ranks,
        where=tuple(place for n in ranks for place in places(n, [line])),
        summary=f"{rank_list(ranks)} {died} at exit, after the script had finished; training is not affected",
        evidence=(
            f"{signal} while the interpreter was shutting down: {seen}",
            *([f"the launcher counts that as a failure: its exit status is {status}"] if status else []),
        ),
        fix=f"check the native code that is called {place_words(line)}"
        if line is not None
        else "call dist.barrier() and then dist.destroy_process_group() as the last lines of the script",
    )
