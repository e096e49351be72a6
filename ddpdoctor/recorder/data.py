"""Reads samplers, datasets and batches of any library: how samples are divided, and digests of what they are.

Memory is read directly, without torch operations, so no mode, profiler or random state of the script is affected. None
of a dataset's own code runs. What cannot be read has no digest: two different ones would look the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import sys
import types
import weakref
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from . import frames, hooks
from .state import check_every, guarded, here, pass_on
from .wrappers import around

# Bytes that are read of one leaf. Of a larger leaf the first and the last half of this are read.
MAX_LEAF_BYTES = 64 * 1024
MAX_LEAVES = 4
MAX_DEPTH = 4
MAX_ITEMS = 1024
# Our choice: only a few digests from the same place are compared, and 32 bits are equal by chance once in 4e9.
DIGEST_BYTES = 4
SCALARS = frozenset({bool, int, float, str, bytes})


class Leaf(NamedTuple):
    """A part of a batch that holds values: its shape, and a function that reads bytes of it from an offset."""

    shape: Tuple[int, ...]
    item: int  # bytes of one element
    size: int  # bytes of all
    read: Callable[[int, int], bytes]

    def sample(self) -> bytes:
        if self.size <= MAX_LEAF_BYTES:
            return self.read(0, self.size)
        half = MAX_LEAF_BYTES // 2
        return self.read(0, half) + self.read(self.size - half, half)

    def row(self, number: int) -> bytes:
        length = self.size // self.shape[0]
        return self.read(number * length, min(length, MAX_LEAF_BYTES // 4))


def leaves_of(value: Any) -> List[Leaf]:
    found: List[Leaf] = []
    waiting = [(value, MAX_DEPTH)]
    while waiting and len(found) < MAX_LEAVES:
        part, depth = waiting.pop()
        leaf = leaf_of(part)
        if leaf is not None:
            found.append(leaf)
        elif depth > 0:
            waiting += [(item, depth - 1) for item in reversed(_first_items(part)) if item is not None]
    return found


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def is_constant(data: bytes, item: int) -> bool:
    """Return whether all elements are the same. Such data does not identify samples."""
    return data == data[:item] * (len(data) // item) if item else True


def shapes_of(value: Any) -> List[Tuple[Tuple[int, ...], int]]:
    """Return shape and number of elements of the first tensors in arguments, on any device."""
    torch = sys.modules["torch"]
    found: List[Tuple[Tuple[int, ...], int]] = []
    waiting = [value]
    with torch._C.DisableTorchFunction():
        for _ in range(MAX_ITEMS):
            if not waiting:
                break
            item = waiting.pop()
            if isinstance(item, torch.Tensor):
                found.append((tuple(item.shape), item.numel()))
            else:
                waiting.extend(_first_items(item))
    return found


def _first_items(value: Any) -> List[Any]:
    """Return the first items of a container of a type that collating makes; empty for any other type."""
    readers: Any = ((dict, dict.values), (tuple, tuple.__iter__), (list, list.__iter__))
    for kind, items_of in readers:
        if isinstance(value, kind):
            return list(islice(items_of(value), MAX_ITEMS))
    if any(kind.__name__ == "UserDict" for kind in type(value).__mro__):  # transformers.BatchEncoding
        return _first_items(attributes(value).get("data"))
    return []


def attributes(value: Any) -> Dict[str, Any]:
    """Return an object's ``__dict__``, bypassing its class's ``__getattr__`` and properties."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception as error:  # noqa: BLE001 - the object has none
        pass_on(error)
        return {}
    return found if type(found) is dict else {}


