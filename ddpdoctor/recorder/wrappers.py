"""What makes a wrapper of ours pass for the function that it stands before."""

from __future__ import annotations

from .frames import HERE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, TypeVar

    Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

UNSEEN = HERE + "importlib._bootstrap"
"""A file name that ``warnings`` passes over in search of the caller to name: it does so for frames of the import
system, known by these two words (``is_internal_frame`` in CPython's Python/_warnings.c). So a warning that torch gives
with ``stacklevel=2`` names the user's line, as it does without us."""
_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def standing_for(original: Any) -> Callable[[Wrapper], Wrapper]:
    """Return a decorator that gives a wrapper the names of ``original``, so that it is pickled and shown as that."""

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
