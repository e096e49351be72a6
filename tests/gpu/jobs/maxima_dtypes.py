"""The greatest magnitudes of tensors of each dtype, as the recorder has them sent to the host, in one batch."""

import time

import torch
from place import DEVICE, leave

from ddpdoctor.recorder.gradients.finite_checks import Maxima, is_plain, samples_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
CONTENTS = {"finite": [-3.0, 2.0], "nan": [1.0, float("nan")], "inf": [1.0, float("-inf")], "empty": [], "huge": None}
LIMIT_S = 30


def tensor_of(dtype, contents):
    if contents is None:
        largest = torch.finfo(dtype).max
        return torch.full((70_000,), largest, dtype=dtype, device=DEVICE)
    return torch.tensor(contents, dtype=dtype, device=DEVICE)


def main():
    kinds = [(dtype, name) for dtype in DTYPES for name in CONTENTS]
    tensors = [tensor_of(dtype, CONTENTS[name]) for dtype, name in kinds]
    assert all(map(is_plain, tensors))
    maxima = Maxima(samples_of(tensors))
    limit = time.monotonic() + LIMIT_S
    while not maxima.have_come() and time.monotonic() < limit:
        time.sleep(0.01)
    values = [str(value) for value in maxima.values()]
    leave({"%s %s" % (str(dtype)[6:], name): value for (dtype, name), value in zip(kinds, values)})


if __name__ == "__main__":
    main()
