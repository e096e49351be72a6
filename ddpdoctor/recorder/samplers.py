"""Reads from the attributes of a loader and its sampler, whatever library it is from, how it divides the samples.

Also notes a sampler whose ``set_epoch`` is called every epoch but that no loader uses.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from typing import Any, Dict, Iterator, List, Optional, Set

from . import frames, hooks
from .digests import attributes, digest_of_dataset, leaf_of
from .state import check_every, guarded, here, pass_on
from .wrappers import around

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
_COUNTS = frozenset(
    ("num_replicas", "num_processes", "world_size", "num_shards", "world", "num_ranks", "dp_size", "data_parallel_size")
)
_NUMBERS = frozenset(
    ("rank", "process_index", "global_rank", "shard_id", "shard_index", "dp_rank", "data_parallel_rank")
)
_ASK_COUNT = _COUNTS | {"get_world_size", "WORLD_SIZE"}
_ASK_NUMBER = _NUMBERS | {"get_rank", "RANK"}
# Attributes of a dataset that stands for a sampler, as in Lightning's DistributedSamplerWrapper.
_WRAPPED = ("_sampler", "sampler")
MAX_COUNTED = 100_000  # Indices of a Subset that are added up. Our choice: it takes about 10 ms, once for each loader.
CHECKED = 64  # places at which indices are compared with a range
_asking: Dict[type, bool] = {}  # by class: whether its methods ask for the rank and the number of ranks


def describe_loader(loader: Any, number: int) -> Dict[str, Any]:
    """Return the journal entry of loader ``number`` of this process."""
    given = attributes(loader)
    iterable = bool(given.get("_dataset_kind"))  # _DatasetKind.Iterable is 1, Map is 0
    sizes = (given.get("batch_size"), attributes(given.get("batch_sampler")).get("batch_size"))
    entry: Dict[str, Any] = {
        "k": "loader",
        "n": number,
        "site": frames.describe_user(sys._getframe()),
        "ds": class_name(given.get("dataset")),
        "dp": digest_of_dataset(given.get("dataset")),
        "N": None if iterable else length_of(given.get("dataset")),
        "bs": next((size for size in sizes if type(size) is int), None),
        "dl": _boolean(given, "drop_last"),
        "it": int(iterable),
        "w": given.get("num_workers") if isinstance(given.get("num_workers"), int) else 0,
        "sampler": None if iterable else _describe_sampler(loader),
        **_part(given.get("dataset")),
    }
    cuts = _cuts(loader, iterable=iterable)
    if cuts:
        entry["cuts"] = cuts
    if any(what == "dataset" for what, *_ in cuts) and not iterable:
        entry["held"] = _held(loader)
    return entry


def _part(dataset: Any) -> Dict[str, Any]:
    """Return, for a torch Subset, the digests of the whole dataset and of the chosen indices.

    A TensorDataset of views is a part too, if the views leave out rows of a larger tensor.
    """
    if type(dataset) is getattr(sys.modules.get("torch.utils.data.dataset"), "TensorDataset", None):
        return _view(attributes(dataset).get("tensors"))
    if type(dataset) is not getattr(sys.modules.get("torch.utils.data.dataset"), "Subset", None):
        return {}
    given = attributes(dataset)
    return {
        "of": digest_of_dataset(given.get("dataset")),
        "part": digest_of_dataset(given.get("indices")),
        "chosen": _chosen(given.get("indices"), length_of(given.get("dataset"))),
    }


def _view(tensors: Any) -> Dict[str, Any]:
    """Return which rows of a larger tensor the first of these is, if it is a view with fewer of them."""
    torch = sys.modules["torch"]
    view: Any = tensors[0] if type(tensors) is tuple and tensors else None
    if type(view) is not torch.Tensor or not view.dim():
        return {}
    with torch._C.DisableTorchFunction():
        base: Any = view._base
        is_part = base is not None and base.is_contiguous() and base.shape[1:] == view.shape[1:]
        if not is_part or not 0 < len(view) < len(base):
            return {}
        row = base.stride(0)
        start, step = view.storage_offset() // row, view.stride(0) // row
    return {"of": digest_of_dataset(base), "chosen": [len(base), len(view), None, None, start, step]}


def _chosen(indices: Any, of: Optional[int]) -> Optional[List[Optional[int]]]:
    """Return how many indices of how many these are, their sum and exclusive or, and their range if they are one."""
    if type(indices) not in (list, range) or not indices or of is None or type(indices[0]) is not int:
        return None
    count, start = len(indices), indices[0]
    step = indices[1] - start if count > 1 else 1
    places = {i * (count - 1) // CHECKED for i in range(CHECKED + 1)}
    total = xor = None
    if count <= MAX_COUNTED:
        total, xor = sum(indices), functools.reduce(operator.xor, indices)
    is_range = all(indices[at] == start + at * step for at in places)
    return [of, count, total, xor, *((start, step) if is_range and step > 0 else (None, None))]


def _cuts(loader: Any, *, iterable: bool) -> List[Any]:
    """Return what divides the samples among ranks on their way to a loader, the outermost first.

    Each is written as what it is, its class, the number of ranks and its own rank; these are None if its code asks for
    them and its attributes do not have them.
    """
    found: List[Any] = []
    # Accelerate's loader that reads on rank 0 alone and sends parts to the others, if it begins this pass.
    passes = (one for one in frames.outward(sys._getframe()) if one.f_code.co_name == "__iter__")
    begins = (one for one in passes if one.f_code.co_filename.endswith("data_loader.py"))
    dispatcher = next((one.f_locals.get("self") for one in begins), None)
    if type(dispatcher).__name__ == "DataLoaderDispatcher":
        state = attributes(attributes(dispatcher).get("state"))
        count, number = (state.get(name) for name in ("num_processes", "process_index"))
        found.append(["loader", class_name(dispatcher), count, number])
    for what, parts in (("sampler", () if iterable else _chain(loader)), ("dataset", _datasets(loader))):
        for one in parts:
            given = attributes(one)
            given = attributes(given.get("_distributed")) or given  # a stream of Hugging Face's datasets
            known = {name.strip("_"): value for name, value in given.items() if type(value) is int}
            held = ((known[name] for name in sorted(names) if name in known) for names in (_COUNTS, _NUMBERS))
            count, number = (next(values, None) for values in held)
            if count is not None and number is not None:
                found += [[what, class_name(one), count, number]] if count > 1 else []
            elif _asks(type(one)):
                found.append([what, class_name(one), None, None])
    return found


def _held(loader: Any) -> str:
    """Return a digest of the containers that a dataset holds, without its other attributes such as its rank."""
    given = attributes(attributes(loader).get("dataset"))
    return digest_of_dataset(
        [value for value in given.values() if type(value) in (list, range, dict) or leaf_of(value)]
    )


def _datasets(loader: Any) -> Iterator[Any]:
    """Yield the dataset of a loader and those inside it, the outer ones first."""
    waiting = [attributes(loader).get("dataset")]
    for _ in range(MAX_NESTED):
        if not waiting or waiting[0] is None:
            return
        one = waiting.pop(0)
        yield one
        inner = [value[0] if type(value) in (list, tuple) and value else value for value in attributes(one).values()]
        waiting += [value for value in inner if any(kind.__name__ == "Dataset" for kind in type(value).__mro__)]


def _asks(kind: type) -> bool:
    """Return whether the methods of a class of the user's ask for the rank and for the number of ranks."""
    if kind not in _asking:
        named: Set[str] = set()
        methods = [value for base in kind.__mro__ for value in vars(base).values()]
        waiting: List[Any] = [one.__code__ for one in methods if type(one) is types.FunctionType]
        while waiting:
            code = waiting.pop()
            if frames.is_user_file(code.co_filename):
                named.update(code.co_names, code.co_varnames, code.co_freevars)
                named.update(one for one in code.co_consts if type(one) is str)
                waiting += [one for one in code.co_consts if type(one) is types.CodeType]
        named = {name.strip("_") for name in named}
        _asking[kind] = not named.isdisjoint(_ASK_COUNT) and not named.isdisjoint(_ASK_NUMBER)
    return _asking[kind]


