"""Makes a wrapper of ours look like the function that it wraps, in names, warnings and tracebacks."""

from __future__ import annotations

from .frames import HERE, is_own_file
from .state import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Callable, TypeVar

    Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

UNSEEN = HERE + "importlib._bootstrap"
"""A file name that ``warnings`` skips when it looks for the caller to name. It skips frames of the import system,
which it knows by these two words (``is_internal_frame`` in CPython's Python/_warnings.c). So torch's warnings with
``stacklevel=2`` still name the user's line."""
_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def wraps(original: Any) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that gives a wrapper the names of ``original``, so that it is pickled and shown as such."""

    def decorate(wrapper: Wrapper) -> Wrapper:
        for name in _COPIED:
            value = getattr(original, name, None)
            if value is not None:
                setattr(wrapper, name, value)
        wrapper.__dict__.update(getattr(original, "__dict__", {}))
        wrapper.__wrapped__ = original  # type: ignore[attr-defined]
        wrapper.__code__ = wrapper.__code__.replace(co_filename=UNSEEN)
        return wrapper

    return decorate


def around(original: Any, before: Any = None, after: Any = None) -> Any:
    """Return a method that also calls ``before`` and ``after``, with its object. They must not raise."""

    @wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    return run


@guarded("traceback")
def hide_own_frames(error: BaseException) -> None:
    """Remove the recorder's frames from a traceback, so that it reads as it would without us."""
    while error.__traceback__ is not None and _is_ours(error.__traceback__):
        error.__traceback__ = error.__traceback__.tb_next
    step = error.__traceback__
    while step is not None:
        while step.tb_next is not None and _is_ours(step.tb_next):
            step.tb_next = step.tb_next.tb_next
        step = step.tb_next


def _is_ours(traceback: TracebackType) -> bool:
    return is_own_file(traceback.tb_frame.f_code.co_filename)
