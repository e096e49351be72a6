"""DD602: ranks disagree about the next collective, or in what DDP's reducer does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Fault
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.known_errors import find_known
from ddpdoctor.model.words import first_names, grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, unknown
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.branches import ALIKE, Guard, Turning, find_way
from ddpdoctor.rules.progress.calls import REDUCING, ROOTED, find_misread
from ddpdoctor.rules.progress.job_state import Cause, JobState, asked_if
from ddpdoctor.rules.progress.states import Activity, call_words, innermost_user, is_file, line_of, places, stack_of
from ddpdoctor.rules.progress.waits import group_table, group_words
from ddpdoctor.rules.progress.words import Clue
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.facts import ReducerSaid
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.progress.calls import Conflict, TimelineEntry
    from ddpdoctor.rules.progress.states import Failure

MAX_NAMED = 5  # our choice: most parameters that a sentence names
# What DDP says of each fault, in the words of the table of known errors, which has the fixes.
_SAYS = {
    Fault.UNFINISHED: "Expected to have finished reduction in the prior iteration",
    Fault.STATIC: "Your training graph has changed in this iteration",
    Fault.TWICE: "Expected to mark a variable ready only once",
}
COMPLAINTS = {
    Fault.UNFINISHED: "the previous backward left {} without a gradient, and DDP is waiting for it",
    Fault.STATIC: "the previous backward left {} without a gradient that had one in the first step, with "
    "static_graph=True, and DDP is waiting for it",
    Fault.TWICE: "DDP got the gradient of {} twice in one backward",
}
_TO_ROOT = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to", "gather_into_tensor": "to"}
SAME_OPTIONS = "pass the same find_unused_parameters to DistributedDataParallel on all ranks: True adds a collective"
_EITHER = (
    "if that call is under a condition that differs between ranks (`if rank == 0:`), make it on all ranks; if it comes "
    "after the loop, give every rank the same number of batches (DistributedSampler, drop_last=True)"
)
_ALONE = (
    "call it on all ranks: move it out of `if rank == 0:`, is_global_zero or is_main_process, and keep only local work "
    "(printing, saving) under that condition"
)
_ONE_LINE = (
    "pass equal tensors (drop_last=True, padding) in the same order (sorted names) and the same root on all ranks; "
    "otherwise look for a call of that line under a condition that differs between ranks"
)
SPLITS_FIT = (
    "make the split sizes fit: output_split_sizes[i] on rank r must be input_split_sizes[r] on rank i; exchange the "
    "sizes first with an all_to_all_single of one number per rank, and use what arrives"
)
_HOOK = (
    "reduce the gradients after backward, in one loop over all parameters in one order, with zeros where a gradient is "
    "None, or use DistributedDataParallel(find_unused_parameters=True): a hook runs only for parameters that the loss "
    "reaches, so all ranks must reach the same ones"
)
_INSIDE = (
    "the ranks are at different places inside that one call: let all ranks leave its loop in the same step; a decision "
    "to stop, skip or save that one rank makes (a callback, a signal, a time limit, a loss) must be all_reduced first"
)


def _reducer_fix(fault: Fault) -> str:
    known = find_known(_SAYS[fault])
    return known.fix if known is not None else ""


def names_words(said: ReducerSaid) -> str:
    """Return "aux.weight, aux.bias (2 of 6 parameters)"."""
    if not said.names:
        return f"{said.count} parameters" if said.count else "a parameter"
    return f"{first_names(said.names, MAX_NAMED, count=said.count)} ({said.count} of {said.of} parameters)"


def reducer_clues(job: JobState, failure: Failure) -> tuple[Clue, ...]:
    said = failure.error.reducer if failure.error is not None else None
    if said is None:
        return ()
    fix = _reducer_fix(said.what)
    if said.what is Fault.TWICE:
        return (Clue(said="a layer ran outside DDP's forward, or in two reentrant checkpoints", fix=fix),)
    users = [] if option_words(job) else _users(job)
    why = "forward did not use them, or the loss does not depend on their output"
    if said.outputs:
        why = f"{said.outputs[0]} in the script depends on them, but the loss does not use it"
    elif users:
        why = _took_another_branch(users)
    return (Clue(said=why, fix=fix),)


def other_words(job: JobState) -> list[str]:
    reported = {n: said for n in job.states if (said := _said(job, n)) is not None and said.what is not Fault.TWICE}
    if not reported:
        return []
    by_names = grouped((said.names, number) for number, said in reported.items())
    found = option_words(job)
    if len(by_names) > 1:
        found += [f"{rank_list(those)} left out {', '.join(names[:MAX_NAMED])}" for names, those in by_names.items()]
    used = _users(job)
    if used and not option_words(job):
        found.append(f"{rank_list(used)} had all gradients and waited in backward for the other ranks")
    return found


def skipped_reduction(job: JobState, conflict: Conflict) -> Problem | None:
    skipping = {part.rank: said for part in conflict.parts if (said := job.ranks[part.rank].unfinished) is not None}
    waiting = [part.rank for part in conflict.parts if part.native and part.kind.op == "backward"]
    if not skipping or not waiting or set(skipping) & set(waiting):
        return None
    blamed = tuple(sorted(skipping))
    said = skipping[blamed[0]]
    return say.problem_of(
        job,
        blamed,
        where=tuple(place for n in blamed for place in places(n, [skipping[n].site])),
        summary=f"backward on {say.who(job, blamed)} ({line_of(said.site)}) left {names_words(said)} without a "
        f"gradient, so DDP skipped the reduction that {rank_list(waiting)} {verb(waiting, 'is', 'are')} waiting in",
        evidence=(
            f"{rank_list(blamed)}: {_took_another_branch(waiting)}",
            *(f"{rank_list([part.rank])}: now in {part.kind.op} ({line_of(part.site)})" for part in conflict.parts),
            *say.progress_words(job, [part.rank for part in conflict.parts]),
            *say.cascade_words(job.failures, (), also=""),
        ),
        fix=_reducer_fix(Fault.UNFINISHED),
    )


def option_words(job: JobState) -> list[str]:
    reported = {n: {model.finds_unused for model in job.ranks[n].models} for n in job.states}
    where, elsewhere = ([n for n, finds in reported.items() if finds == {value}] for value in (True, False))
    if not where or not elsewhere:
        return []
    return [f"{rank_list(where)} passed find_unused_parameters=True to DDP, and {rank_list(elsewhere)} did not"]


def _took_another_branch(users: Sequence[int]) -> str:
    return (
        "forward took a branch without them, or the loss does not depend on their output; on "
        f"{rank_list(users)} it does"
    )


def _said(job: JobState, number: int) -> ReducerSaid | None:
    rank = job.ranks[number]
    return next((raised.reducer for raised in reversed(rank.raised) if raised.reducer is not None), rank.unfinished)


def _users(job: JobState) -> list[int]:
    failed = {f.rank.rank for f in job.failures if f.call is not None and f.call.op == "backward"}
    native = {n for n, state in job.states.items() if state.doing is Activity.NATIVE and state.op == "backward"}
    return [n for n in sorted(failed | native) if _said(job, n) is None]


@rule("DD602", "mismatch", Severity.ERROR, "Ranks disagree about the next collective")
@asked_if(Cause.CONFLICT, Cause.NONE)
def check_mismatch(job: JobState) -> Answer:
    """Report ranks that call a different collective than the others, or one with a different shape or dtype."""
    conflict = job.conflict
    if job.cause is Cause.NONE:
        ended_well = job.facts.ended and job.facts.launcher_status == 0
        conflict = find_misread(job.states, group_table(job.facts), job.world) if ended_well else None
        return judged([_mismatch_problem(job, conflict)] if conflict is not None else [])
    assert conflict is not None
    moving = set(job.living) - job.quiet if job.was_left_running() else set()
    if moving & {part.rank for part in conflict.parts}:
        return unknown(f"{rank_list(moving)} {verb(moving, 'is', 'are')} still making progress")
    return judged([_mismatch_problem(job, conflict)], certain=job.stands_still(()))


def _mismatch_problem(job: JobState, conflict: Conflict) -> Problem:
    skipped = skipped_reduction(job, conflict)
    if skipped is not None:
        return skipped
    parts, blamed, departing, agreeing = conflict.parts, conflict.blame.ranks, conflict.departing, conflict.agreeing
    options = option_words(job) if any(part.native for part in parts) else []
    counts = say.counts_words(job, [part.rank for part in parts])
    # One that was killed in the call has no stack.
    other = next((part for part in agreeing if stack_of(job.ranks[part.rank])), next(iter(agreeing), None))
    way = None
    if departing and other is not None and not conflict.passed:
        way = find_way(job.facts.control_flow, job.states, conflict, other)
    # The number counts from 1, as in NCCL's log and the flight recorder. The text that torch raises under DETAIL counts
    # from 0.
    detail = job.states[parts[0].rank].detail
    counted = f" (SequenceNumber={conflict.seq - 1} in torch's text)" if detail else ""
    sides = _call_classes(parts)
    said = [f"{rank_list(ranks)}: {what}" for what, ranks in list(sides.items())[: say.MAX_CLASSES]]
    said += [f"and {len(sides) - len(said)} other calls"] if len(sides) > len(said) else []
    own = _call_classes(departing)
    turned = f"{way.did} and " if isinstance(way, Turning) and len(own) == 1 else ""
    summary = f"{_side_words(job, conflict, departing, turned)}, but {_side_words(job, conflict, agreeing)}"
    blamed_first = sorted(sides.items(), key=lambda side: side[1][0] not in blamed)
    apart = say.calls_apart([(what, say.who(job, ranks)) for what, ranks in blamed_first])
    if apart and not turned and not conflict.left:
        summary = f"the ranks disagree about {apart}"
    elif conflict.left:
        summary = (
            f"{_side_words(job, conflict, departing)}, but {say.who(job, conflict.left)} did not call it: "
            f"{verb(conflict.left, 'its script has', 'their scripts have')} ended"
        )
    elif not agreeing:
        summary = "the ranks disagree: " + ", ".join(f"{say.who(job, who)} in {what}" for what, who in own.items())
    is_said = way is None or (isinstance(way, Guard) and "condition" in conflict.blame.reason)
    fix = SAME_OPTIONS if options else _call_fix(job, conflict, way, uneven=bool(counts) and not job.facts.control_flow)
    return say.problem_of(
        job,
        blamed,
        confidence=conflict.blame.confidence,
        where=tuple(place for part in departing for place in places(part.rank, _spots(job, part, departing[0], way))),
        summary=summary,
        evidence=(
            f"collective {conflict.seq}{counted} of {group_words(conflict.group, job.world)}: {conflict.blame.reason}",
            *said,
            *([way.words(say.who(job, blamed))] if way is not None and not is_said else ()),
            *_hook_words(job, parts),
            *_inside_words(job, conflict, other),
            *say.classes(job, conflict.left),
            *options,
            *say.handled_words(job, blamed),
            *dict.fromkeys((*counts, *say.progress_words(job, blamed))),
            *say.cascade_words(job.failures, (), also=""),
        ),
        fix=fix,
    )


def _spots(job: JobState, part: TimelineEntry, first: TimelineEntry, way: Turning | Guard | None) -> list[Frame | None]:
    rank = job.ranks[part.rank]
    shown = part.site or rank.last_place or say.line_at(job.states[part.rank])
    way = way if part.key == first.key else None
    if isinstance(way, Turning):
        skips, ends = (any(getattr(detour, name) for detour in way.detours) for name in ("skips_round", "ends_loop"))
        return [shown, *way.lines] if way.loop is not None and ends and not skips else [*way.lines, shown]
    error = innermost_user(rank.handled.frames) if rank.handled is not None else None
    return [way.line if way is not None else None, shown, error]


def _hook_words(job: JobState, parts: Sequence[TimelineEntry]) -> list[str]:
    found = []
    hooked = [part for part in parts if _hook_of(job, part)]
    for shape, ranks in grouped((part.kind.shape, part.rank) for part in hooked).items():
        rank = job.ranks[ranks[0]]
        tensors = [*rank.parameters, *(tensor for model in rank.models for tensor in model.tensors)]
        named = list(dict.fromkeys(tensor.name for tensor in tensors if tensor.shape == shape and not tensor.is_buffer))
        if named and shape is not None:
            of = f"a gradient of shape {list(shape)} ({' or '.join(named[:3])})"
            of = f"the gradient of {named[0]}" if len(named) == 1 else of
            found.append(f"{rank_list(ranks)} {verb(ranks, 'reduces', 'reduce')} {of} in a hook during backward")
    return found


def _hook_of(job: JobState, part: TimelineEntry) -> bool:
    frames = stack_of(job.ranks[part.rank])
    engine = max((at for at, frame in enumerate(frames) if is_file(frame, "/torch/autograd/graph.py")), default=None)
    if engine is None or part.site is None:
        return False
    inside = frames[engine + 1 :]
    own_backward = any(is_file(frame, "/torch/autograd/function.py") for frame in inside)
    return not own_backward and any((frame.file, frame.line) == (part.site.file, part.site.line) for frame in inside)


def _inside_words(job: JobState, conflict: Conflict, shown: TimelineEntry | None) -> list[str]:
    """Return where ranks took different paths in a library, if all of them are at one line of the script."""
    departing, sites = conflict.departing, {part.site for part in conflict.parts}
    if len(sites) > 1 or None in sites or shown is None or len({part.kind.op for part in conflict.parts}) == 1:
        return []
    mine, other = stack_of(job.ranks[departing[0].rank]), stack_of(job.ranks[shown.rank])
    at = next((at for at, (our, their) in enumerate(zip(mine, other, strict=False)) if our != their), None)
    if at is None or at + 1 >= min(len(mine), len(other)) or mine[at].user:
        return []
    if (mine[at].file, mine[at].function) != (other[at].file, other[at].function):
        return []
    return [
        f"inside that line, {rank_list(part.rank for part in parts)} {verb([p.rank for p in parts], 'is', 'are')} in "
        f"{stack[at + 1].function} ({line_of(stack[at])})"
        for parts, stack in ((departing, mine), (conflict.agreeing, other))
    ]


def _call_fix(job: JobState, conflict: Conflict, way: Turning | Guard | None, *, uneven: bool) -> str:
    if conflict.left:
        return _ALONE
    if isinstance(way, Guard):
        return way.fix
    kinds = [part.kind for part in conflict.parts if not part.native]
    ops, dtypes = {part.kind.op for part in conflict.parts}, {kind.dtype for kind in kinds}
    is_one_line = len({part.site for part in conflict.parts}) == 1 and conflict.parts[0].site is not None
    if len(ops) == 1 and len(dtypes) > 1 and len(kinds) == len(conflict.parts):
        # The dtype of a rank that is not to blame, else the widest one.
        others = [part.kind.dtype for part in conflict.agreeing]
        widest = sorted((kind.dtype for kind in kinds), key=lambda dtype: ("64" in str(dtype), "32" in str(dtype)))
        usual = str((others or widest)[-1]).replace("torch.", "")
        return (
            f"give the tensor the same dtype on all ranks before {kinds[0].op} ({line_of(kinds[0].site)}), for example "
            f"with .to(torch.{usual}); look where {rank_list(conflict.blame.ranks)} "
            f"{verb(conflict.blame.ranks, 'creates, loads or casts', 'create, load or cast')} it"
        )
    if ops <= {"all_to_all", "all_to_all_single"}:
        return SPLITS_FIT
    if any(_hook_of(job, part) for part in conflict.parts) and len(ops) == 1:
        return _HOOK
    if way is not None:
        return way.fix
    if is_one_line and len(ops) > 1:
        return _INSIDE
    return _EITHER if uneven else _ONE_LINE if is_one_line and not conflict.passed else ALIKE


def _side_words(job: JobState, conflict: Conflict, parts: list[TimelineEntry], before: str = "") -> str:
    # ``before`` says what each rank did before that.
    return ", ".join(
        f"{say.who(job, ranks)} {before}{'called' if conflict.passed else verb(ranks, 'is in', 'are in')} {what}"
        for what, ranks in _call_classes(parts).items()
    )


def _call_classes(parts: Sequence[TimelineEntry]) -> dict[str, list[int]]:
    """Return the ranks of each call, as it was, at its line, with the properties that must be equal on all ranks."""
    # These are " with MAX to rank 2": the reduction if it is not torch's default, and the root if one was named.
    found: dict[str, list[int]] = {}
    for part in parts:
        kind, what = part.kind, part.kind.op
        if not part.native:
            redop = f" with {kind.redop}" if kind.op in REDUCING and kind.redop not in (None, "SUM") else ""
            root = f" {_TO_ROOT[kind.op]} rank {kind.peer}" if kind.op in ROOTED and kind.peer is not None else ""
            what = f"{call_words(kind)}{redop}{root}"
        found.setdefault(f"{what} ({line_of(part.site)})", []).append(part.rank)
    return found
