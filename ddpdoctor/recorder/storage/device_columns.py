"""The columns of a step that was measured on a GPU. Times are microseconds."""

from __future__ import annotations

PHASES = ("before", "forward", "between", "backward", "optimizer")
"""The phases of ``ring_layout``, and the optimizer's step, which is a part of "before" there."""
OPTIMIZER = 4
HOST = ("number", "data_us", "data_cpu_us", "gc_us", "rows", "numel", "reductions", "backwards", "behind")
COLUMNS = (*HOST, *("gpu_%s_us" % phase for phase in PHASES), *("host_%s_us" % phase for phase in PHASES))
