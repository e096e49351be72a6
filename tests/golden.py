"""Texts that hold what tests say, below tests/data, where a reviewer reads them: golden values, and cases of rules.

What a test gives is kept whole in a file of tests/data/golden.

``DDPDOCTOR_GOLDEN=write python -m pytest -n 0 FILE`` writes those of a file of tests again. Look at what changed before
you commit it. A module has ``CASES = Cases(__name__)``, puts ``@CASES`` before each function that makes a value, and
``test_kept = CASES.test()``.

A file of cases has rows of facts, and below each, or below several with one outcome, what is said of them. "==== HEAD"
begins a case, "with ..." gives what all its rows have, "# " is a comment. Lines of a row after its first are indented.
What is said begins with "=> ", and goes on with a line for each finding and indented ones with its parts. Evidence,
fixes and checks are compared where the case has them.

A module of tests has its rows in a file of tests/data/rules, written with what the module and its builders define, and
``test_rows = table(NAME, ...)``. "let NAME = ..." names a fact for all rows below, and "..." in a "with" is where the
row goes. With ``DDPDOCTOR_GOLDEN=write`` and ``-n 0`` the test writes what is said, also below a new row and a line
"=> ". Read its diff: it writes what is, and not what should be.

A file of tests/data/words has a row "TEXT => VALUE" for each text that a function is given, below "==== FUNCTION": see
`words`. It is written again as golden values are; a new row is a text alone.
"""

import ast
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddpdoctor.exchange.conversation import BadMessage
from ddpdoctor.model.codec import WrongValue
from ddpdoctor.model.errors import UserError
from ddpdoctor.report.blocks import Grid, GridCell
from ddpdoctor.report.lines import format_ranks

FOLDER = Path(__file__).parent / "data" / "golden"
RULES = FOLDER.parent / "rules"
WRITES = os.environ.get("DDPDOCTOR_GOLDEN") == "write"
HEAD = "=== "


class Cases:
    """Functions of one module whose values are kept, by their names. One with an argument is given an empty folder."""

    def __init__(self, module: str) -> None:
        self.path = FOLDER / f"{module.rpartition('.')[2].removeprefix('test_')}.txt"
        self.made: dict[str, Callable[..., Any]] = {}

    def __call__(self, make: Callable[..., Any]) -> Callable[..., Any]:
        assert make.__name__ not in self.made
        self.made[make.__name__] = make
        return make

    def test(self) -> Callable[[str, Path], None]:
        @pytest.mark.parametrize("name", self.made)
        def test_kept(name: str, tmp_path: Path) -> None:
            make = self.made[name]
            self.check(name, make(tmp_path) if make.__code__.co_argcount else make())
            assert WRITES or self.kept().keys() >= self.made.keys()

        return test_kept

    def check(self, name: str, value: Any) -> None:
        """Hold a value to what is kept by this name."""
        now, kept = outline(value).rstrip("\n"), self.kept()
        if WRITES:
            kept = {one: text for one, text in kept.items() if not self.made or one in self.made} | {name: now}
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text("".join(f"{HEAD}{one}\n{text}\n" for one, text in kept.items()), "utf-8")
        assert now == kept.get(name)

    def kept(self) -> dict[str, str]:
        text = self.path.read_text("utf-8") if self.path.exists() else ""
        parts = (part.partition("\n") for part in f"\n{text}".split(f"\n{HEAD}")[1:])
        return {name: body.removesuffix("\n") for name, _, body in parts}


def outline(value: Any) -> str:
    """Return a value as lines: a text as it is, and of a record the fields that are not empty."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Grid):
        return _grid(value)
    if isinstance(value, dict):
        return "\n".join(_with(f"{key}:", outline(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)) and not _is_short(value):
        return "\n".join(map(outline, value))
    if is_dataclass(value) and not isinstance(value, type):
        found = [(one.name, getattr(value, one.name)) for one in fields(value)]
        shown = [(name, one) for name, one in found if one is not None and one not in ("", (), {})]
        short = "".join(f" {name}={_plain(one)}" for name, one in shown if _is_short(one))
        long = "".join("\n" + _with(f"  {name}:", outline(one), "    ") for name, one in shown if not _is_short(one))
        return f"{type(value).__name__}{short}{long}"
    return _plain(value)


def escaped(text: str) -> str:
    """Keep lines of a text, and show all else that a file cannot: what the terminal would act on, and lone halves."""
    return "".join(one if one == "\n" or one.isprintable() else ascii(one)[1:-1] for one in text)


def _with(head: str, text: str, indent: str = "  ") -> str:
    lines = text.rstrip("\n").split("\n")
    return (
        f"{head} {lines[0]}".rstrip()
        if len(lines) == 1
        else head + "".join(f"\n{indent}{one}".rstrip(" ") for one in lines)
    )


def _is_short(value: Any) -> bool:
    """Say whether it stands in one line: a plain value, or a tuple of such."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(
        (isinstance(one, (str, int, float, Enum, type(None))) and "\n" not in str(one))
        or (isinstance(one, (list, tuple)) and _is_short(one))
        for one in parts
    )


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        ints = [one for one in value if type(one) is int]
        if len(ints) == len(value) > 4 and ints == [*range(ints[0], ints[0] + len(ints))]:
            return f"({ints[0]} to {ints[-1]})"
        return f"({', '.join(map(_plain, value))})"
    return ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)


