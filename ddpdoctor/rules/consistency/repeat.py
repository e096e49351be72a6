"""DD510: two runs with the same seed are not bitwise equal on the same rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.trial import Rerun, Trial


@rule("DD510", "not-repeatable", Severity.INFO, "Two runs with the same seed differ on the same rank")
def check_repeat(trial: Trial) -> Answer:
    """Report that a second run with the same seed does not give the same bits on the same rank.

    ## What it means

    Nothing is wrong with the replicas, which are compared with each other in each run. The code or the machine does not
    repeat itself. You then cannot compare two runs, or two machines, bit by bit, and a bug that shows in one run may
    not show in the next.

    ## How it is recognized

    `check-consistency --twice` builds and trains the model a second time with the same seed. It compares 16 bytes per
    tensor with the first run on the same rank: the built model, each batch, then gradients, parameters and optimizer
    state of each step.

    ## How sure

    High. The finding does not say which code is to blame; the first tensor that differs shows where to look.

    ## What to do

    Create batches and models with torch's generators, which are seeded, not from the time, os.urandom or the order of a
    set. On GPUs, atomic additions sum in any order: use `torch.use_deterministic_algorithms(True)` and
    `CUBLAS_WORKSPACE_CONFIG`.

    ## Example

        a second run with the same seed differs from the first since step 1: the gradient of embed.weight, 1 of 12
        tensors
    """
    rerun = trial.rerun
    if rerun is None:
        return skipped("--twice was not asked for")
    if rerun.step is None:
        return passed()
    return judged(
        [
            Problem(
                ranks=rerun.ranks,
                step=rerun.step or None,
                tensor=rerun.name if rerun.what is not None else None,
                summary=f"a second run with the same seed differs from the first {_since(rerun)}: {_what(rerun)}",
                evidence=(f"on {rank_list(rerun.ranks)}; this is no drift between ranks",),
                fix="see torch.use_deterministic_algorithms; draw all random numbers from generators that are seeded",
            )
        ]
    )


def _since(rerun: Rerun) -> str:
    return f"since step {rerun.step}" if rerun.step else "as it is built"


def _what(rerun: Rerun) -> str:
    if rerun.what is None:
        return rerun.name
    part = f" ({rerun.part})" if rerun.part else ""
    return f"the {rerun.what.value} {rerun.name}{part}, {rerun.differing} of {rerun.of} tensors"
