"""Builds the report of `analyze`: reads what a job left behind, and judges its last run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.pictures.evidence import evidence_pictures
from ddpdoctor.diagnose.reports import make_report
from ddpdoctor.evidence.reading import read_evidence
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.evidence import (
    Doing,
    Exited,
    Failed,
    Finished,
    Hint,
    Inside,
    Nature,
    ProcessState,
    Reached,
    Waiting,
)
from ddpdoctor.model.findings import Place, RankRow
from ddpdoctor.model.rank_words import count_of, name_list
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.evidence.connection_words import explain_nccl
from ddpdoctor.rules.evidence.ruling import decide
from ddpdoctor.rules.evidence.stacks import innermost
from ddpdoctor.rules.evidence.state import RunState, build_run_state, last_samples
from ddpdoctor.rules.registry import rules_of
from ddpdoctor.rules.verdict import pick_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.attached import AttachedJob
    from ddpdoctor.model.evidence import Fact, Stacked
    from ddpdoctor.model.evidence_runs import Evidence
    from ddpdoctor.model.findings import Report

VERB = "analyze"
MOST_SOURCES = 200
"""Our choice: how many files the report lists. All are counted."""
MOST_HINTS = 12


def analyze(paths: Sequence[str], command: tuple[str, ...], started_at: str, verb: str = VERB) -> Report:
    """Read evidence, judge its last run, and return the report. ``verb`` is the command that asks.

    Raises:
        UserError: a path does not exist, or nothing was recognized.
    """
    evidence = read_evidence(paths)
    if not any(one.formats for one in evidence.read):
        problems = [f"{one.source}: {one.problem}" for one in evidence.read if one.problem]
        raise UserError(
            f"nothing was recognized in {count_of(len(evidence.read), 'file')}"
            + (f" ({'; '.join(problems[:3])})" if problems else ""),
            help="Give logs of a training job, flight recorder dumps, stacks of py-spy, or folders of them; "
            "`ddpdoctor explain DD613` says what to collect.",
        )
    return _evidence_report(evidence, command, started_at, verb)


def _evidence_report(evidence: Evidence, command: tuple[str, ...], started_at: str, verb: str) -> Report:
    state = build_run_state(evidence)
    state = replace(state, ruling=decide(state))
    judged = judge(rules_of("progress", "evidence"), {RunState: [state]})
    rows = _rows(state)
    pictures = evidence_pictures(state, rows, pick_verdict(judged.findings))
    return make_report(
        command=command,
        started_at=started_at,
        findings=judged.findings,
        checks=(*judged.checks, *pictures.checks),
        data={"verb": verb, "evidence": _about(state), **pictures.data},
        ranks=rows,
    )


def _about(state: RunState) -> dict[str, Any]:
    """Return what was read, for the report."""
    evidence = state.evidence
    hints = dict.fromkeys(
        [
            *(one.words(ranks) for one, ranks in state.refusals()),
            *(fact.words for fact in state.all(Hint) if fact.words),
            *explain_nccl(state),
        ]
    )
    return {
        **evidence.counts,
        "sources": [
            {"source": one.source, "formats": list(one.formats), "lines": one.lines, "bytes": one.bytes,
             "problem": one.problem, "left_out": one.left_out}
            for one in evidence.read[:MOST_SOURCES]
        ],
        "not_read": evidence.lacking(),
        "job": _job_words(evidence.attached),
        "formats": list(dict.fromkeys(name for one in evidence.read for name in one.formats)),
        "unknown_files": sum(not one.formats and not one.problem for one in evidence.read),
        "runs": len(evidence.runs),
        "run": state.run.name,
        "world_size": state.world,
        "seen_ranks": sorted(state.seen),
        "moves": state.ended_well and state.moves,
        "notes": list(hints)[:MOST_HINTS],
        "unclear": state.ruling.reason,
        "collect": list(state.ruling.collect),
    }  # fmt: skip


def _job_words(attached: Sequence[AttachedJob]) -> str:
    """Return the job that `attach` looked at, in words: "slurm-4711, srun, 16 ranks on k01 and k02"; else nothing."""
    if not attached:
        return ""
    hosts = list(dict.fromkeys(one.host for one in attached))
    ranks = [rank for one in attached for rank in one.ranks]
    launchers = dict.fromkeys(rank.launcher for rank in ranks)
    on = f"{count_of(len(ranks), 'rank')} on {name_list(hosts)}"
    return ", ".join((attached[0].job.name, *launchers, on))


def _rows(state: RunState) -> list[RankRow]:
    """Return what each seen rank did, in a phrase."""
    by_rank: dict[int, list[Fact]] = {rank: [] for rank in state.seen}
    for fact in state.facts:
        if fact.who.rank in by_rank:
            by_rank[fact.who.rank].append(fact)
    inside = {rank: fact for fact in state.all(Inside) for rank in fact.ranks}
    samples = last_samples(state.facts)
    return [_row(rank, facts, state, inside.get(rank), samples.get(rank)) for rank, facts in sorted(by_rank.items())]


def _row(rank: int, facts: list[Fact], state: RunState, inside: Inside | None, sample: Stacked | None) -> RankRow:
    failed = next((fact for fact in facts if isinstance(fact, Failed) and fact.nature is Nature.OWN), None)
    failed = failed or next((fact for fact in facts if isinstance(fact, Failed)), None)
    waiting = next((fact for fact in facts if isinstance(fact, Waiting)), None)
    frames = sample.frames if sample is not None else failed.frames if failed else waiting.frames if waiting else ()
    frame = innermost(frames)
    who = [fact.who for fact in facts]
    return RankRow(
        rank=rank,
        local_rank=next((one.local_rank for one in who if one.local_rank is not None), None),
        host=state.hosts.get(rank, ""),
        pid=next((one.pid for one in who if one.pid is not None), None),
        state=_state_words(facts, failed, waiting, inside, sample),
        where=None if frame is None else Place(rank=rank, file=frame.file, line=frame.line, function=frame.function),
        stack=tuple(f"{one.file}:{one.line} {one.function}" for one in (sample.frames if sample is not None else ())),
    )


_DOING = {
    Doing.COLLECTIVE: "waits in a collective", Doing.DEVICE: "waits for its device", Doing.DATA: "waits for a batch",
    Doing.INIT: "in init_process_group", Doing.EXIT: "is ending", Doing.OWN: "in the script",
    Doing.UNKNOWN: "elsewhere",
}  # fmt: skip


def _state_words(
    facts: list[Fact], failed: Failed | None, waiting: Waiting | None, inside: Inside | None, sample: Stacked | None
) -> str:
    """Return what a rank did, in a phrase. Its own failure says more than a stack, and a stack more than a wait."""
    exited = next((fact for fact in facts if isinstance(fact, Exited)), None)
    if failed is not None and failed.nature is Nature.OWN:
        return f"raised {failed.type}" if failed.type else "reported an error"
    if exited is not None and exited.signal and not exited.by_launcher:
        return f"killed by {exited.signal}"
    if sample is not None:
        return _DOING[sample.doing]
    if waiting is not None:
        return f"{'timed out' if waiting.timed_out else 'waits'} in {waiting.operation.words()}"
    if inside is not None:
        return f"waits in {inside.operation.words()}"
    return _weak_words(facts, failed, exited)


_LETTERS = {
    "R": "runs", "S": "sleeps", "D": "waits in the kernel", "T": "is stopped", "t": "is stopped", "Z": "has ended",
}  # fmt: skip
"""What the state of a process says of its rank."""


def _weak_words(facts: list[Fact], failed: Failed | None, exited: Exited | None) -> str:
    if failed is not None:
        return {Nature.PEER_LOST: "lost another rank", Nature.STOPPED: "was stopped"}.get(failed.nature, "failed")
    if exited is not None:
        return f"status {exited.code}" if exited.code is not None else f"ended by {exited.signal}"
    if any(isinstance(fact, Finished) for fact in facts):
        return "ended well"
    reached = next((fact for fact in reversed(facts) if isinstance(fact, Reached) and fact.enqueued is not None), None)
    if reached is not None:
        return f"had {reached.done_words()} collective #{reached.enqueued}"
    process = next((fact for fact in reversed(facts) if isinstance(fact, ProcessState)), None)
    return _LETTERS.get(process.letter, "seen") if process is not None else "seen"
