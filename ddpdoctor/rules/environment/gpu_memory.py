"""DD307 to DD310: errors of a GPU's memory, and how the GPU handled them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, judged, skipped
from ddpdoctor.rules.environment.devices import gpu_problem, in_use, is_data_center
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.gpus import Gpu
    from ddpdoctor.model.node import Node

MAX_CORRECTED = 50_000_000
"""The default of `--ecc_corrected_volatile_threshold` of gcm's check-nvidia-smi (facebookresearch/gcm)."""
MAX_RETIRED_PAGES = 60
"""Our choice: near the 64 that a GPU can retire (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, "Row Remapping")."""
RESET = "sudo nvidia-smi -r -i {ids} when no process uses {it/them}, or reboot"
REPLACE = "drain the node and have {it/them} replaced; for the serial number: nvidia-smi -q -i {ids} | grep -i serial"


@rule(
    "DD307", "ecc-unc", Severity.ERROR, "GPU memory had errors that ECC could not correct",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: ECC mode and error counters",
)  # fmt: skip
def check_ecc_unc(node: Node) -> Answer:
    """Report uncorrected memory errors since the driver was loaded, and ECC that is switched off.

    ## What it means

    An uncorrected (double-bit) error ends the process that reads the word, with Xid 48, 94 or 95. If the error is not
    contained, it ends other processes too. A GPU that had one often has more.

    ## How it is recognized

    NVML's volatile counter of uncorrected errors starts at 0 when the driver is loaded or the GPU is reset. Any count
    above 0 is an error. More than 50,000,000 corrected errors (the threshold of gcm's health checks) are a warning, and
    so is ECC that is off on a data-center GPU. Past uncorrected errors (the aggregate counter) are only shown.

    ## What else looks like it

    Consumer GPUs have no ECC, or it is off by default. They are not checked.

    ## What to do

    Reset the GPU or reboot, so that the bad row or page is taken out of use. If the counter rises again, have the GPU
    replaced. To switch ECC on, run `nvidia-smi -e 1` and reset the GPU.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.ecc_enabled is not None]
    if not gpus:
        return skipped("no GPU here reports ECC")
    bad = [gpu for gpu in gpus if gpu.ecc_uncorrected_volatile]
    many = [gpu for gpu in gpus if (gpu.ecc_corrected_volatile or 0) > MAX_CORRECTED]
    off = [gpu for gpu in gpus if gpu.ecc_enabled is False and is_data_center(gpu)]
    if not bad and not off and not any(gpu.ecc_enabled for gpu in gpus):
        return skipped("these GPUs have no ECC, or it is off by default")
    what = "had memory errors that ECC could not correct, and {is/are} likely to have more"
    problems = gpu_problem(node, bad, what, detail=_uncorrected, fix=RESET)
    what = "{corrects/correct} very many memory errors: the memory is failing"
    problems += gpu_problem(node, many, what, detail=_corrected, fix=REPLACE, severity=Severity.WARNING)
    what = "{runs/run} without ECC: bit flips can silently corrupt the weights"
    fix = "sudo nvidia-smi -i {ids} -e 1, then reset or reboot"
    problems += gpu_problem(node, off, what, detail=lambda _: "ECC is off", fix=fix, severity=Severity.WARNING)
    past = sum(gpu.ecc_uncorrected_aggregate or 0 for gpu in gpus)
    return judged(
        problems, f"{sum(g.ecc_uncorrected_volatile or 0 for g in gpus)} uncorrected errors now, {past} in total"
    )


def _uncorrected(gpu: Gpu) -> str:
    ever = "" if gpu.ecc_uncorrected_aggregate is None else f", {gpu.ecc_uncorrected_aggregate} in its lifetime"
    return f"{gpu.ecc_uncorrected_volatile} uncorrected errors since the driver was loaded{ever}"


def _corrected(gpu: Gpu) -> str:
    return f"{gpu.ecc_corrected_volatile:,} corrected errors since the driver was loaded"


@rule(
    "DD308", "row-remap", Severity.ERROR, "GPU memory rows must be remapped, or cannot be",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: remapped rows",
)  # fmt: skip
def check_row_remap(node: Node) -> Answer:
    """Report GPUs whose memory ran out of spare rows, or that need a reset to use one.

    ## What it means

    From Ampere on, a GPU replaces a bad row of memory with a spare one at the next reset. "Pending" means that a bad
    row is known and not yet replaced. "Failed" means that no spare row is left for it; NVIDIA then replaces the GPU.

    ## How it is recognized

    The check reads NVML's counts of remapped rows and its two flags. Failed and pending are errors, because the bad row
    can still end a job that starts now. A row that was replaced after an uncorrected error is a warning: it is
    repaired, but the error did happen. Source: docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, where the flag "failed"
    is NVIDIA's condition for a return.

    ## What else looks like it

    A pending row may do no harm. NVIDIA lets running jobs go on, because the driver keeps new jobs off the bad page.
    Still, reset the GPU before the next long job.

    ## What to do

    For a pending row, reset the GPU or reboot. For a failed one, drain the node and have the GPU replaced.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.remap_failed is not None or gpu.remap_pending is not None]
    if not gpus:
        return skipped("no GPU here remaps memory rows")
    failed = [gpu for gpu in gpus if gpu.remap_failed]
    pending = [gpu for gpu in gpus if gpu.remap_pending and not gpu.remap_failed]
    done = [gpu for gpu in gpus if gpu.remapped_uncorrectable and gpu not in failed and gpu not in pending]
    what = "{has/have} bad memory rows and no spare rows left"
    problems = gpu_problem(node, failed, what, detail=_rows, fix=REPLACE)
    what = "{has/have} a bad memory row that stays in use until a reset"
    problems += gpu_problem(node, pending, what, detail=_rows, fix=RESET)
    what = "remapped memory rows after uncorrected errors: {it works/they work} now"
    fix = "watch the count: nvidia-smi -q -d ROW_REMAPPER -i {ids}"
    problems += gpu_problem(node, done, what, detail=_rows, fix=fix, severity=Severity.WARNING)
    rows = sum((gpu.remapped_correctable or 0) + (gpu.remapped_uncorrectable or 0) for gpu in gpus)
    return judged(problems, f"{rows} rows remapped, {len(pending)} GPUs pending, {len(failed)} failed")


