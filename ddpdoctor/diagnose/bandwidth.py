"""The report of `allreduce-bench`, and how a run of it is cut short."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ddpdoctor
from ddpdoctor.diagnose.job import judge_job
from ddpdoctor.diagnose.report import attempt, make_report, member_rows
from ddpdoctor.model.bandwidth import Ending, Member, Reason
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.facts import Call, GroupState, Job, Life, Raised, Rank
from ddpdoctor.model.findings import Check, Finding, JobStatus, JobSummary, Outcome, Severity, now
from ddpdoctor.model.reading import known
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.model.words import count_of, grouped, rank_list
from ddpdoctor.rules.bandwidth import reasons
from ddpdoctor.rules.bandwidth.curves import Baseline, Measured, build_curves, compare
from ddpdoctor.rules.bandwidth.verdicts import advise
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.progress.job_state import build_job_state
from ddpdoctor.rules.progress.words import waiters_words
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.model.bandwidth import Advice, Bench, Position, Stop
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.node import Fleet
    from ddpdoctor.rules.registry import Rule


class DataPath(Enum):
    """The data path that a check concerns."""

    ALL = "all"
    INSIDE = "between ranks of one host"
    PCIE = "between hosts, and within one whose GPUs are not connected by NVLink"
    BETWEEN = "between hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEffect:
    """How a check of `check-env` affects bandwidth."""

    effect: reasons.Effect
    path: DataPath
    gloo: bool = False  # whether it also affects Gloo, which uses neither GPUs nor RDMA
    # Whether findings of severity "info" count. For other checks, these are only possible problems.
    infos: bool = False


# Checks by kind. These are left out: checks for crashes and hangs (memlock, shm, iface-agree, fabric), because the
# bench would not have got this far; costs at start only (persistence); checks that do not affect a collective (omp,
# temp-power); and cpu-quota, env-danger, env-value and nccl-conf, for which the bench has its own reasons.
CHECKS = {
    "nvlink": CheckEffect(effect=reasons.Effect.OTHER_WAY, path=DataPath.INSIDE),
    "p2p": CheckEffect(effect=reasons.Effect.OTHER_WAY, path=DataPath.INSIDE, infos=True),
    "ib-disabled": CheckEffect(effect=reasons.Effect.OTHER_WAY, path=DataPath.BETWEEN),
    "ib-hca-env": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.BETWEEN),
    "uverbs": CheckEffect(effect=reasons.Effect.OTHER_WAY, path=DataPath.BETWEEN),
    "roce-gid": CheckEffect(effect=reasons.Effect.OTHER_WAY, path=DataPath.BETWEEN),
    "pcie": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.PCIE),
    "acs-iommu": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.PCIE),
    "ib-state": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.BETWEEN),
    "ib-rate": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.BETWEEN),
    "peermem": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.BETWEEN),
    "mtu": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.BETWEEN, gloo=True),
    "throttle": CheckEffect(effect=reasons.Effect.LIMIT, path=DataPath.ALL),
    "other-procs": CheckEffect(effect=reasons.Effect.SHARED, path=DataPath.ALL),
    "app-clocks": CheckEffect(effect=reasons.Effect.SMALL, path=DataPath.ALL),
    "ib-flap": CheckEffect(effect=reasons.Effect.SMALL, path=DataPath.BETWEEN),
    "numa": CheckEffect(effect=reasons.Effect.SMALL, path=DataPath.PCIE),
    "numa-balancing": CheckEffect(effect=reasons.Effect.SMALL, path=DataPath.ALL, gloo=True),
}


def find_reasons(bench: Bench, fleet: Fleet | None) -> tuple[Reason, ...]:
    """Return possible reasons for a low number, the most likely first. ``fleet`` is None if no machines were read."""
    seen = reasons.view(bench, fleet)
    checked = [] if fleet is None else _checked(seen, fleet)
    said = [*reasons.nccl_reasons(seen), *reasons.variable_reasons(seen)]
    return reasons.order([*said, *checked, *reasons.processor_reasons(seen), *reasons.network_reasons(seen)])


def reason_rules() -> tuple[Rule, ...]:
    return tuple(rule for rule in rules_of("environment") if rule.kind in CHECKS)


def _checked(seen: reasons.BenchView, fleet: Fleet) -> Iterator[reasons.Weighed]:
    fleet = replace(fleet, nodes=tuple(place.node for place in seen.places))
    rules = [rule for rule in reason_rules() if seen.nccl or CHECKS[rule.kind].gloo]
    paths = {}
    for place in seen.places:
        inside = len(place.members) > 1
        shm = any("SHM" in log.transports for log in seen.logs(place))
        by_pcie = seen.between_hosts or (inside and (shm or not reasons.joined_by_nvlink(place)))
        taken = {DataPath.INSIDE: inside, DataPath.BETWEEN: seen.between_hosts, DataPath.PCIE: by_pcie}
        paths[place.node.host] = {DataPath.ALL: True, **taken}
    for finding in judge(rules, fleet_facts(fleet)).findings:
        bearing = CHECKS.get(finding.kind)
        hosts = [host for host in finding.hosts if host in paths]
        if bearing is None or (finding.severity is Severity.INFO and not bearing.infos):
            continue
        if any(paths[host][bearing.path] for host in hosts):
            detail = f" ({finding.evidence[0]})" if finding.evidence else ""
            text, source = f"{finding.summary}{detail}", f"{finding.code} {finding.kind}"
            reason = Reason(text=text, source=source, hosts=finding.hosts, ranks=finding.ranks, fix=finding.fix)
            yield bearing.effect, reason


GROUP = "bandwidth"  # the heading of this command's checks
Made = TypeVar("Made")
VERB = "allreduce-bench"
_HELP = "Give the report.json, or its folder, of an allreduce-bench that was run with --report-dir or --format json."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReportOptions:
    """The user's options for the report."""

    command: tuple[str, ...] = ()
    started_at: str = ""  # ISO 8601, UTC; empty: now
    fleet: Fleet | None = None  # the machines, if they were read
    baseline: Baseline | None = None  # --compare
    fail_below: float | None = None  # --fail-below as a fraction, such as 0.9. None: the baseline is only shown.
    expect_gb_s: float | None = None  # --expect
    use_reference: bool = True  # False: --reference none
    model_size: int | None = None  # --model-size, in parameters


