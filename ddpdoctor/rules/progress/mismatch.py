"""DD602: ranks disagree about the next collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import grouped, name_list, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.conflicts import REDUCING, ROOTED, find_misread
from ddpdoctor.rules.progress.groups import group_table, group_words
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.lone_calls import call_frames, find_guard, has_called
from ddpdoctor.rules.progress.places import innermost_user, is_file, places
from ddpdoctor.rules.progress.reducer_causes import option_words, skipped_reduction
from ddpdoctor.rules.progress.states import stack_of
from ddpdoctor.rules.progress.turning import ALIKE, did_words, find_turning, fix_of_turning, turning_words
from ddpdoctor.rules.progress.words import call_words, line_of, verb

if TYPE_CHECKING:
    from ddpdoctor.model.facts import CallKind
    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.conflicts import Conflict
    from ddpdoctor.rules.progress.timeline import TimelineEntry
    from ddpdoctor.rules.progress.turning import Turning


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


@rule("DD602", "mismatch", Severity.ERROR, "Ranks disagree about the next collective")
def check_mismatch(job: JobState) -> Answer:
    """Report ranks that call a different collective than the others, or one with a different shape or dtype."""
    conflict = job.conflict
    if job.cause is Cause.NONE and job.facts.ended and job.facts.launcher_status == 0:
        conflict = find_misread(job.states, group_table(job.facts), job.world)
        return judged([_finding(job, conflict)]) if conflict is not None else passed()
    if job.cause is not Cause.CONFLICT or conflict is None:
        return skipped(job.cause.value) if job.cause is not Cause.NONE else passed()
    moving = set(job.living) - job.quiet if job.was_left_running() else set()
    if moving & {part.rank for part in conflict.parts}:
        return unknown(f"{rank_list(moving)} {verb(moving, 'is', 'are')} still making progress")
    return judged([_finding(job, conflict)], certain=job.stands_still(()))


def _finding(job: JobState, conflict: Conflict) -> Problem:
    skipped = skipped_reduction(job, conflict)
    if skipped is not None:
        return skipped
    blamed = conflict.blame.ranks
    options = option_words(job) if any(part.native for part in conflict.parts) else []
    counts = say.counts_words(job, [part.rank for part in conflict.parts])
    departing = [part for part in conflict.parts if part.rank in set(blamed)]
    turning = _turning(job, conflict, departing)
    guard = _guard(job, conflict, departing) if turning is None else None
    alike = {part.rank for part in departing if part.key == departing[0].key}
    where = tuple(
        place
        for part in departing
        for place in places(part.rank, _lines(job, part, (turning, guard) if part.rank in alike else (None, None)))
    )
    return Problem(
        confidence=conflict.blame.confidence,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        step=say.step_of(job, blamed),
        summary=_summary(job, conflict, departing, turning),
        evidence=(
            _number_words(job, conflict),
            *_sides(conflict),
            *(turning_words(turning, say.who(job, blamed)) if turning is not None else ()),
            *([f"its call is under the condition at {line_of(guard)}, and the other ranks never made that call"]
              if guard is not None and "condition" not in conflict.blame.reason else ()),
            *_hook_words(job, conflict),
            *_inside_words(job, conflict, departing),
            *say.classes(job, conflict.left),
            *options,
            *say.handled_words(job, blamed),
            *dict.fromkeys((*counts, *say.progress_words(job, blamed))),
            *say.cascade_words(job.failures, (), also=""),
        ),
        fix=SAME_OPTIONS
        if options
        else _fix(job, conflict, (turning, guard), uneven=bool(counts) and not job.facts.control_flow),
    )  # fmt: skip


def _number_words(job: JobState, conflict: Conflict) -> str:
    """Return the number of the collective, and why this rank is blamed.

    The number counts from 1, as in NCCL's log and the flight recorder. The text that torch raises under DETAIL counts
    from 0.
    """
    detail = job.states[conflict.parts[0].rank].detail
    counted = f" (SequenceNumber={conflict.seq - 1} in torch's text)" if detail else ""
    group = group_words(conflict.group, job.world)
    return f"collective {conflict.seq}{counted} of {group}: {conflict.blame.reason}"


def _turning(job: JobState, conflict: Conflict, departing: list[TimelineEntry]) -> Turning | None:
    """Return how the first blamed rank parted from the first rank that agrees with the others."""
    agreeing = [part for part in conflict.parts if part not in departing]
    if conflict.passed or not departing or not agreeing:
        return None
    mine, other = departing[0], _shown(job, agreeing)
    return find_turning(
        job.facts.control_flow, job.states[mine.rank], job.states[other.rank], conflict.group.name, conflict.seq,
        (mine, other),
    )  # fmt: skip


def _usual_dtype(conflict: Conflict) -> str:
    """Return the dtype of a rank that is not to blame, else the widest one."""
    dtypes = [part.kind.dtype for part in conflict.parts if part.rank not in conflict.blame.ranks]
    dtypes = dtypes or sorted(
        (part.kind.dtype for part in conflict.parts), key=lambda one: ("64" in str(one), "32" in str(one))
    )
    return str(dtypes[-1]).replace("torch.", "")


def _hook_of(job: JobState, part: TimelineEntry) -> bool:
    """Return whether a rank made the call in a hook that autograd runs when a gradient is ready."""
    frames = stack_of(job.rank(part.rank))
    engine = max((at for at, frame in enumerate(frames) if is_file(frame, "/torch/autograd/graph.py")), default=None)
    if engine is None or part.site is None:
        return False
    inside = frames[engine + 1 :]
    own_backward = any(is_file(frame, "/torch/autograd/function.py") for frame in inside)
    return not own_backward and any((frame.file, frame.line) == (part.site.file, part.site.line) for frame in inside)


def _hook_words(job: JobState, conflict: Conflict) -> list[str]:
    """Return the parameters whose gradients the ranks reduce in hooks, as far as their shapes tell."""
    found = []
    hooked = [part for part in conflict.parts if _hook_of(job, part)]
    for shape, ranks in grouped((part.kind.shape, part.rank) for part in hooked).items():
        rank = job.rank(ranks[0])
        tensors = [*rank.parameters, *(tensor for model in rank.models for tensor in model.tensors)]
        named = list(dict.fromkeys(one.name for one in tensors if one.shape == shape and not one.is_buffer))
        if named and shape is not None:
            of = (
                f"the gradient of {name_list(named, most=3)}"
                if len(named) == 1
                else f"a gradient of shape {list(shape)} ({' or '.join(named[:3])})"
            )
            found.append(f"{rank_list(ranks)} {verb(ranks, 'reduces', 'reduce')} {of} in a hook during backward")
    return found


def _inside_words(job: JobState, conflict: Conflict, departing: list[TimelineEntry]) -> list[str]:
    """Return where a library took other ways on the ranks, if all of them are at one line of the script."""
    agreeing = [part for part in conflict.parts if part not in departing]
    sites = {part.site for part in conflict.parts}
    if len(sites) > 1 or None in sites or not agreeing or len({part.kind.op for part in conflict.parts}) == 1:
        return []
    mine, other = stack_of(job.rank(departing[0].rank)), stack_of(job.rank(_shown(job, agreeing).rank))
    at = next((at for at, (one, two) in enumerate(zip(mine, other, strict=False)) if one != two), None)
    if at is None or at + 1 >= min(len(mine), len(other)) or mine[at].user:
        return []
    if (mine[at].file, mine[at].function) != (other[at].file, other[at].function):
        return []
    return [
        f"inside that line, {rank_list(part.rank for part in parts)} {verb([p.rank for p in parts], 'is', 'are')} in "
        f"{stack[at + 1].function} ({line_of(stack[at])})"
        for parts, stack in ((departing, mine), (agreeing, other))
    ]


def _guard(job: JobState, conflict: Conflict, departing: list[TimelineEntry]) -> Frame | None:
    """Return the condition that led a rank to a call that no other rank has made."""
    agreeing = [part for part in conflict.parts if part not in departing]
    if conflict.passed or not departing or not agreeing:
        return None
    mine, others = departing[0], [job.rank(part.rank) for part in agreeing]
    if any(has_called(other, mine.kind) for other in others):
        return None
    shown = _shown(job, agreeing)
    frames = call_frames(job.rank(mine.rank), mine.site)
    return find_guard(job.facts.control_flow, frames, call_frames(job.rank(shown.rank), shown.site), over=False)


def _shown(job: JobState, parts: list[TimelineEntry]) -> TimelineEntry:
    """Return the first of these ranks whose stack is known: one that was killed in the call has none."""
    return next((part for part in parts if stack_of(job.rank(part.rank))), parts[0])


def _fix(
    job: JobState, conflict: Conflict, decided: tuple[Turning | None, Frame | None], *, uneven: bool
) -> str:  # fmt: skip
    turning, guard = decided
    if conflict.left:
        return _ALONE
    if guard is not None:
        return (
            f"let all ranks take the same branch at {line_of(guard)}: decide it on one rank and broadcast the decision"
        )
    kinds = [part.kind for part in conflict.parts if not part.native]
    ops, dtypes = {part.kind.op for part in conflict.parts}, {kind.dtype for kind in kinds}
    is_one_line = len({part.site for part in conflict.parts}) == 1 and conflict.parts[0].site is not None
    if len(ops) == 1 and len(dtypes) > 1 and len(kinds) == len(conflict.parts):
        return (
            f"give the tensor the same dtype on all ranks before {kinds[0].op} ({line_of(kinds[0].site)}), for example "
            f"with .to(torch.{_usual_dtype(conflict)}); look where {rank_list(conflict.blame.ranks)} "
            f"{verb(conflict.blame.ranks, 'creates, loads or casts', 'create, load or cast')} it"
        )
    if ops <= {"all_to_all", "all_to_all_single"}:
        return SPLITS_FIT
    if any(_hook_of(job, part) for part in conflict.parts) and len(ops) == 1:
        return _HOOK
    if len(ops) > 1 and is_one_line and turning is None:
        return _INSIDE
    if turning is not None:
        return fix_of_turning(turning)
    if uneven:
        return _EITHER
    sites = {part.site for part in conflict.parts}
    return _ONE_LINE if len(sites) == 1 and None not in sites and not conflict.passed else ALIKE


def _lines(
    job: JobState, part: TimelineEntry, decided: tuple[Turning | None, Frame | None]
) -> list[Frame | None]:  # fmt: skip
    """Return the lines that decided it, the line of the call, and the line of the error that led to the call."""
    turning, guard = decided
    rank = job.rank(part.rank)
    error = innermost_user(rank.handled.frames) if rank.handled is not None else None
    shown = part.site or rank.last_place or say.line_at(job.states[part.rank])
    if turning is None:
        return [guard, shown, error]
    if turning.loop_ended:
        return [shown, *turning.lines]
    return [*turning.lines, shown]


def _summary(job: JobState, conflict: Conflict, departing: list[TimelineEntry], turning: Turning | None) -> str:
    agreeing = [part for part in conflict.parts if part not in departing]
    if conflict.left:
        left = conflict.left
        return (
            f"{_side_words(job, conflict, departing)}, but {say.who(job, left)} did not call it: "
            f"{verb(left, 'its script has', 'their scripts have')} ended"
        )
    if not agreeing:
        sides = _call_classes(departing).items()
        return "the ranks disagree: " + ", ".join(f"{say.who(job, ranks)} in {what}" for what, ranks in sides)
    turned = f"{did_words(turning)} and " if turning is not None and len(_call_classes(departing)) == 1 else ""
    mine = _side_words(job, conflict, departing, turned)
    return f"{mine}, but {_side_words(job, conflict, agreeing)}"


def _side_words(job: JobState, conflict: Conflict, parts: list[TimelineEntry], before: str = "") -> str:
    """Return "rank 0 is in reduce (train.py:6)", or what it called if that call went through.

    ``before`` says what each rank did before that.
    """
    said = []
    for what, ranks in _call_classes(parts).items():
        now = verb(ranks, "is in", "are in")
        said.append(f"{say.who(job, ranks)} {before}{'called' if conflict.passed else now} {what}")
    return ", ".join(said)


def _call_classes(parts: list[TimelineEntry]) -> dict[str, list[int]]:
    return grouped((part_words(part), part.rank) for part in parts)


def part_words(part: TimelineEntry) -> str:
    """Return what a rank called, at which line, with the properties that must be equal on all ranks."""
    what = part.kind.op if part.native else f"{call_words(part.kind)}{_agreed_words(part.kind)}"
    return f"{what} ({line_of(part.site)})"


def _agreed_words(kind: CallKind) -> str:
    """Return " with MAX to rank 2": the reduction if it is not torch's default, and the root if one was named."""
    redop = f" with {kind.redop}" if kind.op in REDUCING and kind.redop not in (None, "SUM") else ""
    root = f" {_TO_ROOT[kind.op]} rank {kind.peer}" if kind.op in ROOTED and kind.peer is not None else ""
    return redop + root


def _sides(conflict: Conflict) -> list[str]:
    sides = _call_classes(list(conflict.parts))
    said = [f"{rank_list(ranks)}: {what}" for what, ranks in list(sides.items())[: say.MAX_CLASSES]]
    left = len(sides) - len(said)
    return [*said, f"and {left} other calls"] if left else said