def _grid(grid: Grid) -> str:
    assert all(len(row) == len(grid.columns) for row in grid.cells)
    lines = [f"Grid {grid.title!r} {grid.row_name!r} by {grid.column_name!r}", f"  {' | '.join(grid.columns)}"]
    lines += [f"  {name}: {' | '.join(map(_cell, row))}" for name, row in zip(grid.rows, grid.cells, strict=True)]
    return "\n".join(map(escaped, [*lines, *(f"  legend: {one}" for one in grid.legend)]))


def _cell(cell: GridCell) -> str:
    level = [] if cell.level is None else [f"{cell.level:.3f}"]
    more = [*([] if cell.tone.value == "plain" else [cell.tone.value]), *level, *([cell.about] if cell.about else [])]
    return cell.text + (f" <{'; '.join(more)}>" if more else "")


# Rows of words


WORDS = Path(__file__).parent / "data" / "words"
REFUSED = "refused: "


def words(module, **functions):
    """Return the test of a module's rows. A text in quotes or brackets is a literal, and a refusal is a value too.

    A function whose first argument is ``request`` is given pytest's, for what else the test has.
    """
    path = WORDS / f"{'-'.join(module.split('.')[-2:]).replace('-test_', '-')}.txt"

    @pytest.mark.parametrize("name", functions)
    def test_words(name, request):
        function = functions[name]
        if [*inspect.signature(function).parameters][:1] == ["request"]:
            function = partial(function, request)
        kept = {part.partition("\n")[0]: part.split("\n")[1:] for part in path.read_text("utf-8").split("==== ")[1:]}
        assert kept.keys() == functions.keys()
        now = [one for line in kept[name] for one in _row(function, line)]
        if WRITES:
            parts = (kept | {name: now}).items()
            path.write_text("".join("\n".join((f"==== {one}", *lines)) for one, lines in parts), "utf-8")
        assert WRITES or now == kept[name]

    return test_words


def _row(function, line):
    """Return the lines of a row as they are now, and other lines as they stand, save those that go on with a value."""
    if not line or line.startswith(("# ", "    ")):
        return [] if line.startswith("    ") else [line]
    text = line.partition(" =>")[0]
    given = ast.literal_eval(text) if text.startswith(("'", '"', "(", "b'", 'b"', "{")) else text
    try:
        value = function(given)
    except UserError as error:
        value = "\n".join(filter(None, (f"{REFUSED}{error.message}", error.help, f"status {error.status}")))
    except (ValueError, BadMessage, WrongValue) as error:
        value = f"{REFUSED}{error}"
    plain = not isinstance(value, str) or escaped(value) == value
    first, *more = outline(value if plain else ascii(value)).split("\n")
    return [f"{text} => {first}".rstrip(), *(f"    {one}".rstrip() for one in more)]


# Cases of rules


PARTS = (
    "error", "warning", "info", "problem", "  fix", "  evidence", "  at", "  check", "  of",
)  # fmt: skip
OF_A_FINDING = tuple(f"{part}: " for part in PARTS)


class Block(NamedTuple):
    """Rows of a case that have one outcome."""

    head: str
    common: str
    rows: list[str]
    said: list[str]
    lets: tuple[str, ...] = ()


def _parts(path):
    """Return the parts of a file: blocks, and all other lines as they stand."""
    head, common, lets, rows, said = "", "", (), [], []
    lines = path.read_text(encoding="utf-8").split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(("=> ", *OF_A_FINDING)):
            said.append(line)
            if not following.startswith(OF_A_FINDING):
                yield Block(head, common, rows, said, lets)
                rows, said = [], []
        elif line.startswith("  "):
            rows[-1] += "\n" + line
        elif line and not line.startswith(("# ", "with ", "let ", "==== ")):
            rows.append(line)
        else:
            if line.startswith("==== "):
                head, common = line[5:], ""
            common = line[5:] if line.startswith("with ") else common
            lets += (line[4:],) if line.startswith("let ") else ()
            yield line


