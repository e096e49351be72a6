"""The grid of DDP's gradients beside those of one process: how many times the rounding error each is off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import GridCell
from ddpdoctor.report.grids.build import MAX_ROWS, grid_by_member, log_level, not_shown

if TYPE_CHECKING:
    from ddpdoctor.model.trial import GradientErrors, Trial
    from ddpdoctor.report.blocks import Section


def error_ratio(one: GradientErrors) -> float:
    """Return how many times its rounding error a gradient is off."""
    return one.whole / one.rounding if one.rounding else float(bool(one.whole))


def reference_pictures(trial: Trial) -> tuple[Section, ...]:
    """Return the grid of parameters by steps, the worst first. Nothing if there was no comparison."""
    steps = () if trial.reference is None else trial.reference.steps
    errors: dict[str, dict[int, GradientErrors]] = {}
    for at, step in enumerate(steps):
        for one in step.tensors:
            errors.setdefault(one.name, {})[at] = one
    if not errors:
        return ()
    worst = {name: max(map(error_ratio, by_step.values())) for name, by_step in errors.items()}
    names = sorted(errors, key=lambda name: -worst[name])
    shown = names[:MAX_ROWS]
    highest = worst[names[0]]
    grid = grid_by_member(
        "how many times the rounding error DDP's gradient is off from that of one process",
        [(name, {at: _cell(one, highest) for at, one in errors[name].items()}) for name in shown],
        range(len(steps)),
        lambda those: ", ".join(f"step {steps[at].step}" for at in those),
        axes=("parameter", "step"),
        legend=not_shown(len(names) - len(shown), "parameter"),
    )
    return ((grid,),)


def _cell(one: GradientErrors, highest: float) -> GridCell:
    scale = one.norm or 1
    ratio = error_ratio(one)
    return GridCell(
        text=f"{ratio:.3g}",
        about=f"relative error {one.whole / scale:.1e}, rounding {one.rounding / scale:.1e}",
        level=log_level(max(ratio, 1.0), 1.0, highest),
    )