def build_report(bench: Bench, wanted: BenchReportOptions) -> Report:
    """Judge a bench, finished or not, and build its report. A part that raises becomes a crashed check."""
    failed: list[Check] = []
    expect_gb_s, baseline = wanted.expect_gb_s, wanted.baseline
    curves = partial(build_curves, bench, expect_gb_s, use_reference=wanted.use_reference)
    comparison = None
    if baseline is not None:
        comparison = _try("comparison", lambda: compare(bench, baseline, wanted.fail_below), None, failed)
    measured = Measured(
        bench=bench,
        curves=_try("curves", curves, (), failed),
        comparison=comparison,
        reasons=_try("reasons", lambda: find_reasons(bench, wanted.fleet), (), failed),
        expect_gb_s=expect_gb_s,
        fail_below=wanted.fail_below,
    )
    advice = _try("advice", lambda: advise(bench, wanted.model_size), None, failed)
    judged = judge(rules_of("bandwidth"), {Measured: [measured]})
    nothing: tuple[Finding, ...] = ()
    stopped = _try("stop", lambda: stop_findings(bench), nothing, failed)
    ending = Ending.FINISHED if bench.stop is None else bench.stop.ending
    stacks = {} if bench.stop is None else {position.rank: position.stack for position in bench.stop.positions}
    return make_report(
        command=wanted.command,
        started_at=wanted.started_at or now(),
        job=JobSummary(
            world_size=len(bench.members),
            nnodes=len({member.host for member in bench.members}),
            status=JobStatus(ending.value),
            exit_status=None,
        ),
        findings=(*judged.findings, *stopped),
        checks=(*judged.checks, *failed),
        ranks=member_rows(
            bench.members, lambda rank: {"state": describe_rank(rank, bench.stop), "stack": stacks.get(rank, ())}
        ),
        data=_data(measured, advice, wanted.fleet),
    )


def exit_status(report: Report, fail_on: Severity | None) -> int:
    """Return 130 if interrupted, 1 for findings from ``fail_on`` up, 3 for a crash, 4 if unfinished or inconclusive."""
    status = None if report.job is None else report.job.status
    if status is JobStatus.INTERRUPTED:
        return ExitStatus.INTERRUPTED
    found = report.exit_status(fail_on)
    return found if found or status is JobStatus.FINISHED else ExitStatus.INCONCLUSIVE


def _try(name: str, make: Callable[[], Made], instead: Made, failed: list[Check]) -> Made:
    """Return the result of ``make``. If it raises, record a crashed check, so that the measurements are not lost."""
    made = attempt(make)
    if not isinstance(made, Exception):
        return made
    reason = f"{type(made).__name__}: {made}"
    failed.append(Check(id=name, group=GROUP, outcome=Outcome.CRASHED, reason=reason))
    return instead