def rewrite(folder, said_of, files="*.txt"):
    """Write what is said now below the rows of each file of a folder; ``said_of`` takes a block and one of its rows."""
    for path in sorted(folder.glob(files)):
        lines = []
        for block in _parts(path):
            if isinstance(block, str):
                lines.append(block)
                continue
            found = [said_of(block, row) for row in block.rows]
            for row, now, after in zip(block.rows, found, [*found[1:], None], strict=True):
                lines += [row] if now == after else [row, *now]
        path.write_text("\n".join(lines), encoding="utf-8")


def as_listed(block, lines, may_lack=("  evidence: ",)):
    """Return what is said, without such parts where the case has none of them."""
    left_out = tuple(part for part in may_lack if not any(line.startswith(part) for line in block.said))
    return [line for line in lines if not line.startswith(left_out)]


OPTIONAL = ("  evidence: ", "  fix: ", "  check: ")


def known_to(names, lets):
    """Return what rows may name: what these modules have, by their names or as they are, and what lines bind."""
    known: dict[str, Any] = {}
    for one in names:
        for module in one.split() if isinstance(one, str) else ():
            known |= vars(importlib.import_module(module))
        known |= {} if isinstance(one, str) else one
    for let in lets:
        exec(let, known)
    return known


def by_case(folder, files, said_of):
    """Return a test of each case of files; ``said_of`` takes a block and one of its rows."""
    cases = {}
    for path in sorted(folder.glob(files)):
        for block in _parts(path):
            if isinstance(block, Block):
                cases.setdefault(f"{path.stem}: {block.head}", []).append(block)

    @pytest.mark.parametrize("case", cases)
    def test_rows(case):
        if WRITES:
            if case == next(iter(cases)):
                rewrite(folder, said_of, files)
            return
        for block in cases[case]:
            assert {row: said_of(block, row) for row in block.rows} == dict.fromkeys(block.rows, block.said)

    return test_rows


def table(name, *names, head=None, folder=RULES, judge=None):
    """Return a test of each case of tests/data/rules/NAME.txt; ``names``: of modules, and with their values.

    A row gives a judgment or an answer, of which ``head`` says in a few words how it came out, or any other value.
    ``judge`` makes it of what a row gives.
    """
    known = cache(partial(known_to, names))

    def said_of(block, row):
        text = block.common.replace("...", row) if block.common else row
        value = eval(text, {**known(block.lets)})
        judged = judge(value) if judge else value
        return as_listed(block, shown(judged, head, ("node0",) if head else ()), OPTIONAL)

    return by_case(folder, f"{name}.txt", said_of)


def outcome(judged):
    """Say how the one check of a judgment, or an answer, came out; of several checks only whether all is well."""
    checks = getattr(judged, "checks", (judged,))
    if len(checks) != 1:
        return "found" if judged.findings else "nothing found"
    return f"{checks[0].outcome.value}: {getattr(checks[0], 'reason', '')}{checks[0].seen}".rstrip(": ")


def shown(judged, head=None, usual=("node0",)):
    """Return what was judged as lines: its head, and all of each finding but hosts that go without saying."""
    if not hasattr(judged, "findings") and not hasattr(judged, "problems"):
        first, *more = outline(judged).split("\n")
        return [f"=> {first}", *(f"  of: {one}" for one in more)]
    lines = [f"=> {(head or outcome)(judged)}"]
    for check in getattr(judged, "checks", ()):
        assert check.outcome.value != "crashed", check
        lines.append(f"  check: {check.code} {check.outcome.value}: {check.reason}{check.seen}".rstrip(": "))
    for one in judged.findings if hasattr(judged, "findings") else judged.problems:
        kind = getattr(one, "kind", None)
        lines.append(f"{one.severity.value if one.severity else 'problem'}: {f'{kind}: ' if kind else ''}{one.summary}")
        lines += [f"  fix: {one.fix}"] if one.fix else []
        lines += [f"  evidence: {text}" for text in one.evidence]
        places = [f"{place.file}:{place.line}" for place in one.where]
        hosts = ", ".join(one.hosts) if one.hosts != usual else ""
        more = {
            "": format_ranks(one.ranks), "hosts": hosts,
            "where": ", ".join(places), "confidence": one.confidence.value, "step": one.step, "tensor": one.tensor,
            "share": one.share if one.share is None else f"{one.share:.2g}", "origin": one.origin and one.origin.value,
        }  # fmt: skip
        said = [f"{name} {value}".strip() for name, value in more.items() if value not in (None, "", "high")]
        lines += [f"  at: {'; '.join(said)}"] if said else []
    return [line.replace("\n", "\\n") for line in lines]
