"""DD812: a model is wrapped in DataParallel and not in DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed
from ddpdoctor.rules.registry import rule

from .words import place

if TYPE_CHECKING:
    from .state import SpeedState


@rule("DD812", "data-parallel", Severity.WARNING, "A model uses DataParallel instead of DistributedDataParallel")
def check_data_parallel(state: SpeedState) -> Answer:
    """Report a rank that trains a model in `torch.nn.DataParallel`.

    ## What it means

    `DataParallel` runs one process with a thread for each GPU. It copies the model to all GPUs and gathers all outputs
    on the first one in every step, while all threads share one GIL. torch itself advises against it. Without several
    GPUs it does nothing at all.

    ## How it is recognized

    The recorder notes where a `DataParallel` was built, once its forward runs with gradients on. One that is only used
    to load a checkpoint is not reported, and neither is one on a single GPU.

    ## How sure

    High. How much is gained was not measured, so no share is given.

    ## What to do

    Start one process per GPU with torchrun, and change the script:

        dist.init_process_group()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = DistributedDataParallel(model.cuda())
        loader = DataLoader(data, sampler=DistributedSampler(data), ...)

    ## Example

        the model uses DataParallel, which runs one process for all GPUs
    """
    used = {rank.rank: rank.speed.data_parallel for rank in state.ranks if rank.speed and rank.speed.data_parallel}
    found = {number: seen for number, all_seen in used.items() for seen in all_seen if seen.devices != 1}
    if not found:
        return passed("no model uses DataParallel")
    devices = max(seen.devices for seen in found.values())
    what = "which runs one process for all GPUs" if devices else "which does nothing without GPUs"
    problem = Problem(
        summary=f"the model uses DataParallel, {what}",
        ranks=tuple(found),
        where=tuple(place(number, seen.site) for number, seen in found.items() if seen.site is not None),
        evidence=(f"DataParallel has {devices} devices" if devices else "DataParallel found no GPU",),
        fix="start one process per GPU with torchrun, and wrap the model in DistributedDataParallel; "
        "`ddpdoctor explain DD812` shows the code",
        share=0.0,
    )
    return judged([problem])
