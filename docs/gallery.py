"""The reports of the gallery and the pictures in docs/images: made from what the tests keep.

python docs/gallery.py FOLDER        write the page of each report; Sphinx does this for the site
python docs/gallery.py --pictures    draw docs/images/verdict*.svg, and with Chromium docs/images/report.png
"""

from __future__ import annotations

import html
import json
import lzma
import re
import sys
import tarfile
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the tests are not installed
    sys.path.append(str(ROOT))

from ddpdoctor.collect.gpus import read_gpu_facts
from ddpdoctor.collect.launch import read_process
from ddpdoctor.collect.system import ReadingPlan, read_node
from ddpdoctor.diagnose.job import rebuild_report
from ddpdoctor.diagnose.machines import CheckEnvOptions, build_checkup
from ddpdoctor.model.node import SECTIONS, Fleet
from ddpdoctor.report.formats import parse_report, render_json
from ddpdoctor.report.html.page import render_html
from ddpdoctor.report.text import render_text
from ddpdoctor.rules.registry import rules_of
from tests.machines import shared_machine
from tests.nvml import load_nvml

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

DATA = ROOT / "tests" / "data"
IMAGES = ROOT / "docs" / "images"
RUNS = {
    "hang": "stuck-after-thread-error.4",
    "mismatch": "mismatch-skipped.2",
    "crash": "crash-evaluation.2",
    "drift": "replicas-wrong-loaded.2",
    "nan": "nonfinite-backward.3",
    "slow-rank": "speed-straggler-larger-batch.2",
    "same-data": "data-shared-badly.3",
    "healthy": "speed-quiet-small.2",
}
"""How the name of a run in tests/data/kept begins, by the name of its report in the gallery."""
HOME = "/home/ada/project"
WIDE, NARROW = 100, 44
"""Columns of the pictures: on a screen, and on a phone."""
COLUMN, LINE, MARGIN, BAR = 8.4, 19, 18, 30
"""Pixels of the pictures: a character, a line, the space around the text, and the bar above it."""
LINK = re.compile(r"\x1b\]8;.*?\x1b\\")
COLORS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#76e3ea"}
NO_BREAK = "\N{NO-BREAK SPACE}"  # several plain spaces would be drawn as one
TEXT, BACKGROUND = "#e6edf3", "#14191f"


@cache
def read_reports() -> dict[str, Report]:
    """Return the ten reports by name."""
    jobs = {name: read_run(next((DATA / "kept").glob(f"{start}.*"))) for name, start in RUNS.items()}
    bench = parse_report(lzma.decompress((DATA / "pages" / "allreduce-bench.json.xz").read_bytes()).decode())
    bench = replace(bench, command=("ddpdoctor", *bench.command[1:]))
    return {**jobs, "allreduce-bench": bench, "check-env": check_machine()}


def read_run(path: Path) -> Report:
    """Judge a kept run as today's ddpdoctor does, and name its files as a user's."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as packed:
        packed.extractall(folder, filter="data")
        report = rebuild_report(Path(folder))
        about = json.loads(Path(folder, "about.json").read_text(encoding="utf-8"))
    text = re.sub(r"  # (?:FAULT|SKIPPED)\b", "", render_json(report).replace(about["tmp"], f"{HOME}/run"))
    text = re.sub(r"/(?:home|root)_+/tests/scenarios/jobs(?:/speed)?", HOME, text)
    script, _, ranks, arguments, _ = about["command"]
    file = next((Path(word).name for word in report.command if word.endswith(".py") and "__main__" not in word), script)
    options = ["--nproc-per-node", str(ranks), *(word for word in report.command if word == "--speed")]
    words = (word for word in arguments if "{tmp}" not in word)
    return replace(parse_report(text), command=("ddpdoctor", "wrap", *options, file, *words))


def check_machine() -> Report:
    """Check a recorded machine with eight GPUs and four faults."""
    machine = shared_machine("nvlink8", "ib-down", "xid", "memlock-low")
    node = read_node(machine, ReadingPlan(sections=frozenset(SECTIONS)), (read_process(machine),))
    *_, gpus = read_gpu_facts(load_nvml("nvlink8"), machine)
    options = CheckEnvOptions(command=("ddpdoctor", "check-env"))
    fleet = Fleet(nodes=(replace(node, gpus=gpus),))
    report = build_checkup(fleet, rules_of("environment"), options, "2026-03-14T10:15:00.000+00:00", machine.env)
    return replace(report, ended_at="2026-03-14T10:15:04.000+00:00")


def write_pages(folder: Path) -> None:
    """Write the page of each report."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in read_reports().items():
        (folder / f"{name}.html").write_text(render_html(report), encoding="utf-8")


