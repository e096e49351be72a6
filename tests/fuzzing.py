"""Feeds damaged files to what reads them, and holds what comes out to what a user may be shown."""

import io
import json
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from ddpdoctor.cli.allreduce_bench import read_compared
from ddpdoctor.cli.output import show_report
from ddpdoctor.cli.report import read_run
from ddpdoctor.diagnose.files import checkpoint_report
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Report, Severity
from ddpdoctor.report.bandwidth import figure
from tests.mutations import link_folder, spoil

MOST_SECONDS = 20
"""A busy machine takes its time; what hangs takes for ever."""
MOST_MIB = 300
MARKUP = "<script>"
FORMATS = ("text", "json", "markdown", "html", "junit", "github", "sarif", "csv", "nccl-tests")
PLOT_SHARE = 0.02
"""Plots are drawn of so few bench reports only, because one takes a second."""
STARTED = "2026-01-01T00:00:00.000+00:00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is whole before it is damaged: a run folder, a report, or checkpoints."""

    name: str
    path: Path
    kind: str
    """"run", "bench", or "checkpoint"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """What fell, of which input."""

    seed: str
    sample: str
    what: str


class TooLongError(BaseException):
    """An input took longer than ``MOST_SECONDS``; no wall may swallow this."""


def fuzz(samples: Sequence[Sample], seed: str, numbers: range) -> Iterator[Fall]:
    """Yield what falls; each input is made by its seed and number alone."""
    signal.signal(signal.SIGALRM, _stop)
    for number in numbers:
        name = f"{seed}:{number}"
        dice = random.Random(name)
        sample = dice.choice(samples)
        before_mib = peak_mib()
        for what in _try_one(dice, sample):
            yield Fall(seed=name, sample=sample.name, what=what)
        if peak_mib() - before_mib > MOST_MIB:
            yield Fall(seed=name, sample=sample.name, what=f"{peak_mib() - before_mib} MiB more memory")


def peak_mib() -> int:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _stop(_number: int, _frame: object) -> None:
    raise TooLongError


def _try_one(dice: random.Random, sample: Sample) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / sample.path.name
        if sample.path.is_dir():
            shutil.copytree(sample.path, path)
        else:
            shutil.copy(sample.path, path)
        others = sorted(sample.path.rglob("*.*")) if path.is_dir() else [sample.path]
        others = [one for one in others if one.is_file()]
        files = sorted(one for one in (path.rglob("*") if path.is_dir() else [path]) if one.is_file())
        for one in dice.sample(files, min(len(files), dice.choice([1, 1, 2, 4]))):
            spoil(dice, one, others)
        if path.is_dir() and dice.random() < 0.02:
            link_folder(dice, path)
        signal.alarm(MOST_SECONDS)
        began = time.monotonic()
        try:
            yield from _show(dice, sample.kind, path)
        except TooLongError:
            yield f"it took more than {time.monotonic() - began:.0f} s"
        finally:
            signal.alarm(0)


def _show(dice: random.Random, kind: str, path: Path) -> Iterator[str]:
    try:
        report = _read_checkpoint(path) if kind == "checkpoint" else read_run(path)
    except UserError as error:
        if error.status != 2:
            yield f"status {error.status}: {error.message}"
        return
    except Exception as error:  # noqa: BLE001 - what is looked for
        yield describe("reading", error)
        return
    for name in FORMATS:
        yield from _draw(name, lambda name=name: _text_of(report, name, path))
    if kind == "bench":
        yield from _draw("--compare", lambda: read_compared(path, 8) and "")
        if dice.random() < PLOT_SHARE:
            suffix = dice.choice([".svg", ".html"])
            yield from _draw(suffix, lambda: figure.render_plot(report, suffix).decode())


def _read_checkpoint(path: Path) -> Report:
    from ddpdoctor.probes.checkpoints import CheckpointOptions, read_checkpoints

    seen = read_checkpoints(CheckpointOptions(paths=(path,)), lambda _: None)
    return checkpoint_report(seen, ("ddpdoctor", "check-checkpoint", str(path)), STARTED)


def _text_of(report: Report, name: Any, path: Path) -> str:
    stream = io.StringIO()
    show_report(report, name, stream, path, fail_on=Severity.ERROR)
    return stream.getvalue()


def _draw(name: str, draw: Callable[[], str]) -> Iterator[str]:
    """Yield what fell as something was drawn, or what is wrong with it. A refusal is an answer."""
    try:
        drawn = draw()
    except UserError:
        return
    except Exception as error:  # noqa: BLE001 - what is looked for
        yield describe(name, error)
        return
    yield from check_output(name, drawn)


def check_output(name: str, text: str) -> Iterator[str]:
    """Yield what a terminal, a browser or a parser would mind in a report."""
    plain = text.replace("\n", "")
    if not plain.isprintable():
        odd = sorted({char for char in plain if not char.isprintable()})
        yield f"{name} shows {', '.join(f'U+{ord(char):04X}' for char in odd[:5])}"
    if name == "markdown":  # within a block of code nothing is markup
        text = re.sub(r"^```text\n(.|\n)*?\n```$|^    .*$|`[^`\n]*`", "", text, flags=re.MULTILINE)
    own = 1 if name in {"html", ".html"} else 0  # the page's one script
    if name in {"markdown", "html", ".svg", ".html", "junit"} and text.count(MARKUP) > own:
        yield f"{name} lets markup through"
    if name == "github" and not all(line.startswith("::") for line in text.splitlines()):
        yield "github has a line that is no command"
    if name == "sarif":
        try:
            json.loads(text)
        except ValueError as error:
            yield f"sarif is no JSON: {error}"
    if name in {"junit", ".svg"}:
        try:
            ET.fromstring(text.encode())
        except ET.ParseError as error:
            yield f"{name} is no XML: {error}"


def describe(where: str, error: Exception) -> str:
    """Return an error by its kind and the line of ours that it came from."""
    link, place = error.__traceback__, "?"
    while link is not None:
        file = link.tb_frame.f_code.co_filename
        if "ddpdoctor" in file:
            place = f"{file.rpartition('ddpdoctor/')[2]}:{link.tb_lineno}"
        link = link.tb_next
    return f"{where}: {type(error).__name__} at {place}"
