"""Which job of ``jobs/speed`` loses time for which reason, and which of them look alike and lose none."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scenarios.running import JOBS, PATIENT, Ran, run


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What must be found."""

    kind: str
    ranks: tuple[int, ...] = (0, 1)
    also: tuple[str, ...] = ()
    """Kinds that are as true."""
    says: str = ""
    """A word that the evidence or the fix must have."""


def straggler(says: str) -> Fault:
    return Fault(kind="straggler", ranks=(1,), says=says)


FAULTS = {
    "input_bound no_workers": Fault(kind="input-bound", says="num_workers="),
    "input_bound streams": Fault(kind="input-bound"),
    "input_bound collates": Fault(kind="input-bound", says="num_workers="),
    "input_bound decodes": Fault(kind="input-bound"),
    "input_bound starved": Fault(kind="input-bound", says="num_workers="),
    "input_bound behind": Fault(kind="input-bound", says="num_workers="),
    "input_bound restarted": Fault(kind="input-bound", says="persistent_workers"),
    "straggler reads": straggler("loader"),
    "straggler larger_batch": straggler("batches"),
    "straggler attends": straggler("forward"),
    "straggler differentiates": straggler("backward"),
    "straggler collects": Fault(kind="straggler", ranks=(1,), also=("gc-pauses",), says="garbage"),
    "straggler saves": straggler("before forward"),
    "straggler logs": straggler("before forward"),
    "straggler evaluates": straggler("before forward"),
    "imbalance lengths": Fault(kind="imbalance"),
    "imbalance crops": Fault(kind="imbalance"),
    "communication head": Fault(kind="communication-bound"),
    "communication table": Fault(kind="communication-bound"),
    "communication wide": Fault(kind="communication-bound", also=("bucket-size",)),
    "buckets one_for_each_tensor": Fault(kind="bucket-size", says="bucket_cap_mb="),
    "buckets one_for_all": Fault(kind="bucket-size", also=("communication-bound",)),
    "buckets few_kib": Fault(kind="bucket-size", says="bucket_cap_mb="),
    "accumulation every_part": Fault(kind="accumulation-sync", also=("communication-bound",), says="no_sync"),
    "accumulation forward_outside": Fault(kind="accumulation-sync", also=("communication-bound",), says="no_sync"),
    "find_unused all_used": Fault(kind="find-unused-needless", says="find_unused_parameters"),
    "find_unused plain": Fault(kind="find-unused-needless", says="find_unused_parameters"),
    "buffers mask": Fault(kind="buffer-broadcast"),
    "buffers queue": Fault(kind="buffer-broadcast"),
    "each_step gathers": Fault(kind="sync-each-step"),
    "each_step many_metrics": Fault(kind="sync-each-step"),
    "each_step objects": Fault(kind="sync-each-step"),
    "each_step pickles": Fault(kind="sync-each-step"),
    "rank_zero evaluates": Fault(kind="rank-zero-work", ranks=(0,)),
    "rank_zero saves": Fault(kind="rank-zero-work", ranks=(0,)),
    "rank_zero logs": Fault(kind="rank-zero-work", ranks=(0,)),
    "rank_zero draws": Fault(kind="rank-zero-work", ranks=(0,)),
    "gc_pauses collects": Fault(kind="gc-pauses", says="gc.freeze"),
    "gc_pauses keeps": Fault(kind="gc-pauses", says="gc.freeze"),
    "gc_pauses eagerly": Fault(kind="gc-pauses", says="gc.freeze"),
    "threads all_cores_each": Fault(kind="cpu-oversubscribed", says="OMP_NUM_THREADS="),
    "threads of_a_large_machine": Fault(kind="cpu-oversubscribed", says="OMP_NUM_THREADS="),
    "data_parallel trains": Fault(kind="data-parallel"),
    "data_parallel alone": Fault(kind="data-parallel"),
    "data_parallel inside": Fault(kind="data-parallel"),
    "by_hand one_by_one": Fault(kind="hand-made-reduce", says="DistributedDataParallel"),
    "by_hand copies": Fault(kind="hand-made-reduce", says="DistributedDataParallel"),
    "by_hand over_rank_0": Fault(kind="hand-made-reduce", also=("sync-each-step",)),
    "periodic_stall all_save": Fault(kind="periodic-stall"),
    "periodic_stall epochs": Fault(kind="periodic-stall"),
    "periodic_stall all_evaluate": Fault(kind="periodic-stall"),
    "lightning_job unused": Fault(kind="find-unused-needless", says='strategy="ddp"'),
    "lightning_job slow_rows": Fault(kind="input-bound", says="num_workers="),
    "accelerate_job every_part": Fault(
        kind="accumulation-sync", also=("communication-bound",), says="gradient_accumulation_steps"
    ),
    "transformers_job default": Fault(kind="find-unused-needless", says="ddp_find_unused_parameters"),
    "transformers_job slow_rows": Fault(kind="input-bound", says="dataloader_num_workers"),
}
HEALTHY = (
    "input_bound cheap",
    "input_bound hidden",
    "input_bound persistent",
    "straggler jitter",
    "straggler warms_up",
    "straggler pauses",
    "imbalance sorted_by_length",
    "imbalance nearly_even",
    "accumulation at_the_last",
    "accumulation two_models",
    "communication overlapped",
    "buckets many_tensors",
    "find_unused in_turn",
    "find_unused rarely",
    "buffers norms",
    "buffers kept",
    "each_step meets",
    "each_step averages_the_loss",
    "each_step every_20",
    "rank_zero saves_once",
    "rank_zero prints",
    "rank_zero all_evaluate",
    "gc_pauses frozen",
    "gc_pauses young",
    "threads one_each",
    "threads idle",
    "data_parallel unwraps",
    "by_hand flat",
    "by_hand local_sgd",
    "periodic_stall once",
    "quiet small",
    "quiet normalized",
    "quiet warms_up",
    "quiet pauses",
    "quiet short",
    "lightning_job well",
    "accelerate_job accumulates",
    "transformers_job quick_rows",
)
NOT_THAT = {
    "communication accumulated": "accumulation-sync",
}
"""Jobs that are slow for another reason than the one that they look like."""
NOT_KEPT = {
    "input_bound behind", "straggler reads", "data_parallel inside", "by_hand copies", "by_hand over_rank_0",
    "periodic_stall epochs", "quiet pauses",
}  # fmt: skip
"""They wait for a quiet machine to be recorded on: until then they are run by night only."""


def run_way(case: str, folder: Path) -> Ran:
    """Run a job of ``jobs/speed`` in one of its ways."""
    job, way = case.split()
    return run(f"speed/{job}", folder, "--speed", *PATIENT, ranks=2, args=(way,))


def fault_lines(case: str) -> set[int]:
    """Return the lines that are at fault in one way of a job. A mark names ways; without names it is for all."""
    job, way = case.split()
    lines = (JOBS / "speed" / f"{job}.py").read_text().splitlines()
    marks = {number: line.partition("# FAULT")[2].split() for number, line in enumerate(lines, 1) if "# FAULT" in line}
    return {number for number, ways in marks.items() if not ways or way in ways}


def named_lines(verdict: dict[str, Any], case: str) -> set[int]:
    """Return the lines of the job that a verdict names."""
    name = f"{case.partition(' ')[0]}.py"
    return {place["line"] for place in verdict["where"] if Path(place["file"]).name == name}