def _rows(gpu: Gpu) -> str:
    return (
        f"rows remapped after correctable errors {gpu.remapped_correctable}, after uncorrectable ones "
        f"{gpu.remapped_uncorrectable}; pending: {_yes(gpu.remap_pending)}, failed: {_yes(gpu.remap_failed)}"
    )


def _yes(flag: bool | None) -> str:  # noqa: FBT001 - a flag is what it words
    return "yes" if flag else "no"


@rule(
    "DD309", "retired-pages", Severity.ERROR, "GPU memory pages must be retired, or many were retired",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: retired pages",
)  # fmt: skip
def check_retired_pages(node: Node) -> Answer:
    """Report GPUs before Ampere that still use a bad page of memory, or that retired very many pages.

    ## What it means

    GPUs up to Volta and Turing take a bad page of memory out of use when the driver is loaded again. Until then, a
    process that gets the page can end with Xid 48.

    ## How it is recognized

    A pending page is an error. 60 retired pages or more are a warning (our choice). A GPU can retire 64
    (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt); pages that fail after those stay in use.

    ## What else looks like it

    A few retired pages are normal in the life of a GPU and cost almost no memory. Newer GPUs replace rows instead: see
    row-remap.

    ## What to do

    Reset the GPU or reboot. If many pages are retired, have the board replaced.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.retired_pages is not None or gpu.retired_pending is not None]
    if not gpus:
        return skipped("no GPU here retires memory pages")
    pending = [gpu for gpu in gpus if gpu.retired_pending]
    many = [gpu for gpu in gpus if (gpu.retired_pages or 0) >= MAX_RETIRED_PAGES]
    what = "{has/have} a bad memory page that stays in use until the driver is reloaded"
    problems = gpu_problem(node, pending, what, detail=_pages, fix=RESET)
    what = f"retired {MAX_RETIRED_PAGES} memory pages or more, and the maximum is 64"
    problems += gpu_problem(node, many, what, detail=_pages, fix=REPLACE, severity=Severity.WARNING)
    return judged(problems, f"{sum(gpu.retired_pages or 0 for gpu in gpus)} pages retired")


def _pages(gpu: Gpu) -> str:
    return f"{gpu.retired_pages} pages retired, pending: {_yes(gpu.retired_pending)}"


@rule(
    "DD310", "sram-threshold", Severity.ERROR, "A GPU's caches had too many uncorrected errors",
    group=CheckGroup.GPUS, needs=("gpus",), reads="NVML: SRAM ECC error status",
)  # fmt: skip
def check_sram_threshold(node: Node) -> Answer:
    """Report GPUs whose on-chip memories had more uncorrected errors than NVIDIA allows.

    ## What it means

    Caches and register files have no spare rows: a part that fails there keeps failing.

    ## How it is recognized

    An NVML flag, set by the driver, says that the threshold is exceeded. It covers the GPU's whole life. DCGM reports
    the same as "SRAM Threshold Count". Source: docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, "RMA Policy".

    ## What else looks like it

    Nothing does. A reset does not clear the flag, and single errors do not set it.

    ## What to do

    Take the node out of use, and have the GPU replaced.
    """
    gpus = [gpu for gpu in in_use(node) if gpu.sram_threshold_exceeded is not None]
    if not gpus:
        return skipped("no GPU or driver here reports errors in SRAM")
    over = [gpu for gpu in gpus if gpu.sram_threshold_exceeded]
    what = "had more uncorrected cache errors than NVIDIA allows"
    problems = gpu_problem(node, over, what, detail=lambda _: "threshold exceeded", fix=REPLACE)
    return judged(problems, f"threshold not exceeded on {len(gpus) - len(over)} of {len(gpus)}")
