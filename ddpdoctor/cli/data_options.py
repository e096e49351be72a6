"""What `check-data` was asked for, and all that can be wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.sharing import Plan, Sharing

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = (
    "The arithmetic alone: ddpdoctor check-data --samples 455 --world-size 2 --batch-size 8\n"
    "  Your own loader: torchrun --nproc-per-node 2 -m ddpdoctor check-data --dataset package.module:make_loader"
)


def read_plan(given: Mapping[str, Any]) -> Plan:
    """Return what the arithmetic is about. Raises ``UserError`` for what does not go together."""
    samples, world_size = given["samples"], given["world_size"]
    if samples is None:
        raise UserError("check-data needs --samples, or --dataset", help=EXAMPLES)
    if world_size is None:
        raise UserError("--samples needs --world-size", help=EXAMPLES)
    sharing = _read_sharing(given)
    if given["sampler_drop_last"] and sharing is not Sharing.SAMPLER:
        raise UserError("--sampler-drop-last is an option of the sampler, and there is none", help="Leave one out.")
    return Plan(
        samples=samples,
        world_size=world_size,
        batch_size=given["batch_size"] or 1,
        drop_last=given["drop_last"],
        sampler_drop_last=given["sampler_drop_last"],
        sharing=sharing,
        shuffle=given["shuffle"],
        accumulation=given["grad_accumulation"],
    )


def _read_sharing(given: Mapping[str, Any]) -> Sharing:
    if given["no_sampler"] and given["split"]:
        raise UserError(
            "--no-sampler and --split are two things", help="--no-sampler: all samples on every rank; --split: by hand."
        )
    if given["no_sampler"]:
        return Sharing.NONE
    return Sharing.SPLIT if given["split"] else Sharing.SAMPLER


ARITHMETIC = ("samples", "batch_size", "drop_last", "sampler_drop_last", "no_sampler", "split")
"""Options that a loader says for itself."""


def refuse_arithmetic(given: Mapping[str, Any]) -> None:
    """Raise ``UserError`` where options of the arithmetic stand beside --dataset."""
    for name in ARITHMETIC:
        if given[name]:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} is for the arithmetic alone, and --dataset asks your loader", help="Leave one of them out."
            )
