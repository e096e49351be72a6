"""Says what to collect next, as commands, where the evidence does not name a cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Doing, Exited, Hint, Inside, Link, Moving, ProcessState, Stacked, Waiting
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.evidence.lost import lost_by

if TYPE_CHECKING:
    from ddpdoctor.rules.evidence.state import RunState

MOST_REASONS = 12
EARLY = 3
"""Our choice: a job that fails at so low a number has not exchanged anything yet."""
_OTHERS = (
    "give the logs and flight recorder dumps of {those}: "
    "`ddpdoctor analyze LOGS... ~/.cache/torch/comm_lib_trace_rank_* /tmp/nccl_trace_rank_*` on every node"
)
_LOST = "give the log of {who} and the kernel log of its host: others lost their connection to it"
_RAS = "run `ncclras -v` twice, half a minute apart, while the job hangs (since NCCL 2.28.7: `ncclras -f json`)"
_OTHER_NODES = "run `ddpdoctor attach --folder DIR` on the nodes of {those}, then `ddpdoctor analyze` with all folders"
SAMPLE_AGAIN = "check again in a minute with `ddpdoctor attach` or py-spy: a rank that is just slow has moved by then"
_PENDING = (
    "over NCCL no stack shows which call a rank waits for in item() or synchronize(): for the next run, use "
    "`ddpdoctor wrap`, or set TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/nccl_pipe_ TORCH_FR_BUFFER_SIZE=2000, so that "
    "`ddpdoctor attach` can ask torch; once torch's own time limit has passed, analyze what it dumps"
)
_RUNNING = "if the job is still running, run `ddpdoctor attach` on every node, or `py-spy dump --pid PID` for all ranks"
_WORKERS = "also take the stacks of the workers, twice: `py-spy dump --subprocesses --pid PID` for all ranks"
_FIRST = (
    "the first collectives never completed: start the job with NCCL_P2P_DISABLE=1; if that helps, disable PCIe ACS, "
    "and disable the IOMMU or set it to passthrough"
)
_NEWER = "torch 2.5 or newer records the group of each collective"
_INSIDE = (
    "collect on every node: `dmesg -T | grep -i xid`, `nvidia-smi -q`, while it hangs `ncclras -v` and "
    "`py-spy dump --native --pid PID` of all ranks, and a run with NCCL_DEBUG=INFO; "
    "test the links with `torchrun ... -m ddpdoctor allreduce-bench --pairs`"
)
_DUMPS = (
    "for the next run, set TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1, "
    "so that each rank leaves a flight recorder dump"
)
KILLED = "`dmesg -T | grep -i kill` on the host, `sacct -j JOB -o JobID,State,ExitCode,MaxRSS`, `kubectl describe pod`"
_STDERR = "the standard error of each rank: `torchrun --redirects 3 --tee 3 ...`"


_STACKS = (
    "take the native stacks of all ranks twice, half a minute apart: `ddpdoctor attach`, or "
    "`py-spy dump --native --pid PID`; and the utilization of each GPU: `nvidia-smi`"
)
_OF_RAS = frozenset({"ras", "ras-ahead", "ras-unnamed", "damaged"})


def collect(state: RunState) -> tuple[str, ...]:
    """Return what to collect, as instructions, the most useful first."""
    if state.all(Moving) and not state.went_wrong:
        return (_RUNNING,)  # nothing but how it went on is lacking
    found = list(dict.fromkeys(refused.remedy for refused, _ in state.refusals() if refused.remedy))
    looked = bool(state.all(ProcessState))
    unseen = state.unseen
    lost = lost_by(state)
    if lost is not None and lost.rank not in state.seen:
        found.append(_LOST.format(who=f"rank {lost.rank}" if lost.rank is not None else lost.host))
    waits = bool(state.waiting) or bool(state.all(Link))
    whole = any(fact.complete for fact in state.all(Inside))
    if unseen:
        found.append((_OTHER_NODES if looked else _OTHERS).format(those=f"the other ranks ({rank_list(unseen)})"))
    elif state.world is None and not whole:
        found.append(_OTHERS.format(those="all other ranks"))
    if whole or (waits and not unseen):
        found.append(_INSIDE)
    if any(fact.kind in _OF_RAS for fact in state.all(Hint)):
        found.append(_RAS)
    found += _for_waits(state)
    if state.all(Exited):
        found += [_STDERR, KILLED]
    if state.all(Stacked) and (whole or not looked):
        found.append(_STACKS)
    elif not looked and not any(fact.timed_out for fact in state.all(Waiting)):
        found.append(_RUNNING)
    return tuple(found) or ((SAMPLE_AGAIN, _PENDING) if looked else (_RUNNING,))


def _for_waits(state: RunState) -> list[str]:
    """Return what to collect where ranks ran into a time limit or wait for data."""
    found = []
    limits = [fact for fact in state.all(Waiting) if fact.timed_out]
    if limits and not state.run.dumps:
        found.append(_DUMPS)
    numbered = [fact for fact in limits if fact.operation.seq is not None]
    if numbered and not any(fact.operation.group_words for fact in numbered):
        found.append(_NEWER)
    if numbered and all((fact.operation.seq or 0) < EARLY for fact in numbered):
        found.append(_FIRST)
    if any(fact.doing is Doing.DATA for fact in state.all(Stacked)):
        found.append(_WORKERS)
    return found


def about(state: RunState) -> tuple[str, ...]:
    """Return what could not be read or was left out, and the notes of what was read."""
    lacking = state.evidence.lacking()
    more = [f"and {len(lacking) - MOST_REASONS} more reasons"] if len(lacking) > MOST_REASONS else []
    refused = (one.words(ranks) for one, ranks in state.refusals())
    notes = list(dict.fromkeys([*refused, *(fact.words for fact in state.all(Hint) if fact.words)]))
    return (*lacking[:MOST_REASONS], *more, *notes[:MOST_REASONS])
