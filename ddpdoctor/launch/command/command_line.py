"""Splits a command line into ddpdoctor's options, torchrun's options, the script or command, and its arguments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.launch.command.torchrun_table import TORCHRUN_OPTIONS, ask_torchrun, canonical
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

HELP_OPTIONS = frozenset({"--help", "-h"})
USAGE = (
    "Usage: ddpdoctor wrap [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]..., or ddpdoctor wrap [OPTIONS] -- COMMAND "
    "[ARGS]...; see `ddpdoctor wrap --help`."
)
_MODULE = frozenset({"-m", "--module"})
_NO_PYTHON = "--no-python"
_SHORT_LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCommand:
    """A command line of ``wrap``, split by owner; each part keeps the user's order and spelling.

    If ``is_command``, ``script`` is a command that runs unchanged and not under torchrun. ``torchrun`` does not contain
    the flags that ``is_module`` and ``no_python`` represent. In ``own``, long options are written with dashes.
    ``script`` is empty only if ``own`` asks for help.
    """

    own: tuple[str, ...]
    torchrun: tuple[str, ...]
    script: str
    is_module: bool
    no_python: bool
    script_args: tuple[str, ...]
    is_command: bool = False


def split_command(
    argv: Iterable[str],
    own_options: Mapping[str, bool],
    ask: Callable[[], Mapping[str, bool]] = ask_torchrun,
) -> SplitCommand:
    """Split ``argv``; ``own_options`` maps each of ddpdoctor's options to whether it takes a value.

    The first word that is neither an option nor an option's value is the script; everything after it belongs to the
    script. After ``--`` comes a command. ``ask`` is called for an option that is in neither table. Raises ``UserError``
    for an unknown option, a missing value, options of torchrun before a command, and if there is neither a script nor
    a command.
    """
    words = deque(argv)
    parts = _Parts(own_options=own_options, ask=ask)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.popleft()
        if word == "--":
            return parts.finish_command(words)
        if word in HELP_OPTIONS:
            return parts.finish("", (), own=("--help",))
        parts.take(word, words)
    if not words:
        raise UserError("no script to run was given", help=USAGE)
    return parts.finish(words.popleft(), tuple(words), own=tuple(parts.own))


@dataclass(kw_only=True)
class _Parts:
    """The words sorted so far."""

    own_options: Mapping[str, bool]
    ask: Callable[[], Mapping[str, bool]]
    own: list[str] = field(default_factory=list)
    torchrun: list[str] = field(default_factory=list)
    is_module: bool = False
    no_python: bool = False

    def take(self, word: str, rest: deque[str]) -> None:
        """Sort one option with its value, which may be attached or the next word in ``rest``."""
        name, attached = _take_apart(word)
        if (full := self._complete(name)) != name:
            name, word = full, word.replace(word.partition("=")[0], full, 1)
        is_own = name in self.own_options
        takes_value = self.own_options[name] if is_own else self._torchrun_takes_value(name, word)
        if attached and not takes_value:
            raise UserError(f"the option {name} takes no value, but got one: {word}", help=USAGE)
        if name in _MODULE:
            self.is_module = True
        elif name == _NO_PYTHON:
            self.no_python = True
        else:
            kept = self.own if is_own else self.torchrun
            kept.append(word.replace(word.partition("=")[0], name, 1) if is_own else word)
            if takes_value and not attached:
                kept.append(_next_value(name, rest))

    def finish(self, script: str, script_args: tuple[str, ...], *, own: tuple[str, ...]) -> SplitCommand:
        """Return the sorted words as a ``SplitCommand``."""
        return SplitCommand(
            own=own,
            torchrun=tuple(self.torchrun),
            script=script,
            is_module=self.is_module,
            no_python=self.no_python,
            script_args=script_args,
        )

    def finish_command(self, words: deque[str]) -> SplitCommand:
        """Return the sorted words as a ``SplitCommand`` if ``--`` and a command follow."""
        if self.torchrun or self.is_module or self.no_python:
            given = next(iter(self.torchrun), "-m" if self.is_module else _NO_PYTHON)
            raise UserError(
                f"{given} is an option of torchrun, but the command after `--` starts the ranks itself",
                help="Leave out `--` to start a script under torchrun, or give torchrun as the command: "
                "`ddpdoctor wrap -- torchrun OPTIONS SCRIPT`.",
            )
        if not words:
            raise UserError("no command to run was given after `--`", help=USAGE)
        return SplitCommand(
            own=tuple(self.own), torchrun=(), script=words[0], is_module=False, no_python=False,
            script_args=tuple(words)[1:], is_command=True,
        )  # fmt: skip

    def _complete(self, name: str) -> str:
        """Expand an abbreviated option, as argparse does for torchrun, or return ``name`` if nothing matches."""
        known = {*self.own_options, *TORCHRUN_OPTIONS}
        if not name.startswith("--") or name in known:
            return name
        meant = sorted(option for option in known if option.startswith(name))
        if len(meant) > 1:
            raise UserError(f"the option {name} could be {' or '.join(meant)}", help="Write it out.")
        return meant[0] if meant else name

    def _torchrun_takes_value(self, name: str, word: str) -> bool:
        if name in TORCHRUN_OPTIONS:
            return TORCHRUN_OPTIONS[name]
        known = self.ask()
        if name in known:
            return known[name]
        raise UserError(f"neither ddpdoctor wrap nor torchrun knows the option {word.partition('=')[0]}", help=USAGE)


def _take_apart(word: str) -> tuple[str, bool]:
    """Return an option's name and whether its value is attached (``--tee=3``, ``-t3``)."""
    name, equals, _ = word.partition("=")
    if name.startswith("--"):
        return canonical(name), bool(equals)
    return word[:_SHORT_LENGTH], len(word) > _SHORT_LENGTH


def _next_value(name: str, rest: deque[str]) -> str:
    if not rest:
        raise UserError(f"the option {name} needs a value", help=USAGE)
    return rest.popleft()