def _data(measured: Measured, advice: Advice | None, fleet: Fleet | None) -> dict[str, Any]:
    bench = measured.bench
    # The load that other work put on each host, if it was read
    nodes = () if fleet is None else fleet.nodes
    loads = [(node.host, known(node.load)) for node in nodes]
    return {
        "verb": VERB,
        "world_size": len(bench.members),
        "hosts": list(dict.fromkeys(member.host for member in bench.members)),
        **encode(bench),
        "curves": list(measured.curves),
        "loads": [{"host": host, **encode(load)} for host, load in loads if load is not None],
        "comparison": measured.comparison,
        "advice": advice,
        "reasons": list(measured.reasons),
    }


def read_baseline(report: Report, name: str, option: str = "--compare") -> Baseline:
    """Return the baseline in a report. ``name`` is the user's argument to the option. Raises ``UserError``."""
    data = report.data
    if data.get("verb") != VERB:
        raise UserError(f"{option} {name} is not a report of allreduce-bench", help=_HELP)
    try:
        baseline = decode(Baseline, {**data, "name": name})
    except WrongValue as error:
        raise UserError(f"{option} {name} cannot be read: {error}", help=_HELP) from error
    if not baseline.results:
        raise UserError(f"{option} {name} has no measurements", help=_HELP)
    times = [time for result in baseline.results for time in (result.p50_low_us, result.p50_us, result.p50_high_us)]
    if not all(0 < time < math.inf for time in times):
        raise UserError(f"{option} {name} has an invalid time", help=_HELP)
    return baseline


def check_ranks(baseline: Baseline, world_size: int) -> None:
    ranks = len(baseline.members)
    if ranks != world_size:
        raise UserError(
            f"--compare {baseline.name} is a run of {count_of(ranks, 'rank')}, and this one has {world_size}",
            help="Compare runs with the same number of ranks.",
        )


# The findings that make sense for the bench.
ROOTS = frozenset({"DD601", "DD602", "DD603", "DD604", "DD605", "DD606", "DD607", "DD608", "DD611"})
MOST_NAMED = 4  # how many groups a summary names


def stop_findings(bench: Bench) -> tuple[Finding, ...]:
    """Return the causes of an unfinished bench; of an interrupted one, hangs that had lasted for the hang timeout."""
    stop = bench.stop
    if stop is None:
        return ()
    found = [finding for finding in judge_job(build_job(bench, stop)).findings if finding.code in ROOTS]
    # If the rank that served the store is lost, the others cannot answer. Then only that rank's finding counts.
    explained = [finding for finding in found if not _is_silence(finding, stop)]
    return tuple(_in_words_of_bench(finding, bench, stop) for finding in explained or found)


def _is_silence(finding: Finding, stop: Stop) -> bool:
    return finding.code == "DD601" and not {position.rank for position in stop.positions} & set(finding.ranks)


def describe_rank(rank: int, stop: Stop | None) -> str:
    """Return one phrase for where a rank was, or how it had ended, when the bench stopped."""
    if stop is None:
        return "finished"
    position = next((position for position in stop.positions if position.rank == rank), None)
    if position is None:
        end = next((position.ends[str(rank)] for position in stop.positions if str(rank) in position.ends), None)
        if end is not None:
            return end if end.startswith("exit") else f"killed by {end}"
        states = {position.states[str(rank)] for position in stop.positions if str(rank) in position.states}
        return "gone" if states & GONE else "stopped" if states & {"T", "t"} else "did not answer"
    if position.error is not None:
        return f"raised {position.error}"
    if position.phase == "end":
        return "finished"
    if is_in_call(position):
        return f"in {position.op}"
    return f"on its way into {position.op}" if position.inside else f"between calls, in phase {position.phase}"


