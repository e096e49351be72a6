"""Fingerprints of tensors of every kind, made on the CPU and on the device; and what the capture of a graph leaves of one."""

import torch
from place import DEVICE, DRY, leave, settle

from ddpdoctor.recorder.fingerprint import fingerprints
from ddpdoctor.recorder.storage.fingerprint_file import FINGERPRINT_SIZE
from ddpdoctor.recorder.storage.fingerprint_file import UNKNOWN

FP8 = [name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz") if hasattr(torch, name)]


def tensors():
    torch.manual_seed(0)
    return {
        "many": torch.randn(250, 250),
        "small": torch.randn(200),
        "large bfloat16": torch.randn(5_000_000).bfloat16(),
        "permuted": torch.randn(7, 3000, 11).permute(2, 0, 1),
        "whole numbers": torch.randint(0, 9, (129 * 509,)),
        "half, off its alignment": torch.randn(100_001).half()[1:],
        "channels last": torch.randn(64, 130, 9, 9).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0),
        "bool": torch.randn(40, 40) > 0,
        "complex64": torch.randn(70_000, dtype=torch.complex64),
        "complex128": torch.randn(300, 31, dtype=torch.complex128).t(),
        **{name: torch.randn(100_003).to(getattr(torch, name)) for name in FP8},
    }


def split(found):
    return [found[at : at + FINGERPRINT_SIZE] for at in range(0, len(found), FINGERPRINT_SIZE)]


def captured():
    """Return whether a graph that was captured around a check still runs, and what the check found."""
    if DRY:
        return {"unknown": True, "right": True}
    tensor = torch.randn(9, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = tensor * 2
        reported = fingerprints([tensor])
    graph.replay()
    settle()
    return {"unknown": reported == UNKNOWN, "right": bool((double == tensor * 2).all())}


def main():
    here = tensors()
    cpu, device = (
        split(fingerprints(list(here.values()))),
        split(fingerprints([tensor.to(DEVICE) for tensor in here.values()])),
    )
    leave({
        "differ": [name for name, one, other in zip(here, cpu, device) if one != other],
        "unknown": [name for name, one in zip(here, cpu) if one == UNKNOWN],
        "count": len(here), "fp8": FP8, "captured": captured(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