def _describe_sampler(loader: Any) -> Optional[Dict[str, Any]]:
    """Describe the sampler that divides samples among ranks, else the loader's own one; None if there is no sampler."""
    chain = list(_chain(loader))
    if not chain:
        return None
    sharing = _sharing(chain)
    if sharing is None:
        plain = _plain(chain)
        return {"type": class_name(plain), "shuffle": _SHUFFLES.get(type(plain).__name__)}
    given = attributes(sharing)
    return {
        "type": class_name(sharing),
        "replicas": _number(given, _REPLICAS),
        "rank": _number(given, _RANK),
        "seed": _number(given, _SEED),
        "shuffle": _boolean(given, "shuffle"),
        "drop_last": _boolean(given, "drop_last"),
        "planned": _number(given, ("num_samples",)),
        "standard": int(_is_standard(loader, sharing)),
    }


def epoch_of(loader: Any) -> Optional[int]:
    """Return the epoch that the sampler of a pass has been set to, or None if it has no epoch."""
    chain = list(_chain(loader))
    sharing = _sharing(chain)
    if sharing is not None:
        _use(sharing)
    for sampler in [sharing] if sharing is not None else chain:
        epoch = _number(attributes(sampler), ("epoch",))
        if epoch is not None:
            return epoch
    return None


