"""The pages of docs/ as their readers use them: the commands that they name, and the outputs that they show.

A block of output stands after a mark with its name, and begins with the commands that print it:

    <!-- output: NAME -->
    ```text
    $ ddpdoctor check-data --samples 455
    ...

A line that begins with ``...`` stands for any number of lines. ``tests.doc_runs`` runs the commands.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:^<!-- output: (?P<name>[\w-]+) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
SPAN = re.compile(r"(?<!`)`(ddpdoctor [^`]+)`(?!`)")
ENDS_COMMAND = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "2>", "2>&1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a page shows of commands and their output."""

    page: Path
    name: str
    commands: tuple[str, ...]
    shown: str


def load_script(name: str) -> Any:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pages() -> list[Path]:
    """Return the pages that a user reads; the records of decisions are for developers."""
    return [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "design" not in path.parts)]


def blocks() -> list[Block]:
    """Return all blocks of output that have a name."""
    found = ((page, match) for page in pages() for match in FENCE.finditer(page.read_text()) if match["name"])
    return [Block(page=page, name=match["name"], **split_body(match["body"])) for page, match in found]


def split_body(body: str) -> dict:
    """Return the commands of a block, each on one line, and the output under the last one."""
    joined = body.replace("\\\n", " ")
    commands = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    shown = [line for line in joined.splitlines() if not line.startswith("$ ")]
    return {"commands": tuple(commands), "shown": "\n".join(shown)}


def commands_of(page: Path) -> Iterator[list[str]]:
    """Return the words after ``ddpdoctor`` of each command that a page names, in a block or in a sentence."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield from (words for line in command_lines(match) for words in own_words(line))
    for span in SPAN.findall(FENCE.sub("", text)):
        yield from own_words(" ".join(span.split()))


def command_lines(match: re.Match[str]) -> list[str]:
    """Return the lines of a fenced block that are typed."""
    body = match["body"].replace("\\\n", " ")
    if match["kind"] == "sh":
        return body.splitlines()
    return [line[2:] for line in body.splitlines() if line.startswith("$ ")]


def own_words(line: str) -> list[list[str]]:
    """Return what follows each ``ddpdoctor`` of a line, up to the end of that command."""
    found: list[list[str]] = []
    current: list[str] | None = None
    for word in shlex.split(line.replace("`", ""), comments=True):
        if word in ENDS_COMMAND:
            current = None
        elif current is not None:
            current.append(word)
        elif word.rpartition("/")[2] == "ddpdoctor":
            found.append(current := [])
    return found


def is_gap(line: str) -> bool:
    """Tell whether a line of a block stands for any number of lines."""
    return line.lstrip().startswith("...")


def differs(shown: str, printed: str, mask: Callable[[str], str] | None = None) -> str:
    """Return the first line that is shown and was not printed in its place, or nothing."""
    masked = [(mask or mask_all)(line) for line in printed.strip().splitlines()]
    wanted = [line if is_gap(line) else (mask or mask_all)(line) for line in shown.strip().splitlines()]
    return _first_missing(wanted, masked)


def _first_missing(wanted: list[str], left: list[str]) -> str:
    for number, line in enumerate(wanted):
        if is_gap(line):
            rest = wanted[number + 1 :]
            while rest and not rest[0]:
                rest = rest[1:]
            starts = [at for at, one in enumerate(left) if rest and one == rest[0]]
            missing = [_first_missing(rest, left[at:]) for at in starts]
            return "" if not rest or "" in missing else (missing or rest)[0]
        if not left or left[0] != line:
            return line or (left or [""])[0]
        left = left[1:]
    return f"and then: {left[0]}" if left else ""


def mask_places(line: str) -> str:
    """Return a line without the folders of a run, and with single spaces."""
    line = re.sub(r"(?:/[\w.+-]+)*/?ddpdoctor-(demo|attach)-\w+", r"ddpdoctor-\1", line)
    return re.sub(r"\s+", " ", re.sub(r"; report in \S+$", "", line)).rstrip()


def mask_all(line: str) -> str:
    """Return a line without what differs from run to run: folders, numbers, interfaces, how a victim ended."""
    line = re.sub(r"interfaces: .*|IFNAME=\w+$", "interfaces", mask_places(line))
    line = re.sub(r"(?:failed as well, in|waits in) backward.*", "was in backward", line)
    return re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "0", line)
