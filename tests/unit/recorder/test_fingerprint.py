import itertools
import random
import struct
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpdoctor.recorder import fingerprint
from ddpdoctor.recorder.fingerprint import fingerprints
from ddpdoctor.recorder.storage.fingerprint_file import ABSENT, FINGERPRINT_SIZE, UNKNOWN

NAMES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "bool", "complex128", "complex64", "complex32",
)  # fmt: skip
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
SOME = {"torch.complex128", "torch.float64", "torch.float32", "torch.bfloat16", "torch.float8_e5m2", "torch.bool"}
OF_EACH_SIZE = [dtype for dtype in DTYPES if str(dtype) in SOME]
SIZES = (0, 1, 2, 3, 7, 508, 509, 510, 2035, 2036, 2037, 5090, 5097)
"""In words: around what is read in rows, and what is not."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(dtype, count, seed=0):
    """Bits of all kinds, NaNs among them; a bool's are its lowest only."""
    raw = torch.frombuffer(bytearray(random.Random(seed).randbytes(count * dtype.itemsize + 1)), dtype=torch.uint8)[:-1]
    return (raw & 1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def each(tensors):
    tensors = list(tensors)
    found = fingerprints(tensors)
    assert len(found) == FINGERPRINT_SIZE * len(tensors)
    return [found[at : at + FINGERPRINT_SIZE] for at in range(0, len(found), FINGERPRINT_SIZE)]


def with_bit(tensor, bit):
    """A copy of which one bit of the memory is another."""
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return changed


def mixed(words, positions):
    """What the checksum is defined to be, in integers of Python."""
    mask, first, second = 2**64 - 1, 0, 0
    for word, position in zip(words, positions, strict=True):
        place = position * fingerprint.STEP & mask
        out = (word & mask) ^ place
        for shift, factor in ((32, fingerprint.FACTOR), (29, 1)):
            signed = out - (out >> 63 << 64)
            out = (out ^ signed >> shift) * factor & mask
        first, second = first + out, second + out * place
    return first & mask, second & mask


def by_definition(data):
    padded = data + bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(padded) // 8}q", padded)
    rows = [words[at : at + 509] for at in range(0, len(words) - 508, 509)] if len(words) > 4 * 509 else []
    rows = rows[: len(rows) - (len(rows) % 125 > 0 and len(rows) % 125 % 2 == 0)]
    derived, positions = [], []
    for block in range(0, len(rows), 125):
        derived += [sum(column) for column in zip(*rows[block : block + 125], strict=True)]
        positions += range(1 + block // 125 * 509, 1 + block // 125 * 509 + 509)
    derived += [sum(row) for row in rows]
    positions += range(2**40, 2**40 + len(rows))
    left = words[len(rows) * 509 :]
    derived += left
    at = 2**41 if rows else 1
    first, second = mixed(derived, [*positions, *range(at, at + len(left))])
    length = (len(data) + 1) * fingerprint.LENGTH
    return struct.pack("<QQ", (first + length) & 2**64 - 1, (second + length) & 2**64 - 1)


WORDS = (*SIZES, 6 * 509 + 7, 125 * 509 - 1, 125 * 509, 127 * 509 + 3, 253 * 509)
BYTES = (1, 3, 4072, 16287, 16289, 20001)
"""Lengths whose tail fills no word: it is padded with zeros."""


@pytest.mark.parametrize("count", [*(8 * words for words in WORDS), *BYTES])
def test_is_what_it_is_defined_to_be_at_every_size(count):
    data = noise(torch.uint8, count)
    assert fingerprints([data]) == by_definition(data.numpy().tobytes())


def test_none_is_absent_and_no_tensor_is():
    empty = [
        torch.empty(0), torch.empty(3, 0, 2), torch.zeros(1), torch.zeros(5000), torch.tensor(0, dtype=torch.uint8),
    ]  # fmt: skip
    found = each([None, *empty])
    assert found[0] == ABSENT
    assert not {ABSENT, UNKNOWN} & set(found[1:])
    assert fingerprints([]) == b""


def test_a_fingerprint_does_not_depend_on_what_is_asked_beside_it():
    tensors = [noise(dtype, 1 + 37 * i, i) for i, dtype in enumerate(DTYPES * 4)]
    tensors += [noise(torch.float32, 70_000 + i, i) for i in range(8)]
    alone = [fingerprints([tensor]) for tensor in tensors]
    assert each(tensors) == alone
    assert each(tensors[::-1]) == alone[::-1]


def test_threads_change_nothing():
    tensors = [noise(torch.float32, 600_001), noise(torch.bfloat16, 40_000), noise(torch.float64, 100)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = fingerprints(tensors)
        torch.set_num_threads(3)
        assert fingerprints(tensors) == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "is_large"), [*((one, False) for one in DTYPES), *((one, True) for one in OF_EACH_SIZE)], ids=str
)
def test_every_bit_counts(dtype, is_large):
    tensor = noise(dtype, (5 * 509 * 8 + 24) // dtype.itemsize + 1 if is_large else 37)
    size = tensor.numel() * dtype.itemsize * 8
    edges = (range(64), range(size - 64, size), range(509 * 64 - 64, 509 * 64 + 64))
    bits = {*random.Random(1).sample(range(size), 400), *itertools.chain(*edges)} if is_large else {*range(size)}
    bits = {bit // 8 * 8 for bit in bits} if dtype is torch.bool else bits
    found = each([tensor, *(with_bit(tensor, bit) for bit in sorted(bits))])
    assert len(set(found)) == len(bits) + 1


INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def altered(tensor):
    """Yield it with next numbers, with even numbers of other signs (rows, columns, runs), and in other places."""
    rows, columns, flat = *tensor.shape, tensor.numel()
    for at in (0, 1, flat // 2, flat - 1):
        other = tensor.clone()
        other.view(INTEGERS[tensor.itemsize]).view(-1)[at] += 1
        yield other
    few = [torch.randperm(flat)[: min(count, flat // 2 * 2)] for count in (2, 2, 4, 6, 10, 100, flat) for _ in range(2)]
    runs = ((0, 509), (0, 1018), (5, 1018), (0, 509 * 125), (0, 509 * 250), (509, 509 * 252))
    places = [*few, slice(None), slice(None, None, 2)]
    for part in [*places, *(slice(start, start + count) for start, count in runs if start + count <= flat)]:
        other = tensor.clone()
        other.view(-1)[part] *= -1
        yield other
    pairs = [[a, b] for a, b in itertools.combinations((0, 1, 508, 509, 510, 1023), 2) if b < columns]
    by_row = [slice(0, 2), slice(0, 4), slice(1, None, 2), slice(1, None, 4)]
    blocks = [(slice(2), []), ([], slice(2)), (slice(rows), []), (slice(4), slice(columns))]
    for row, column in [*((one, []) for one in by_row), *(([], pair) for pair in pairs), *blocks]:
        other = tensor.clone()
        other[row] *= -1
        other[:, column] *= -1
        yield other
    yield from (tensor.roll(1, 0), tensor.flip(0), tensor.flip(1), tensor.roll(1, 1))
    for _ in range(10):
        for one in (tensor.clone(), tensor.clone().view(-1)):
            a, b = torch.randperm(len(one))[:2].tolist()
            one[[a, b]] = one[[b, a]]
            yield one


SHAPES = [
    (6, 1), (5, 3), (64, 64), (300, 509), (509, 300), (300, 1018), (40, 1024), (2, 50_000), (130, 4 * 509), (1000, 1),
    (6, 509), (64, 509), (125, 509), (250, 509), (256, 1024),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_other_numbers_signs_and_places_are_seen(dtype):
    torch.manual_seed(3)
    for shape in SHAPES if dtype is torch.float32 else SHAPES[1:3] + SHAPES[-4:-2]:
        tensor = torch.randint(-128, 128, shape, dtype=dtype) if dtype is torch.int8 else torch.randn(shape).to(dtype)
        own, data = fingerprints([tensor]), tensor.view(-1).view(torch.uint8)
        for number, other in enumerate(altered(tensor)):
            is_equal = torch.equal(other.contiguous().view(-1).view(torch.uint8), data)
            assert (fingerprints([other]) == own) is is_equal, (shape, number)


def layouts(tensor):
    """The same values in each order of memory, behind and before others, and with gaps between them."""
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    size = raw.numel()
    buckets = [torch.zeros(size + 12, dtype=raw.dtype)[at : at + size].view(raw.shape) for at in range(1, 9)]
    found = [one.copy_(raw) for one in (*buckets, torch.zeros((*raw.shape, 2), dtype=raw.dtype)[..., 0])]
    for order in itertools.permutations(range(raw.dim())):
        back = [order.index(i) for i in range(raw.dim())]
        found.append(raw.permute(order).contiguous().permute(back))
    return [one if one.dtype is tensor.dtype else one.view(tensor.dtype) for one in found]


LAYOUTS = [(), (0,), (1,), (5, 0), (3, 1), (2, 3, 5), (8, 1, 5, 3), (2, 5, 8, 3), (31, 23, 9), (5, 70, 11, 8)]


@pytest.mark.parametrize("dtype", OF_EACH_SIZE, ids=str)
def test_a_tensor_is_equal_in_every_layout(dtype):
    for shape in LAYOUTS:
        tensor = noise(dtype, torch.Size(shape).numel()).view(shape)
        others = [*layouts(tensor), *([torch.nn.Parameter(tensor)] if tensor.is_floating_point() else [])]
        assert {*each(others)} == {fingerprints([tensor])}, shape


@pytest.mark.parametrize("count", [50, 40_000])
def test_other_layouts_lazy_conjugates_and_memory_between_words_are_equal(count):
    image, video, row = torch.randn(16, 33, 9, 7), torch.randn(3, 33, 4, 9, 7), torch.randn(7000)
    odd = torch.frombuffer(bytearray(random.Random(1).randbytes(8 * count + 4)), dtype=torch.float32, offset=4)
    pairs = [
        (image.to(memory_format=torch.channels_last), image), (video.to(memory_format=torch.channels_last_3d), video),
        (row.expand(9, 7000), row.repeat(9, 1)), (row[:9, None].expand(9, 7000), row[:9, None].repeat(1, 7000)),
        (odd, odd.clone()),
    ]  # fmt: skip
    for dtype in (torch.complex64, torch.complex128):
        lazy = torch.randn(count, dtype=dtype).conj()
        assert lazy.is_conj()
        pairs += [(lazy, lazy.resolve_conj().clone()), (lazy.imag, lazy.imag.resolve_neg().clone())]
    for one, other in pairs:
        assert fingerprints([one]) == fingerprints([other])


class Plain(torch.Tensor):
    """A class of tensors that only adds a method, and counts what is done to it."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Plain.seen += 1
        return super().__torch_function__(func, types, args, kwargs)


class Hidden(torch.Tensor):
    """A class of tensors that keeps its data to itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Pair(Hidden):
    """A class of tensors that says which tensors it wraps."""

    @staticmethod
    def __new__(cls, low, high):
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)

    def __init__(self, low, high):
        self.low, self.high = low, high

    def __tensor_flatten__(self):
        return ["low", "high"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Pair(inner["low"], inner["high"])


class Broken(torch.Tensor):
    """A class of tensors of which nothing works."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    def __tensor_flatten__(self):
        raise RuntimeError("not now")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not now")


def test_what_cannot_be_fingerprinted_says_so_and_costs_the_others_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = torch.randn(3000)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(3))
    repeated = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,))
    untold = [
        torch.empty(3, device="meta"),
        fake,
        torch.nn.UninitializedParameter(),
        torch.nn.UninitializedBuffer(),
        torch.quantize_per_tensor(torch.randn(5), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        repeated,
        torch.randn(8, 8).to_mkldnn(),
        Hidden(torch.randn(3)),
        Broken(),
    ]
    found = each([plain, *untold, None, plain])
    assert found[0] == found[-1] == fingerprints([plain]) != UNKNOWN
    assert found[1:-2] == [UNKNOWN] * len(untold)
    assert found[-2] == ABSENT


def test_a_shard_is_not_fingerprinted(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert fingerprints([distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)))]) == UNKNOWN
    finally:
        dist.destroy_process_group()


def test_sparse_tensors_and_classes_of_tensors_are_looked_into():
    dense = torch.randn(40, 40).relu()
    for of in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc):
        assert (
            UNKNOWN != fingerprints([of(dense)]) == fingerprints([of(dense.clone())]) != fingerprints([of(dense * 2)])
        )
    low, high = torch.randn(3), torch.randn(3)
    assert (
        UNKNOWN
        != fingerprints([Pair(low, high)])
        == fingerprints([Pair(low.clone(), high)])
        != fingerprints([Pair(high, low)])
    )
    assert fingerprints([low.as_subclass(Plain)]) == fingerprints([low])


class Calls(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_no_mode_of_the_caller_sees_it_or_changes_it():
    tensors = [torch.randn(300, 300, requires_grad=True), torch.randn(5), torch.randn(500, 90).t(), torch.arange(3)]
    expected = fingerprints(tensors)
    with torch.device("meta"):
        assert fingerprints(tensors) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        assert fingerprints(tensors) == expected
    with torch.inference_mode():
        assert fingerprints(tensors) == expected
        assert fingerprints([tensors[0].clone()]) == expected[:FINGERPRINT_SIZE]
        kept = tensors[2].clone()
    assert fingerprints([kept]) == expected[2 * FINGERPRINT_SIZE : 3 * FINGERPRINT_SIZE]
    with Calls() as calls:
        assert fingerprints(tensors) == expected
    before = Plain.seen
    assert fingerprints([tensors[1].as_subclass(Plain)]) == expected[FINGERPRINT_SIZE : 2 * FINGERPRINT_SIZE]
    assert (calls.seen, Plain.seen) == (0, before)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_default_dtype(torch.float64)
    try:
        assert fingerprints(tensors) == expected
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.set_default_dtype(torch.float32)


def test_nothing_of_the_caller_changes():
    weight = torch.randn(300, 300, requires_grad=True)
    product = weight * 2
    tensors = [weight, product, weight.t(), product[3:].detach(), torch.randn(7)]
    versions = [tensor._version for tensor in tensors]
    values = [tensor.detach().clone() for tensor in tensors]
    state = torch.get_rng_state()
    fingerprints(tensors)
    assert versions == [tensor._version for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2))


@pytest.mark.full
def test_in_a_compiled_function_it_is_right_or_unknown_and_never_something_else():
    @torch.compile(backend="eager", fullgraph=False)
    def step(tensor):
        return tensor * 2, fingerprints([tensor])

    tensor = torch.randn(3)
    assert step(tensor)[1] in {UNKNOWN, fingerprints([tensor])}
    assert torch.is_grad_enabled()


SPACE = """
import json
import sys
import torch
from torch.profiler import ProfilerActivity, profile
from ddpdoctor.recorder.fingerprint import fingerprints

large = [torch.randn(10_000_000)]
turned = [torch.randn(4000, 2500).t()]
many = [torch.randn(250, 250) for _ in range(160)]
for tensors in (large, turned, many):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        fingerprints(tensors)
    seen.export_chrome_trace(sys.argv[1])
    with open(sys.argv[1]) as trace:
        taken = [event["args"] for event in json.load(trace)["traceEvents"] if event.get("name") == "[memory]"]
    before = taken[0]["Total Allocated"] - taken[0]["Bytes"]
    print(max(event["Total Allocated"] for event in taken) - before)
"""


@pytest.mark.full
def test_it_takes_less_than_a_mebibyte(tmp_path):
    """By torch's own count: what /proc says of a process counts code as well, and in steps of many pages."""
    command = [sys.executable, "-c", SPACE, str(tmp_path / "trace.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 3
    assert all(0 < peak < 2**20 for peak in peaks), peaks