def _use(sampler: Any) -> None:
    try:
        if sampler in used:
            return
        used.add(sampler)
    except TypeError as error:  # the class supports no hashes or no weak references
        pass_on(error)
        return
    for number, known in _noted.items():  # a loader uses it after all
        if known() is sampler and here.ring is not None:
            here.ring.note({"k": "epoch_call", "n": number, "used": 1})


def length_of(dataset: Any) -> Optional[int]:
    """Return the length of a dataset, or None if it has none."""
    try:
        return len(dataset)
    except Exception as error:  # noqa: BLE001 - some have no length, even if they have the method
        pass_on(error)
        return None


def class_name(value: Any) -> str:
    """Return the class of an object, with its module."""
    kind = type(value)
    return ("%s.%s" % (kind.__module__, kind.__qualname__))[:200]


def _chain(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader, the outer ones first."""
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
    """Return the first sampler that knows the number of ranks and its own rank."""
    for sampler in chain:
        given = attributes(sampler)
        if _number(given, _REPLICAS) is not None and _number(given, _RANK) is not None:
            return sampler
    return None


def _plain(chain: Any) -> Any:
    """Return the sampler that decides the order: the first one that is not torch's BatchSampler."""
    own = getattr(sys.modules.get("torch.utils.data.sampler"), "BatchSampler", None)
    return next((sampler for sampler in chain if type(sampler) is not own), chain[0])


def _is_standard(loader: Any, sampler: Any) -> bool:
    """Return whether the loader draws exactly what torch's DistributedSampler gives, batch by batch."""
    own: Any = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    batches = getattr(sys.modules.get("torch.utils.data.sampler"), "BatchSampler", None)
    given = attributes(loader)
    draws = getattr(type(sampler), "__iter__", None)
    if own is None or given.get("sampler") is not sampler or draws is not own.__iter__:
        return False
    return given.get("batch_sampler") is None or type(given["batch_sampler"]) is batches


def _number(given: Dict[str, Any], names: Any) -> Optional[int]:
    for name in names:
        if type(given.get(name)) is int:
            return int(given[name])
    return None


def _boolean(given: Dict[str, Any], name: str) -> Optional[bool]:
    return given[name] if type(given.get(name)) is bool else None


def patch(module: Any) -> None:
    """Watch ``set_epoch`` of torch's DistributedSampler and its subclasses."""
    if check_every():
        hooks.put(module.DistributedSampler, "set_epoch", lambda original: around(original, after=_called))


@guarded("epoch calls")
def _called(sampler: Any) -> None:
    hashable = getattr(type(sampler), "__hash__", None) is not None
    if not here.is_rank or here.ring is None or not hashable or sampler in used:
        return
    count = _counts[sampler] = _counts.get(sampler, 0) + 1
    if count == CALLS and len(_noted) < MAX_NOTED:
        number = len(_noted) + 1
        _noted[number] = weakref.ref(sampler)
        samples = length_of(attributes(sampler).get("dataset"))
        here.note("epoch_call", n=number, N=samples, site=frames.describe_user(sys._getframe()))
