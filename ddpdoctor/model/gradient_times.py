"""When each gradient of a DDP model is ready in backward, and the buckets in which DDP reduces them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTimes:
    """Medians over the backwards of one DDP model on one rank that were read. Times count from backward's start."""

    number: int
    """Of the model among those of its rank, by their first reduction, from 1."""
    group: str
    """Name of the process group that DDP reduces in."""
    sizes_bytes: tuple[int, ...]
    """In the order of the model's parameters. In a very large model neighbors are folded into one."""
    ready_ms: tuple[float | None, ...]
    """By the same tensors; None if it usually had no gradient."""
    bucket_bytes: tuple[int, ...]
    """The buckets' sizes, in the order in which they are reduced."""
    compute_end_ms: float
    """When the computation of backward ended."""
    exposed_ms: float
    """From there to the end of backward: the reduction that nothing hid, and waiting for slower ranks."""
    readings: int
    """Backwards that were read."""
    reductions: int
    """Backwards that could have been read."""
    cap_bytes: int | None = None
    """DDP's ``bucket_cap_mb``; the first bucket of the default has another."""
    finds_unused: bool | None = None
    static_graph: bool | None = None
    bucket_view: bool | None = None
    syncs_buffers: bool | None = None
    unused_bytes: int = 0
    """The most bytes of parameters without a gradient in one of the readings."""
    same_unused: bool | None = None
    """In all steps the same parameters went unused, or none. DDP looks only with ``find_unused_parameters``."""

    @property
    def backward_ms(self) -> float:
        """Backward with its reduction."""
        return self.compute_end_ms + self.exposed_ms
