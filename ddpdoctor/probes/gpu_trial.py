"""Gives GPUs work with a known result and compares: ``python -m ddpdoctor.probes.gpu_trial work cuda:0``.

Each result is a line of JSON as soon as it is known, so a device that hangs loses only its own.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch

from ddpdoctor.model.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Copy = Callable[[torch.Tensor, torch.Tensor], float | None]

FREE_SHARE = 0.1
# How much of the free memory is filled. Our choice: enough to use every memory channel, and safe on a shared GPU.
MAX_BYTES = 2 * 2**30
CHUNK_BYTES = 64 * 2**20
# Terms of each sum in the product. The results are 2 * INNER / 3 = 256 and -INNER / 3 = -128. All partial sums are
# whole numbers and no larger, so they are exact in float32, TF32 and bfloat16 in any order of addition.
INNER = 384
ROUNDS = 20
COPY_BYTES = 64 * 2**20
PRIME = 1_000_003


def main(arguments: list[str]) -> None:
    """Count devices (``count``), try one (``work DEVICE``), or every ordered pair (``copies``)."""
    if arguments == ["count"]:
        _print_result({"count": torch.cuda.device_count()})
    elif arguments[:1] == ["work"] and len(arguments) == 2:
        device = torch.device(arguments[1])
        started = time.monotonic()
        error = try_work(device)
        _print_result({"ok": error is None, "error": error, "seconds": time.monotonic() - started})
    elif arguments == ["copies"]:
        for result in try_copies([torch.device("cuda", index) for index in range(torch.cuda.device_count())]):
            _print_result(result)
    else:
        sys.exit("usage: gpu_trial count | work DEVICE | copies")


def _print_result(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)  # noqa: T201 - what the parent reads


def try_work(device: torch.device, size: int | None = None, memory_bytes: int | None = None) -> str | None:
    """Fill memory and read it back, then multiply matrices of ``size`` rows. Return what went wrong, or None."""
    is_gpu, words = device.type == "cuda", CHUNK_BYTES // 4
    try:
        if memory_bytes is None:
            free_bytes = torch.cuda.mem_get_info(device)[0] if is_gpu else 0
            memory_bytes = min(MAX_BYTES, int(free_bytes * FREE_SHARE)) if is_gpu else CHUNK_BYTES
        # Fill all chunks before comparing the first, to catch writes that land at another address
        chunks = [_pattern(words, seed, device) for seed in range(max(1, memory_bytes // CHUNK_BYTES))]
        for seed, chunk in enumerate(chunks):
            differing = int(torch.count_nonzero(chunk != _pattern(words, seed, device)))
            if differing:
                return f"{differing} of {words} words read back from memory differ from what was written"
        del chunks, chunk
        size = size if size is not None else (8192 if is_gpu else 256)
        for dtype in (torch.float32, torch.bfloat16):
            left, right, expected = make_product(size, dtype, device)
            for _ in range(ROUNDS):
                wrong = compare_product(left @ right, expected)
                if wrong:
                    return f"a matrix product in {str(dtype).removeprefix('torch.')} {wrong}"
    except RuntimeError as error:  # torch raises this for every CUDA error
        return first_line(error)
    return None


def _pattern(words: int, seed: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(words, dtype=torch.int64, device=device)
    return ((places + seed) * PRIME % 2**31).to(torch.int32)


def make_product(
    size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices of -1, 0 and 1, and their product by a formula: 256 if 3 divides i - j, else -128."""
    rows = torch.arange(size, device=device)
    inner = torch.arange(INNER, device=device)
    left = ((rows[:, None] + inner[None, :]) % 3 - 1).to(dtype)
    right = ((inner[:, None] + rows[None, :]) % 3 - 1).to(dtype)
    same = (rows[:, None] - rows[None, :]) % 3 == 0
    return left, right, torch.where(same, 2 * INNER // 3, -INNER // 3).to(dtype)


def compare_product(product: torch.Tensor, expected: torch.Tensor) -> str | None:
    if torch.equal(product, expected):
        return None
    if bool(torch.isnan(product).any()):
        return f"holds NaN in {int(torch.isnan(product).sum())} of {product.numel()} places"
    return f"is wrong in {int(torch.count_nonzero(product != expected))} of {product.numel()} places"


def try_copies(devices: list[torch.device], copy_bytes: int = COPY_BYTES) -> Iterator[dict[str, Any]]:
    """Copy a pattern from every device to every other, one pair at a time, and compare all of it on the host."""
    for (source_index, source), (target_index, target) in permutations(enumerate(devices), 2):
        result: dict[str, Any] = {"source": source_index, "target": target_index, "error": None, "gb_s": None}
        try:
            result["error"], result["gb_s"] = try_copy(source, target, source_index * 97 + target_index, copy_bytes)
        except RuntimeError as error:  # torch raises this for every CUDA error
            result["error"] = first_line(error)
        yield {**result, "ok": result["error"] is None}


def try_copy(
    source: torch.device, target: torch.device, seed: int, copy_bytes: int = COPY_BYTES, copy: Copy | None = None
) -> tuple[str | None, float | None]:
    host = torch.device("cpu")
    words = copy_bytes // 4
    sent = _pattern(words, seed, host).to(source)
    landed = torch.full((words,), -1, dtype=torch.int32, device=target)
    seconds = (copy or timed_copy)(sent, landed)
    differing = int(torch.count_nonzero(landed.to(host) != _pattern(words, seed, host)))
    wrong = f"{differing} of {words} words arrived wrong" if differing else None
    return wrong, copy_bytes / seconds / 1e9 if seconds else None


def timed_copy(sent: torch.Tensor, landed: torch.Tensor) -> float | None:
    """Return the seconds of a second copy, because the first one sets up the path. None on the CPU."""
    landed.copy_(sent)
    if sent.device.type != "cuda":
        return None
    with torch.cuda.device(sent.device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(landed.device)
        before.record()
        landed.copy_(sent)
        after.record()
        after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
