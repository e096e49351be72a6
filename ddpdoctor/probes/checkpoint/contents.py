"""Recognizes the parts of a checkpoint by the keys that torch's classes write, not by where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.saved import Contents, StatePart, TensorIn, Weights
from ddpdoctor.probes.checkpoint.pickles import LAYERS, Opaque, TensorRef, walk_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MOST_DEPTH = 4
"""How deep to look for parts. Trainers put them one or two levels down."""
CPU_STATE_BYTES = 5056
CUDA_STATE_BYTES = 16
"""Sizes of the uint8 tensors that ``torch.get_rng_state`` and ``torch.cuda.get_rng_state`` return."""
RANDOM_WORDS = ("rng", "random_state", "generator_state")
PROGRESS_WORDS = ("epoch", "step", "iter", "global_step", "iteration", "num_updates")


def describe(root: Any, names: tuple[str, ...]) -> Contents:
    """Return what a checkpoint holds. ``names`` are the functions and classes that its pickle names."""
    found = list(_walk(root, "", 0))
    parts = {part for _, value, key in found if (part := _part_of(key, value)) is not None}
    weights = tuple(one for path, value, _ in found if (one := _weights_at(path, value)) is not None)
    if not weights and isinstance(root, Opaque):
        # Such as a torch.jit script.
        weights = (Weights(where="", tensors=_describe_all(walk_tensors(root))),)
    if weights:
        parts.add(StatePart.MODEL)
    return Contents(
        tensors=_describe_all(walk_tensors(root)),
        weights=weights,
        parts=tuple(part for part in StatePart if part in parts),
        empty_optimizer=any(_is_optimizer(value) and not value["state"] for _, value, _ in found),
        globals=names,
    )


def _describe_all(tensors: Iterable[tuple[str, TensorRef]]) -> tuple[TensorIn, ...]:
    return tuple(TensorIn(name=name, shape=ref.shape, dtype=ref.dtype) for name, ref in tensors)


def weights_of(tensors: Mapping[str, TensorRef]) -> Contents:
    """Return the contents of a file that holds only named tensors."""
    described = _describe_all(tensors.items())
    weights = (Weights(where="", tensors=described),) if described else ()
    return Contents(tensors=described, weights=weights, parts=(StatePart.MODEL,) if weights else ())


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and last key of everything that may be a part, but not what is inside a part."""
    yield path, value, path.rpartition(".")[2]
    if depth == MOST_DEPTH or _is_weights(value) or _is_module(value) or _is_optimizer(value):
        return
    for key, child in _items(value):
        yield from _walk(child, f"{path}.{key}" if path else str(key), depth + 1)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, Opaque) and isinstance(value.state, dict):
        yield from value.state.items()


def _part_of(key: str, value: Any) -> StatePart | None:
    if _is_optimizer(value):
        return StatePart.OPTIMIZER
    if isinstance(value, dict):
        return _part_of_dict(value)
    if _is_random(key, value):
        return StatePart.RANDOM
    if type(value) is int and key.lower().rstrip("s") in PROGRESS_WORDS:
        return StatePart.PROGRESS
    return None


def _part_of_dict(value: dict[Any, Any]) -> StatePart | None:
    if {"scale", "growth_factor", "_growth_tracker"} <= value.keys():
        return StatePart.SCALER
    if "last_epoch" in value and ({"_step_count", "base_lrs", "_last_lr"} & value.keys()):
        return StatePart.SCHEDULER
    return None


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("param_groups"), list) and isinstance(value.get("state"), dict)
    )


def _is_random(key: str, value: Any) -> bool:
    if isinstance(value, TensorRef):
        is_state = value.dtype == "uint8" and value.shape in {(CPU_STATE_BYTES,), (CUDA_STATE_BYTES,)}
        return is_state or any(word in key.lower() for word in RANDOM_WORDS)
    return isinstance(value, list | tuple | Opaque) and any(word in key.lower() for word in RANDOM_WORDS)


def _is_weights(value: Any) -> bool:
    """Return whether a dict is a model's state dict: string keys, and tensors that are not random state as values.

    Half of the values must be tensors, because layers may add others (``_extra_state``). A dict that holds another dict
    of tensors was put together by a script.
    """
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        return False
    if any(
        isinstance(one, dict) and any(isinstance(inner, TensorRef) for inner in one.values()) for one in value.values()
    ):
        return False
    tensors = [key for key, one in value.items() if isinstance(one, TensorRef) and not _is_random(key, one)]
    return 2 * len(tensors) >= len(value) and _part_of_dict(value) is None


def _is_module(value: Any) -> bool:
    """Return whether a value is a module that was pickled as a whole."""
    return isinstance(value, Opaque) and isinstance(value.state, dict) and value.state.keys() >= LAYERS


def _weights_at(path: str, value: Any) -> Weights | None:
    if _is_weights(value):
        tensors = [(name, ref) for name, ref in value.items() if isinstance(ref, TensorRef)]
    elif _is_module(value):
        tensors = list(_state_of(value, ""))
    else:
        return None
    return Weights(where=path, tensors=_describe_all(tensors))


def _state_of(module: Opaque, prefix: str) -> Iterator[tuple[str, TensorRef]]:
    """Yield what a pickled module's state dict would hold. Other tensors, such as an LSTM's views, are left out."""
    state = module.state
    passing = state.get("_non_persistent_buffers_set") or ()
    for name, one in (*state["_parameters"].items(), *state["_buffers"].items()):
        if isinstance(one, TensorRef) and name not in passing:
            yield f"{prefix}{name}", one
    for name, layer in state["_modules"].items():
        if _is_module(layer):
            yield from _state_of(layer, f"{prefix}{name}.")
