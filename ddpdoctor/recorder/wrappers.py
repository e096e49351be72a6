"""Makes our wrapper look like the function that it wraps, in names, warnings and tracebacks."""

from __future__ import annotations

from .frames import HERE, is_own_file
from .state import guarded, here, script_handler, sealed, wall, walls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Callable, TypeVar

    Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

# A file name that ``warnings`` skips when it looks for the caller to name. It skips frames of the import system, which
# it knows by these two words (``is_internal_frame`` in CPython's Python/_warnings.c). So torch's warnings with
# ``stacklevel=2`` still name the user's line.
UNSEEN = HERE + "importlib._bootstrap"
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


def around(before: Any = None, after: Any = None, then: Any = None, last: Any = None, failed: Any = None) -> Any:
    """Return a decorator for a method or a function that calls more. What it calls must not raise.

    ``before`` gets all arguments, ``after`` the method's object, or ``failed`` if it raises, ``then`` the result and
    all arguments. ``last`` gets what ``before`` returned, unless that is None, in both cases.
    """

    def decorate(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = before(*args, **kwargs) if before is not None else None
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                sealed[wall.gi_running][hide_own_frames, error]
                if failed is not None:
                    sealed[wall.gi_running][failed, args[0]]
                raise
            finally:
                if given is not None:
                    sealed[wall.gi_running][last, given]
            if after is not None:
                after(args[0])
            if then is not None:
                then(result, *args, **kwargs)
            return result

        return run

    return decorate


def unless(is_met: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator for a function that is not called where ``is_met(*args, **kwargs)``, which must not raise."""

    def decorate(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return None if is_met(*args, **kwargs) else original(*args, **kwargs)

        return run

    return decorate


@guarded("traceback")
def hide_own_frames(error: BaseException) -> None:
    while error.__traceback__ is not None and _is_ours(error.__traceback__):
        error.__traceback__ = error.__traceback__.tb_next
    step = error.__traceback__
    while step is not None:
        while step.tb_next is not None and _is_ours(step.tb_next):
            step.tb_next = step.tb_next.tb_next
        step = step.tb_next


def _is_ours(traceback: TracebackType) -> bool:
    return is_own_file(traceback.tb_frame.f_code.co_filename)


def patch_signal(module: Any) -> None:
    """Let a handler of the script that interrupts our hook in a backward wait until the backward ends."""
    # Without us no Python code runs there, so the signal waits too, and comes once however often it was sent. If we let
    # the handler run, what it raises would have to wait instead, and could then meet what the next signal raises.
    set_handler, get_handler = module.signal, module.getsignal

    def waiting(handler: Any) -> Any:
        @wraps(handler)
        def handle(number: int, frame: Any) -> Any:
            inside = frame if here.in_backward else None
            while inside is not None:
                if inside.f_code in walls:
                    here.waiting.append(number)
                    return None
                inside = inside.f_back
            try:
                return handler(number, frame)
            except BaseException as error:
                sealed[wall.gi_running][hide_own_frames, error]
                raise

        handle.is_of_recorder = True  # type: ignore[attr-defined]
        return handle

    @wraps(set_handler)
    def set_waiting(signalnum: Any, handler: Any) -> Any:
        ours = waiting(handler) if callable(handler) and handler is not module.default_int_handler else handler
        return script_handler(set_handler(signalnum, ours))

    @wraps(get_handler)
    def get_waiting(signalnum: Any) -> Any:
        return script_handler(get_handler(signalnum))

    module.signal, module.getsignal = set_waiting, get_waiting