def _in_words_of_bench(finding: Finding, bench: Bench, stop: Stop) -> Finding:
    if finding.code == "DD611":
        # Say which calls of the bench do not complete, and between which ranks
        those = [position for position in stop.positions if position.rank in finding.ranks]
        at = {(position.group, position.what or position.op) for position in those}
        calls = [
            f"{rank_list(ranks)} {'is' if len(set(ranks)) == 1 else 'are'} in {what}" for ranks, what in sorted(at)
        ]
        more = f"; {len(calls) - MOST_NAMED} more groups" if len(calls) > MOST_NAMED else ""
        fails = "it does not complete" if len(calls) == 1 else "none of these completes"
        several = len({member.host for member in bench.members if member.rank in finding.ranks}) > 1
        if bench.settings.backend == "nccl":
            where = "test the network between these hosts (ddpdoctor check-env)" if several else "test the links"
            fix = f"{where}, and read the log with NCCL_DEBUG=INFO"
        else:
            fix = GLOO_FIX_BETWEEN_HOSTS if several else GLOO_FIX_ON_A_HOST
        finding = replace(finding, summary=f"{', '.join(calls[:MOST_NAMED])}{more}, but {fails}", fix=fix)
    if _is_silence(finding, stop):
        # Rewrite a finding about ranks that did not answer. Their position is unknown.
        waiting = waiters_words(build_job_state(build_job(bench, stop)), finding.ranks)
        verb = "no longer responds" if len(finding.ranks) == 1 else "no longer respond"
        seen = {int(rank) for position in stop.positions for rank in position.states}
        others = (member.rank for member in bench.members if member.rank not in finding.ranks)
        places = grouped((describe_rank(rank, stop), rank) for rank in others)
        pids = [str(member.pid) for member in bench.members if member.rank in seen & set(finding.ranks)]
        down = "check that their hosts and the network to them are up: run ddpdoctor check-env on all hosts"
        finding = replace(
            finding,
            summary=f"{rank_list(finding.ranks)} {verb}" + (f"; {waiting}" if waiting else ""),
            # Where the other ranks were. Ranks in the same place share one phrase.
            evidence=tuple(f"{rank_list(ranks)}: {words}" for words, ranks in places.items()),
            fix=f"see what they are doing: py-spy dump --native --pid {' '.join(pids)}" if pids else down,
        )
    if finding.code == "DD604":
        errors = [position.error or "" for position in stop.positions if position.rank in finding.ranks]
        fix = "look up this error (NCCL_DEBUG=INFO logs details); it caused the errors of the other ranks"
        if any("memory" in error.lower() for error in errors):
            fix = "choose a smaller --max-size, or free memory; this error caused those of the other ranks"
        finding = replace(finding, fix=fix)
    # What the bench was doing when it stopped, according to a rank in its last phase
    whats = [position.what for position in stop.positions if position.phase == stop.phase and position.what]
    at_words = f'the bench was in its phase "{stop.phase}"' + (f", at {whats[0]}" if whats else "")
    return replace(finding, evidence=(*finding.evidence, at_words))


GLOO_FIX_BETWEEN_HOSTS = (
    "test the network between these hosts (ddpdoctor check-env on all of them): a firewall that drops packets, "
    "a link that is down, a wrong MTU, or a wrong GLOO_SOCKET_IFNAME"
)
GLOO_FIX_ON_A_HOST = "check whether this host drops packets on the interface in GLOO_SOCKET_IFNAME"
NOW_NS = 10**18  # the time of the sample, on an artificial clock, because ranks of several hosts share none
# The time at which a rank failed. It is after a stop by the user. Otherwise the order of events is unknown.
ENDED_NS = NOW_NS + 1
INIT = "init_process_group"
GONE = frozenset({"", "X", "Z"})
_OWN_FOLDER = str(Path(ddpdoctor.__file__).parent) + "/"
_LIBRARY = re.compile(r"/(site|dist)-packages/|/python3(\.\d+)?/|^<")
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)")


def build_job(bench: Bench, stop: Stop) -> Job:
    positions = {position.rank: position for position in stop.positions}
    states = {int(rank): state for position in stop.positions for rank, state in position.states.items()}
    ends = {int(rank): end for position in stop.positions for rank, end in position.ends.items()}
    interrupted = stop.ending is Ending.INTERRUPTED
    ranks = []
    for member in bench.members:
        position = positions.get(member.rank)
        if position is None:
            ranks.append(_silent_rank(member, states.get(member.rank), ends.get(member.rank)))
            continue
        if position.error is not None and position.phase == "connect" and _has_come(position):
            # The error of a rank that timed out while waiting for others to connect is dropped: it still waits.
            there = {place.rank for place in stop.positions if _has_come(place)}
            late = [other.rank for other in bench.members if other.rank not in there]
            position = replace(position, error=None) if late else position
        rank = _rank(member, position, len(bench.members))
        ranks.append(replace(rank, proc_state=states.get(member.rank)))
    # How long a rank must have been without progress to be blamed: the shortest such time of all ranks
    still_s = bench.settings.hang_timeout_s
    if not interrupted:
        still_s = min([still_s, *(position.stale_s for position in stop.positions if position.phase != "end")])
    return Job(
        now_ns=NOW_NS,
        hang_timeout_s=still_s,
        ranks=tuple(ranks),
        world_size=len(bench.members),
        nnodes=len({member.host for member in bench.members}),
        local_ranks_expected=None,
        ended=interrupted,
        stopping_since_ns=NOW_NS if interrupted else None,
        interrupted_by=(stop.signal or "SIGINT") if interrupted else None,
    )


