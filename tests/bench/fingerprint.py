"""The checksum against a copy: python -m tests.bench.fingerprint, two minutes.

Prints the speed of ``fingerprints`` over that of copies of the same tensors, on one thread and on two. The copies are
kept, as a check against an older state would keep them; dropped at once, so that each goes to the same place in the
cache; or made in memory that is in use, which spares the page faults of the largest.
"""

import time
from collections.abc import Callable, Sequence

import torch

from ddpdoctor.recorder.fingerprint import fingerprints
from tests.bench.pairs import measure, spread

PAIRS = 31
WARM_S = 0.2
"""A timing repeats its work for about as long: shorter ones are at the mercy of the scheduler."""


def sets() -> dict[str, list[torch.Tensor]]:
    """Return the tensors to be read, by name."""
    return {
        "10 M parameters in 160 tensors": [torch.randn(250, 249 + i % 3) for i in range(160)],
        "one tensor of 100 MB": [torch.randn(25_000_000)],
        "2000 tensors of 800 bytes": [torch.randn(200) for _ in range(2000)],
        "10 M parameters in 160 tensors, bfloat16": [torch.randn(250, 250).bfloat16() for _ in range(160)],
        "160 tensors in a bucket, each off by four bytes": list(torch.randn(62_500 * 160 + 1)[1:].split(62_500)),
        "40 weights of convolutions in channels_last": [
            torch.randn(256, 108, 3, 3).to(memory_format=torch.channels_last) for _ in range(40)
        ],
    }


def kept(tensors: Sequence[torch.Tensor]) -> None:
    """Copy all, then drop the copies."""
    _ = [tensor.clone() for tensor in tensors]


def dropped(tensors: Sequence[torch.Tensor]) -> None:
    """Copy one after the other."""
    for tensor in tensors:
        tensor.clone()


def into(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy into memory that is there."""
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)


def seconds(work: Callable[[], object], times: int) -> float:
    """Time one run."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def main() -> None:
    """Print the ratios."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, tensors in sets().items():
            copies = [tensor.clone() for tensor in tensors]
            times = max(1, round(WARM_S / 4 / seconds(lambda tensors=tensors: fingerprints(tensors), 3)))
            for how, copy in (
                ("clone, kept", lambda tensors=tensors: kept(tensors)),
                ("clone, dropped", lambda tensors=tensors: dropped(tensors)),
                ("copy into memory in use", lambda copies=copies, tensors=tensors: into(copies, tensors)),
            ):
                pairs = [
                    *measure(
                        lambda tensors=tensors, times=times: seconds(lambda: fingerprints(tensors), times),
                        lambda copy=copy, times=times: seconds(copy, times),
                        PAIRS,
                    )
                ]
                found = spread([theirs / ours for ours, theirs in pairs])
                gb_s = sum(t.numel() * t.element_size() for t in tensors) / 1e9 / spread([a for a, _ in pairs]).median
                print(
                    f"{threads} thread(s), {name}: {found.median:.2f} of the speed of {how}"
                    f" ({found.low:.2f} to {found.high:.2f}), {gb_s:.1f} GB/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