def leaf_of(value: Any) -> Optional[Leaf]:
    torch = sys.modules.get("torch")
    kind = type(value)
    if torch is not None and kind is torch.Tensor:
        return _tensor(torch, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is getattr(numpy, "ndarray", None):
        if value.dtype.hasobject or not value.flags.c_contiguous or not value.nbytes:
            return None
        view = memoryview(value.reshape(-1).view("u1"))
        shape, item, size = tuple(value.shape), int(value.itemsize), int(value.nbytes)
        return Leaf(shape, item, size, lambda at, length: bytes(view[at : at + length]))
    if kind in (str, bytes):
        return _scalars([value])
    if kind in (list, tuple) and value and all(type(item) in SCALARS for item in value[:MAX_ITEMS]):
        return _scalars(value)
    return None


def _tensor(torch: Any, tensor: Any) -> Optional[Leaf]:
    with torch._C.DisableTorchFunction():
        in_order = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
        if not in_order or tensor.is_conj() or tensor.is_neg():
            return None
        shape, item, address = tuple(tensor.shape), tensor.element_size(), tensor.data_ptr()
        size = tensor.numel() * item
    if not address or not size:
        return None

    def read(at: int, length: int, owner: Any = tensor) -> bytes:
        """Read from the memory of ``owner``, which this function keeps alive."""
        return ctypes.string_at(address + at, length)

    return Leaf(shape, item, size, read)


def _scalars(values: Any) -> Leaf:
    rows = [digest(repr(value)[:MAX_ITEMS].encode("utf-8", "replace")).encode() for value in values[:MAX_ITEMS]]
    data = b"".join(rows)
    return Leaf((len(values),), 2 * DIGEST_BYTES, len(data), lambda at, length: data[at : at + length])


MAX_NODES = 1000  # values that are read, which takes about a millisecond
MAX_DATASET_BYTES = 64 * 1024
MAX_DATASET_DEPTH = 5
SAMPLED = 64  # items that are read of a list, evenly spread, or first entries of a dict
LEAF_PIECE = 1024  # bytes that are read at each of eight places of a tensor or an array
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes written in Python have it, and most C classes do not
_BY_NAME = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


def digest_of_dataset(dataset: Any) -> str:
    """Return the digest; empty if the dataset cannot be described."""
    description = _Description()
    try:
        description.add(dataset, MAX_DATASET_DEPTH)
    except _OpaqueError:
        return ""
    return description.hash.hexdigest() if description.values else ""


class _OpaqueError(Exception):
    """A value cannot be read."""


class _Description:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self.nodes = self.bytes = 0
        self.values = 0  # number of values found, not counting names of classes

    def add(self, value: Any, depth: int) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES or self.bytes > MAX_DATASET_BYTES:
            return
        kind = type(value)
        if value is None or kind in SCALARS:
            self._take(repr(value)[:1024].encode("utf-8", "replace"))
            self.values += value is not None
        elif isinstance(value, _BY_NAME):
            self._take(str(getattr(value, "__qualname__", kind.__name__)).encode("utf-8", "replace"))
        elif kind in (list, tuple, range):
            self._take(b"%d items" % len(value))
            self._go_deeper(depth)
            count = min(len(value), SAMPLED)
            for i in range(count):
                self.add(value[i * len(value) // count], depth - 1)
        elif kind is dict:
            self._take(b"%d entries" % len(value))
            self._go_deeper(depth)
            for key in list(value)[:SAMPLED]:
                self.add(key, depth - 1)
                self.add(value[key], depth - 1)
        else:
            self._take(("%s.%s" % (kind.__module__, kind.__qualname__)).encode("utf-8", "replace"))
            leaf = leaf_of(value)
            of_torch = kind.__module__.partition(".")[0] == "torch"
            if leaf is not None:
                self._take(repr((leaf.shape, leaf.item)).encode())
                for at in range(0, leaf.size, max(1, leaf.size // 8)):
                    self._take(leaf.read(at, min(LEAF_PIECE, leaf.size - at)))
                self.values += 1
            elif not (of_torch and kind.__name__ in ("dtype", "device", "Generator", "Size")):
                # Objects of a Python class without slots keep everything in ``__dict__``.
                parents = [c for c in kind.__mro__ if c is not object]
                if not all(c.__flags__ & _HEAP_TYPE and not vars(c).get("__slots__") for c in parents):
                    raise _OpaqueError
                self._go_deeper(depth)
                given = attributes(value)
                for name in list(given)[:SAMPLED]:
                    self._take(name.encode("utf-8", "replace"))
                    self.add(given[name], depth - 1)

    def _take(self, data: bytes) -> None:
        self.bytes += len(data)
        self.hash.update(b"%d:%s" % (len(data), data))

    def _go_deeper(self, depth: int) -> None:
        if depth <= 0:
            raise _OpaqueError


MAX_NESTED = 6  # nested samplers that are examined
CALLS = 2  # Calls after which a sampler without a loader is noted. By the second call the first epoch's loop is over.
MAX_NOTED = 8
_counts: Any = weakref.WeakKeyDictionary()  # by sampler: how often its epoch was set
_noted: Dict[int, Any] = {}  # by the number of the note: a weak reference to the sampler
used: Any = weakref.WeakSet()  # samplers that divide samples among ranks and with which a loader has begun a pass
_SHUFFLES = {"RandomSampler": True, "SequentialSampler": False}
_INNER = ("batch_sampler", "sampler", "base_sampler")
_REPLICAS = ("num_replicas", "num_processes", "world_size")
_RANK = ("rank", "process_index")
_SEED = ("seed", "initial_seed")
# Attributes, variables and functions by which classes of all kinds know among how many ranks data is divided.
_COUNTS = frozenset({*_REPLICAS, "num_shards", "world", "num_ranks", "dp_size", "data_parallel_size"})
_NUMBERS = frozenset({*_RANK, "global_rank", "shard_id", "shard_index", "dp_rank", "data_parallel_rank"})
_ASK_COUNT = _COUNTS | {"get_world_size", "WORLD_SIZE"}
_ASK_NUMBER = _NUMBERS | {"get_rank", "RANK"}
# Attributes of a dataset that stands for a sampler, as in Lightning's DistributedSamplerWrapper.
_WRAPPED = ("_sampler", "sampler")
MAX_COUNTED = 100_000  # Indices of a Subset that are added up. Our choice: it takes about 10 ms, once for each loader.
CHECKED = 64  # places at which indices are compared with a range


def describe_loader(loader: Any, number: int) -> Dict[str, Any]:
    given = attributes(loader)
    iterable = bool(given.get("_dataset_kind"))  # _DatasetKind.Iterable is 1, Map is 0
    sizes = (given.get("batch_size"), attributes(given.get("batch_sampler")).get("batch_size"))
    dataset = given.get("dataset")
    entry: Dict[str, Any] = {
        "k": "loader", "n": number, "site": frames.describe_user(sys._getframe()),
        "ds": class_name(dataset), "dp": digest_of_dataset(dataset), "N": None if iterable else length_of(dataset),
        "bs": next((size for size in sizes if type(size) is int), None),
        "dl": _boolean(given, "drop_last"), "it": int(iterable),
        "w": given.get("num_workers") if isinstance(given.get("num_workers"), int) else 0,
        "sampler": None if iterable else _describe_sampler(loader), **_part(dataset),
    }  # fmt: skip
    cuts = _cuts(loader, iterable=iterable)
    if cuts:
        entry["cuts"] = cuts
    if any(what == "dataset" for what, *_ in cuts) and not iterable:
        # The containers that the dataset holds, without its other attributes such as its rank.
        held = attributes(dataset).values()
        entry["held"] = digest_of_dataset([part for part in held if type(part) in (list, range, dict) or leaf_of(part)])
    return entry


def _part(dataset: Any) -> Dict[str, Any]:
    """Return digests of the whole and of the part, for a Subset, or a TensorDataset that is a view of some rows."""
    own, given = sys.modules.get("torch.utils.data.dataset"), attributes(dataset)
    if type(dataset) is getattr(own, "Subset", None):
        whole, indices, chosen = given.get("dataset"), given.get("indices"), None
        of: Any = length_of(whole)
        if type(indices) in (list, range) and indices and of is not None and type(indices[0]) is int:
            # How many indices of how many these are, their sum and exclusive or, and their range if they are one.
            count, start = len(indices), indices[0]
            step = indices[1] - start if count > 1 else 1
            places = {i * (count - 1) // CHECKED for i in range(CHECKED + 1)}
            is_range = step > 0 and all(indices[at] == start + at * step for at in places)
            sums = (sum(indices), functools.reduce(operator.xor, indices)) if count <= MAX_COUNTED else (None, None)
            chosen = [of, count, *sums, *((start, step) if is_range else (None, None))]
        return {"of": digest_of_dataset(whole), "part": digest_of_dataset(indices), "chosen": chosen}
    tensors = given.get("tensors") if type(dataset) is getattr(own, "TensorDataset", None) else None
    torch: Any = sys.modules.get("torch")
    view: Any = tensors[0] if type(tensors) is tuple and tensors else None
    if torch is None or type(view) is not torch.Tensor or not view.dim():
        return {}
    with torch._C.DisableTorchFunction():
        base: Any = view._base
        is_part = base is not None and base.is_contiguous() and base.shape[1:] == view.shape[1:]
        if not is_part or not 0 < len(view) < len(base):
            return {}
        row = base.stride(0)
        start, step = view.storage_offset() // row, view.stride(0) // row
    return {"of": digest_of_dataset(base), "chosen": [len(base), len(view), None, None, start, step]}


def _cuts(loader: Any, *, iterable: bool) -> List[Any]:
    """Return what divides the samples on their way to a loader: kind, class, ranks, own rank (None if code asks)."""
    found: List[Any] = []
    # Accelerate's loader that reads on rank 0 alone and sends parts to the others, if it begins this pass.
    passes = (frame for frame in frames.outward(sys._getframe()) if frame.f_code.co_name == "__iter__")
    begins = (frame for frame in passes if frame.f_code.co_filename.endswith("data_loader.py"))
    dispatcher = next((begin.f_locals.get("self") for begin in begins), None)
    if type(dispatcher).__name__ == "DataLoaderDispatcher":
        state = attributes(attributes(dispatcher).get("state"))
        count, number = (state.get(name) for name in ("num_processes", "process_index"))
        found.append(["loader", class_name(dispatcher), count, number])
    parts: List[Tuple[str, Any]] = [] if iterable else [("sampler", sampler) for sampler in _chain(loader)]
    waiting = [attributes(loader).get("dataset")]
    for _ in range(MAX_NESTED):
        if not waiting or waiting[0] is None:
            break
        parts.append(("dataset", waiting[0]))
        values = attributes(waiting.pop(0)).values()
        inner = [value[0] if type(value) in (list, tuple) and value else value for value in values]
        waiting += [value for value in inner if any(kind.__name__ == "Dataset" for kind in type(value).__mro__)]
    for what, part in parts:
        kind: Any = type(part)
        given = attributes(part)
        given = attributes(given.get("_distributed")) or given  # a stream of Hugging Face's datasets
        known = {name.strip("_"): value for name, value in given.items() if type(value) is int}
        held = ((known[name] for name in sorted(names) if name in known) for names in (_COUNTS, _NUMBERS))
        count, number = (next(values, None) for values in held)
        if count is not None and number is not None:
            found += [[what, class_name(part), count, number]] if count > 1 else []
        elif _asks(kind):
            found.append([what, class_name(part), None, None])
    return found


@functools.lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8 has no functools.cache
def _asks(kind: Any) -> bool:
    """Return whether the methods of a class ask for the rank and the number of ranks."""
    named: Set[str] = set()
    methods = [value for base in kind.__mro__ for value in vars(base).values()]
    waiting: List[Any] = [method.__code__ for method in methods if type(method) is types.FunctionType]
    while waiting:
        code = waiting.pop()
        if frames.is_user_file(code.co_filename):
            named.update(code.co_names, code.co_varnames, code.co_freevars)
            named.update(const for const in code.co_consts if type(const) is str)
            waiting += [const for const in code.co_consts if type(const) is types.CodeType]
    named = {name.strip("_") for name in named}
    return not named.isdisjoint(_ASK_COUNT) and not named.isdisjoint(_ASK_NUMBER)


def _describe_sampler(loader: Any) -> Optional[Dict[str, Any]]:
    """Describe the sampler that divides samples among ranks, else the loader's own one; None without a sampler."""
    chain = list(_chain(loader))
    if not chain:
        return None
    sharing = _sharing(chain)
    batches = getattr(sys.modules.get("torch.utils.data.sampler"), "BatchSampler", None)
    if sharing is None:  # the first one that is not torch's BatchSampler decides the order
        plain = next((sampler for sampler in chain if type(sampler) is not batches), chain[0])
        return {"type": class_name(plain), "shuffle": _SHUFFLES.get(type(plain).__name__)}
    # Whether the loader draws exactly what torch's DistributedSampler gives, batch by batch.
    own: Any = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    held, of_loader = attributes(sharing), attributes(loader)
    is_drawn = of_loader.get("sampler") is sharing
    is_standard = is_drawn and own is not None and getattr(type(sharing), "__iter__", None) is own.__iter__
    by_batches = of_loader.get("batch_sampler")
    return {
        "type": class_name(sharing), "replicas": _int_in(held, _REPLICAS), "rank": _int_in(held, _RANK),
        "seed": _int_in(held, _SEED), "shuffle": _boolean(held, "shuffle"), "drop_last": _boolean(held, "drop_last"),
        "planned": _int_in(held, ("num_samples",)),
        "standard": int(is_standard and (by_batches is None or type(by_batches) is batches)),
    }  # fmt: skip


def epoch_of(loader: Any) -> Optional[int]:
    chain = list(_chain(loader))
    sharing = _sharing(chain)
    if sharing is not None:
        try:
            is_new = sharing not in used
            used.add(sharing)
        except TypeError as error:  # the class supports no hashes or no weak references
            pass_on(error)
            is_new = False
        for number, known in _noted.items() if is_new else ():  # a loader uses it after all
            if known() is sharing and here.ring is not None:
                here.ring.note({"k": "epoch_call", "n": number, "used": 1})
    epochs = (_int_in(attributes(link), ("epoch",)) for link in ([sharing] if sharing is not None else chain))
    return next((epoch for epoch in epochs if epoch is not None), None)


def length_of(dataset: Any) -> Optional[int]:
    try:
        return len(dataset)
    except Exception as error:  # noqa: BLE001 - some have no length, even if they have the method
        pass_on(error)
        return None


def class_name(value: Any) -> str:
    kind = type(value)
    return ("%s.%s" % (kind.__module__, kind.__qualname__))[:200]


def _chain(loader: Any) -> Iterator[Any]:
    seen = [attributes(loader).get("batch_sampler"), attributes(loader).get("sampler")]
    found = 0
    known = set()
    while seen and found < MAX_NESTED:
        sampler = seen.pop(0)
        if sampler is None or id(sampler) in known or type(sampler).__name__ == "_InfiniteConstantSampler":
            continue
        known.add(id(sampler))
        found += 1
        yield sampler
        given = attributes(sampler)
        stands_for = attributes(given.get("dataset"))
        seen[:0] = [*(given.get(name) for name in _INNER), *(stands_for.get(name) for name in _WRAPPED)]


def _sharing(chain: Any) -> Any:
    pairs = ((link, attributes(link)) for link in chain)
    knows = (o for o, given in pairs if _int_in(given, _REPLICAS) is not None and _int_in(given, _RANK) is not None)
    return next(knows, None)


def _int_in(given: Dict[str, Any], names: Any) -> Optional[int]:
    return next((given[name] for name in names if type(given.get(name)) is int), None)


def _boolean(given: Dict[str, Any], name: str) -> Optional[bool]:
    return given[name] if type(given.get(name)) is bool else None


def patch(module: Any) -> None:
    @guarded("epoch calls")
    def called(sampler: Any) -> None:
        hashable = getattr(type(sampler), "__hash__", None) is not None
        if not here.is_rank or here.ring is None or not hashable or sampler in used:
            return
        count = _counts[sampler] = _counts.get(sampler, 0) + 1
        if count == CALLS and len(_noted) < MAX_NOTED:
            number = len(_noted) + 1
            _noted[number] = weakref.ref(sampler)
            samples = length_of(attributes(sampler).get("dataset"))
            here.note("epoch_call", n=number, N=samples, site=frames.describe_user(sys._getframe()))

    if check_every():
        hooks.put(module.DistributedSampler, "set_epoch", around(after=called))