def _has_come(position: Position) -> bool:
    return position.phase not in {"start", "connect"} or position.op == INIT


def is_in_call(position: Position) -> bool:
    """Return whether the innermost frame is torch's or ddpdoctor's, which call C++; else a hook may be blocking it."""
    if not position.inside or not position.stack:
        return position.inside
    file = _frame(position.stack[-1]).file
    return "/torch/" in file or file.startswith(_OWN_FOLDER)


def _rank(member: Member, position: Position, world_size: int) -> Rank:
    frames = tuple(map(_frame, position.stack))
    moved_ns = NOW_NS - int(position.stale_s * 1e9)
    inside, name_of_group = is_in_call(position), " ".join(map(str, position.group))
    call = None
    if inside:
        is_init = position.op == INIT
        call = Call(
            index=1,
            op=position.op,
            api=position.op,
            group="" if is_init else name_of_group,
            seq=None if is_init else position.calls,
            dtype=None,
            shape=None,
            tensors=1,
            peer=None,
            redop=None,
            site=_innermost_frame(frames),
            started_ns=moved_ns,
            ended_ns=None,
            is_async=False,
            failed=False,
            thread_is_main=True,
        )
    in_group = bool(position.group) and position.op != INIT
    arrived = inside or not position.inside
    group = GroupState(name=name_of_group, ranks=position.group, backend="", enqueued=position.calls - (not arrived))
    raised = []
    if position.error is not None:
        name, _, message = position.error.partition(": ")
        in_call = None if call is None else call.op
        raised.append(
            Raised(
                type=name, message=message, time_ns=ENDED_NS, thread_is_main=True, uncaught=True, in_call=in_call,
                frames=frames,
            )
        )  # fmt: skip
    return Rank(
        **_who(member),
        life=Life.RUNNING,
        recorded=True,
        answered=True,
        world_size=world_size,
        initialized=position.phase not in {"start", "connect"} or (position.op == INIT and not position.inside),
        main_ended_ns=moved_ns if position.phase == "end" else None,
        open_calls=() if call is None else (call,),
        groups=(group,) if in_group else (),
        samples=(
            StackSample(
                time_ns=NOW_NS,
                by="sampler",
                stacks=(Stack(thread="MainThread", is_main=True, is_daemon=False, frames=frames),),
            ),
        ),
        raised=tuple(raised),
        last_place=_innermost_frame(frames),
        last_progress_ns=moved_ns if position.error is None else None,
    )


def _silent_rank(member: Member, state: str | None, end: str | None) -> Rank:
    if state in GONE:
        code = int(end.removeprefix("exit status ")) if end and end.startswith("exit status ") else None
        life = Life.GONE if end is None else Life.SIGNALED if code is None else Life.EXITED
        signal = end if life is Life.SIGNALED else None
        return Rank(**_who(member), life=life, exit_code=code, signal=signal, recorded=True, ended_ns=ENDED_NS)
    # A stopped process, or one in uninterruptible sleep, cannot answer.
    explained = state in {"T", "t", "D"}
    lost = None if explained else "it did not answer"
    return Rank(**_who(member), life=Life.RUNNING, proc_state=state, recorded=explained, lost=lost)


def _who(member: Member) -> dict[str, Any]:
    return {"rank": member.rank, "local_rank": member.local_rank, "host": member.host, "pid": member.pid, "attempt": 0}


def _innermost_frame(frames: tuple[Frame, ...]) -> Frame | None:
    user = [frame for frame in frames if frame.user]
    own = [frame for frame in frames if frame.file.startswith(_OWN_FOLDER)]
    return next(reversed(user or own), None)


def _frame(text: str) -> Frame:
    match = _FRAME.fullmatch(text)
    if match is None:
        return Frame(file=text, line=0, function="", user=False)
    file = match["file"]
    user = not file.startswith(_OWN_FOLDER) and _LIBRARY.search(file) is None
    return Frame(file=file, line=int(match["line"]), function=match["function"], user=user)
