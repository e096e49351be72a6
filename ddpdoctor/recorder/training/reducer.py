"""Names the parameters that DDP's reducer complains about or still waits for. The reducer knows only their numbers.

Without DETAIL torch's error has only numbers. For a large model the list is longer than the text that is kept.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Dict, List, Optional, Set

from .. import frames, hooks
from ..gradients.finite_checks import tensors_in
from ..state import guarded, here, pass_on

MAX_NAMES = 8
MAX_NAME = 120
MAX_NODES = 4096
"""Nodes of autograd's graph that are searched for one variable of the script. Our choice: noting an error must not take
seconds."""
MAX_VARIABLES = 64
MAX_NOTES = 16
"""Changes between finished and unfinished that are noted. A loop with several backwards per forward changes every step.
"""

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_TWICE = "Expected to mark a variable ready only once"
_STATIC = "not compatible with static_graph set to True"
_NUMBERS = "Parameter indices which did not receive grad for rank "
_AT_NUMBER = "Parameter at index "

_names: weakref.WeakKeyDictionary[Any, List[str]] = weakref.WeakKeyDictionary()
"""By model: the names of its parameters, in the order of the reducer's numbers."""
_last: Any = None
"""A weak reference to the model whose forward ran last with a reduction to follow."""
_notes = 0


def note_what_is_needed(native: Any) -> None:
    """Note whether this torch has the methods that are called on DDP's reducer and timers, which are C++."""
    for name in ("_check_reducer_finalized", "get_backward_stats", "_ddp_graph_static"):
        hooks.has(native.Reducer, name)
    for name in ("_get_ddp_logging_data", "set_runtime_stats_and_log"):
        hooks.has(native.Logger, name)


def keep_names(ddp: Any) -> None:
    """Keep the names of the parameters that the model reduces. Some may be frozen or replaced later."""
    named = ddp.module.named_parameters()
    _names[ddp] = [name for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore]


def forward_begins(ddp: Any) -> None:
    """Remember which model's gradients will be reduced next."""
    global _last
    if _last is None or _last() is not ddp:
        _last = weakref.ref(ddp)


def last() -> Any:
    """Return the model whose forward ran last with a reduction to follow, or None."""
    return _last() if _last is not None else None


def complaint(error: BaseException, text: str) -> Optional[Dict[str, Any]]:
    """Return what an error of the reducer is about, or None for any other error."""
    if not text.startswith((_UNFINISHED, _TWICE)):
        return None
    what = "twice" if text.startswith(_TWICE) else "static" if _STATIC in text else "unfinished"
    ddp = _model_in(error.__traceback__) or last()
    names = _numbered(ddp, text)
    entry = _entry(names, ddp, what)
    if names and what != "twice":
        wanted = set(names)
        ids = {id(parameter) for name, parameter in ddp.module.named_parameters() if name in wanted}
        entry["outputs"] = _variables_of(error.__traceback__, ids)
    return entry


def unfinished(ddp: Any) -> Optional[Dict[str, Any]]:
    """Return which gradients the reducer still waits for after a backward, or None if it waits for none."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        pass_on(error)
        text = str(error)
        return _entry(_numbered(ddp, text), ddp, "unfinished") if text.startswith(_UNFINISHED) else None
    return None


@guarded("reducer")
def note(replica: Any, entry: Optional[Dict[str, Any]], frame: Any) -> None:
    """Note that a backward left gradients out, or that a later one delivered them."""
    global _notes
    if here.ring is not None and _notes < MAX_NOTES:
        _notes += 1
        about = dict(entry or {}, k="unfinished", group=replica.group, model=replica.number, at=time.monotonic_ns())
        if entry:
            about["frame"] = frames.describe_user(frame)
        here.ring.note(about)


def may_note() -> bool:
    """Return whether changes are still noted."""
    return _notes < MAX_NOTES


def _entry(names: List[str], ddp: Any, what: str) -> Dict[str, Any]:
    return {
        "what": what,
        "names": [name[:MAX_NAME] for name in names[:MAX_NAMES]],
        "count": len(names),
        "of": len(_names.get(ddp, ())) if ddp is not None else 0,
    }


def _model_in(traceback: Any) -> Any:
    """Return the DDP model in whose code an error was raised."""
    found = None
    while traceback is not None:
        itself = traceback.tb_frame.f_locals.get("self")
        if "reducer" in getattr(itself, "__dict__", ()):
            found = itself
        traceback = traceback.tb_next
    return found


def _numbered(ddp: Any, text: str) -> List[str]:
    """Return the parameters whose numbers are in an error's text, in the order of the model."""
    known = _names.get(ddp, []) if ddp is not None else []
    return [known[number] for number in sorted(_numbers_in(text)) if number < len(known)]


def _numbers_in(text: str) -> List[int]:
    if _NUMBERS in text:
        listed = text.split(_NUMBERS, 1)[1].partition(":")[2].partition("\n")[0]
    else:
        listed = text.partition(_AT_NUMBER)[2].partition(" ")[0]
    return [int(word) for word in listed.split() if word.isdigit()]


def _variables_of(traceback: Any, wanted: Set[int]) -> List[str]:
    """Return the script's first variable that was computed from ``wanted`` parameters. The loss did not use it."""
    visited = 0
    while traceback is not None and wanted:
        frame = traceback.tb_frame
        if frames.is_user_file(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                for label, tensor in tensors_in(value, name):
                    visited += 1
                    if visited > MAX_VARIABLES:
                        return []
                    if tensor.grad_fn is not None and _comes_from(tensor.grad_fn, wanted):
                        return [label[:MAX_NAME]]
        traceback = traceback.tb_next
    return []


def _comes_from(node: Any, wanted: Set[int]) -> bool:
    seen, waiting = {node}, [node]
    while waiting and len(seen) < MAX_NODES:
        for earlier, _ in waiting.pop().next_functions:
            if earlier is None or earlier in seen:
                continue
            if id(getattr(earlier, "variable", None)) in wanted:
                return True
            seen.add(earlier)
            waiting.append(earlier)
    return False