def show_card(name: str) -> str:
    """Return a small picture of a report's page, which is the page itself, and a link with the report's first line."""
    line = render_text(read_reports()[name], width=None, color=False, run_dir=None).partition("\n")[0]
    page = f"gallery/{name}.html"
    window = f'<iframe src="{page}" loading="lazy" scrolling="no" tabindex="-1" aria-hidden="true"></iframe>'
    words = html.escape(line.removeprefix("ddpdoctor: "))
    return f'<div class="live"><div>{window}</div><a href="{page}">{words}</a></div>'


def draw_terminal(command: str, text: str, columns: int) -> str:
    """Draw a terminal with a command and what it printed, with its colors and without its links."""
    lines = [f"\x1b[32m$\x1b[0m {command}", *LINK.sub("", text).rstrip().splitlines()]
    width, height = round(columns * COLUMN + 2 * MARGIN), BAR + len(lines) * LINE + MARGIN
    dots = "".join(
        f'<circle cx="{MARGIN + 18 * number}" cy="16" r="5.5" fill="{color}"/>'
        for number, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    rows = "".join(
        f'<text x="{MARGIN}" y="{BAR + LINE * number + 16}">{_draw_line(line)}</text>\n'
        for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>{dots}\n'
        f'<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14" '
        f'fill="{TEXT}">\n{rows}</g>\n</svg>\n'
    )


def _draw_line(line: str) -> str:
    """Return the pieces of a line. Each has its place and its length, so that every font fits."""
    drawn, column = "", 0
    for codes, piece in re.findall(r"(?:\x1b\[([\d;]*)m)?([^\x1b]*)", line):
        style = codes.split(";")
        fill = next((f' fill="{COLORS[code]}"' for code in style if code in COLORS), "")
        weight = ' font-weight="bold"' if "1" in style else ""
        if piece.strip():
            at = MARGIN + COLUMN * (column + len(piece) - len(piece.lstrip()))
            length = COLUMN * len(piece.strip())
            drawn += (
                f'<tspan x="{at:.1f}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"{fill}{weight}>'
                f"{html.escape(piece.strip()).replace(' ', NO_BREAK)}</tspan>"
            )
        column += len(piece)
    return drawn


def draw_verdicts() -> dict[str, str]:
    """Return the pictures of a hang's report in a terminal, by the name of their files. That for a phone has gaps."""
    report = read_reports()["hang"]
    command = " ".join(report.command)
    wide, narrow = (
        render_text(report, width=width, color=True, run_dir=None, cwd=Path(HOME)) for width in (WIDE, NARROW)
    )
    *parts, verdict = narrow.split("\n\n")
    code, *lines = verdict.splitlines()
    fix = next(at for at, line in enumerate(lines) if "to do" in line)
    cut = "\n\n".join([*parts[:2], "\n".join([code, "  ...", *lines[fix:]])])
    return {
        "verdict.svg": draw_terminal(command, wide, WIDE),
        "verdict-narrow.svg": draw_terminal(command, cut, NARROW),
    }


def draw_page(path: Path) -> None:
    """Take a picture of a hang's page in Chromium."""
    from tests.browser import started_browser

    with tempfile.TemporaryDirectory() as folder, started_browser() as browser:
        write_pages(Path(folder))
        browser.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        browser.open(Path(folder, "hang.html"), 1100, 1380)
        browser.driver.save_screenshot(str(path))


def main(words: list[str]) -> None:
    """Write the pages, or the pictures."""
    if words == ["--pictures"]:
        for name, picture in draw_verdicts().items():
            (IMAGES / name).write_text(picture, encoding="utf-8")
        draw_page(IMAGES / "report.png")
    elif len(words) == 1 and not words[0].startswith("-"):
        write_pages(Path(words[0]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
