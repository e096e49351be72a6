"""Pages of the documentation agree with the code."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest

from ddpdoctor.cli.options import VERBS, Option, declared_by, load_verb
from ddpdoctor.diagnose.bundle import DATA_KEYS
from ddpdoctor.diagnose.live import STATUSES
from ddpdoctor.model.errors import MEANINGS
from ddpdoctor.model.live import COMMON_LABELS, METRICS
from ddpdoctor.report.blocks import BUILDERS
from tests import doc_pages, doc_runs

# docs/agents.md is short, and the commands, options and fields that it names are there.


ROOT = Path(__file__).parents[2]
PACKAGES = [*(path.parent.name for path in (ROOT / "ddpdoctor").glob("*/__init__.py")), "tests"]
PAGE = (ROOT / "docs" / "agents.md").read_text()
SCHEMA = json.loads((files("ddpdoctor.report") / "schema.json").read_text(encoding="utf-8"))
COMMANDS = re.findall(r"`ddpdoctor ([a-z-]+)([^`]*)`", PAGE)
FIELDS = re.findall(r"`((?:verdict|job)\.[a-z_.\[\]0-9]+)`", PAGE)


@pytest.mark.parametrize(("verb", "words"), COMMANDS)
def test_a_command_has_the_options_that_it_is_given(verb, words):
    assert verb in VERBS
    declared = declared_by(load_verb(verb).Options)
    known = {name for one in declared if isinstance(one.option, Option) for name in one.names}
    assert {word for word in words.split() if word.startswith("--")} <= known


def test_it_is_short_and_its_fields_are_in_the_schema():
    assert len(PAGE.splitlines()) <= 60
    assert {verb for verb, _ in COMMANDS} >= {"attach", "report", "analyze", "wrap", "explain", "check-env"}
    known = {"verdict": SCHEMA["$defs"]["finding"]["properties"], "job": SCHEMA["$defs"]["job"]["properties"]}
    holders = [re.split(r"[.\[]", path)[:2] for path in FIELDS]
    assert len(holders) > 5
    assert [(holder, name) for holder, name in holders if name not in known[holder]] == []


# docs/json.md describes the schema: the same fields, the same values, and the data of each verb.


JSON_PAGE = (ROOT / "docs" / "json.md").read_text()
OBJECTS = {
    "The report": SCHEMA, "A job": SCHEMA["$defs"]["job"], "A finding": SCHEMA["$defs"]["finding"],
    "A place": SCHEMA["$defs"]["place"], "A check": SCHEMA["$defs"]["check"], "A rank": SCHEMA["$defs"]["rankRow"],
}  # fmt: skip
"""The objects of the schema, by the heading under which the page describes them."""
NAME = re.compile(r"`([\w-]+)`")


def section(title):
    return JSON_PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title):
    """Return the cells of the rows of a section's table."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


@pytest.mark.parametrize("title", OBJECTS)
def test_the_page_has_the_fields_of_the_schema_and_no_others_and_every_value(title):
    properties = OBJECTS[title]["properties"]
    assert sorted(name for cells in rows(title) for name in NAME.findall(cells[0])) == sorted(properties)
    values = {value for one in properties.values() for value in one.get("enum", ()) if value is not None}
    assert values <= set(NAME.findall(section(title)))


def test_the_page_has_the_version_of_the_schema_and_the_data_of_each_verb():
    version = SCHEMA["properties"]["schema_version"]["const"]
    assert [cells[1].strip() for cells in rows("The report") if "schema_version" in cells[0]] == [str(version)]
    named = {name for cells in rows("What `data` holds") for name in NAME.findall(cells[1])}
    assert DATA_KEYS | BUILDERS.keys() <= named
    for verb in VERBS:
        formats = [get_args(one.type) for one in declared_by(load_verb(verb).Options) if one.field == "format"]
        assert not any("json" in choices for choices in formats) or f"[{verb}]({verb}.md)" in JSON_PAGE, verb


# The page of metrics and the dashboard have the metrics of the code.


DOCS = ROOT / "docs"
UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio", "": ""}
LABELS = {*COMMON_LABELS, *(label for one in METRICS for label in one.labels)}


def test_the_page_has_each_metric_with_its_labels_and_meaning():
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(ddpdoctor_\w+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(one.name, ", ".join(f"`{label}`" for label in one.labels), one.help) for one in METRICS]
    assert all(f"`{status.value}`" in page for status in STATUSES)


def test_names_have_the_prefix_and_end_with_their_unit():
    assert all(one.name.startswith("ddpdoctor_") and one.name.endswith(UNITS[one.unit]) for one in METRICS)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist():
    dashboard: dict[str, Any] = json.loads((DOCS / "examples" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"ddpdoctor_\w+", query)}
    assert asked == {one.name for one in METRICS}
    legends = "".join(target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"])
    assert set(re.findall(r"{{(\w+)}}", legends)) <= LABELS
    by = ", ".join(re.findall(r"(?:by|on) \(([^)]*)\)", " ".join(queries)))
    assert set(by.split(", ")) <= LABELS
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# The documents agree with the code: rule pages with docstrings, verb pages with the options there are.


LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def written_pages():
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def test_drift_is_seen_and_mended(tmp_path):
    generate = doc_pages.load_script("generate")
    wanted = {"a.md": "A", "b.md": "B"}
    (tmp_path / "a.md").write_text("changed")
    (tmp_path / "old.md").write_text("of a code that is gone")
    drift = generate.find_drift(wanted, tmp_path)
    assert drift == ["a.md", "b.md", "old.md"]
    generate.write_pages(wanted, drift, tmp_path)
    assert generate.find_drift(wanted, tmp_path) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_page_has_every_option_of_the_verb(verb):
    declared = declared_by(load_verb(verb).Options)
    names = {
        part for one in declared if isinstance(one.option, Option) for name in one.names for part in name.split("/")
    }
    page = (DOCS / f"{verb}.md").read_text()
    has_json = any(one.field == "format" and "json" in get_args(one.type) for one in declared)
    assert {name for name in names if name.startswith("--")} <= set(OPTION.findall(page))
    assert ("`--json` is short for `--format json`" in page) is has_json


def test_links_lead_somewhere():
    targets = [(path, target) for path in written_pages() for target in LINK.findall(path.read_text())]
    assert len(targets) > 100
    assert [
        (path, target) for path, target in targets if "://" not in target and not (path.parent / target).exists()
    ] == []


MODULES = re.compile(r"`((?:ddpdoctor/)?(?:{})/[\w/]+(?:\.\w+)?)/?`".format("|".join(PACKAGES)))


SOURCE = re.compile(r"`(?:[\w-]+/)*([\w-]+(?:\.html)?\.(?:py|js|css|jinja))`")


def names_something(path):
    """Return whether a path is a folder, a file, a module, or a name in a module, below ddpdoctor or the project."""
    module, _, name = path.rpartition(".")
    for root in (ROOT, ROOT / "ddpdoctor"):
        source = root / f"{module}.py"
        if (root / path).exists() or (root / f"{path}.py").exists():
            return True
        if module and source.exists() and re.search(rf"^(?:def |class )?{name}\b", source.read_text(), re.MULTILINE):
            return True
    return False


def test_each_module_that_a_page_names_exists():
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("README.md")]
    named = {(page.name, path) for page in pages for path in MODULES.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 50
    assert not sorted((page, path) for page, path in named if not names_something(path) and "CODE" not in path)


def test_each_file_of_the_program_that_a_decision_names_exists():
    there = {path.name for folder in ("ddpdoctor", "tests", "docs") for path in (ROOT / folder).rglob("*.*")}
    pages = sorted((DOCS / "design").glob("*.md"))
    named = {(page.name, file) for page in pages for file in SOURCE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert {(page, file) for page, file in named if file not in there} == set()


def test_the_page_of_exit_statuses_names_each():
    page = (DOCS / "exit-status.md").read_text()
    assert "".join(f"| {status.value} | {meaning} |\n" for status, meaning in MEANINGS.items()) in page


def test_readme_has_the_command_that_ci_runs():
    assert "<!-- ci: test -->\n```sh\npython3 -m venv .venv && " in (ROOT / "README.md").read_text()


def test_no_other_module_has_numbers_for_exit_statuses():
    forms = (r"\bstatus=[1-9]", r"\bsys\.exit\([1-9]", r"\bos\._exit\([1-9]", r"\bExit\([0-9]", r"^[A-Z_]*STATUS = \d")
    numbers = re.compile("|".join(forms), re.MULTILINE)
    modules = [path for path in (ROOT / "ddpdoctor").rglob("*.py") if path != ROOT / "ddpdoctor/model/errors.py"]
    assert {str(path): numbers.findall(path.read_text()) for path in modules if numbers.search(path.read_text())} == {}


def test_each_code_that_a_page_names_is_a_rule():
    from ddpdoctor.rules.registry import all_rules

    named = {(code, path.name) for path in written_pages() for code in re.findall(r"\bDD\d{3}\b", path.read_text())}
    assert {(code, page) for code, page in named if code not in {rule.code for rule in all_rules()}} == set()


# The pages agree with the command line: each command that they name can be typed, and prints what they show.


BLOCKS = {f"{block.name} in {block.page.name}": block for block in doc_pages.blocks()}
DRAWN = [key for key, block in BLOCKS.items() if doc_runs.is_drawn(block.name)]
QUICK = [
    key
    for key, block in BLOCKS.items()
    if key not in DRAWN and block.name not in doc_runs.OF_DEMO and block.page.parent != doc_runs.FIRST_JOB
]


OF_A_REPORT = re.compile(
    r"\$ |ddpdoctor: |  (where|seen|to do) +\S|DD\d{3} \S|settings tried|replicas (are )?(equal|differ)"
)


def test_each_block_with_output_has_a_name():
    bare = [
        f"{page.name}: {match['body'].splitlines()[0]}"
        for page in doc_pages.pages()
        for match in doc_pages.FENCE.finditer(page.read_text())
        if not match["name"] and any(OF_A_REPORT.match(line) for line in match["body"].splitlines())
    ]
    assert bare == []


@pytest.mark.parametrize("key", DRAWN)
def test_a_recorded_run_is_drawn_as_its_page_shows_it(key):
    block = BLOCKS[key]
    drawn = doc_runs.drawn(block.name)
    assert doc_pages.differs(block.shown, drawn, doc_pages.mask_places) == "", "run: python -m tests.doc_runs --quick"


@pytest.mark.parametrize("key", QUICK)
def test_a_command_prints_what_its_page_shows(key, tmp_path, run_in):
    block = BLOCKS[key]
    printed = doc_runs.print_for(block, tmp_path, run_in)
    assert doc_pages.differs(block.shown, printed) == "", "run: python -m tests.doc_runs --quick"


def test_the_picture_of_a_terminal_shows_what_the_program_prints_today():
    gallery = doc_pages.load_script("gallery")
    shown = {name: (gallery.IMAGES / name).read_text() for name in ("verdict.svg", "verdict-narrow.svg")}
    assert gallery.draw_verdicts() == shown, "run: python docs/gallery.py --pictures"


@pytest.mark.parametrize(
    ("shown", "printed", "written"),
    [
        ("a 1\nb", "a 2\nc", "a 2\nc"),
        ("a 1\n... (more)\nb", "a 2\nx\ny\nb", "a 2\n... (more)\nb"),
        ("old\n...\nb", "new\nx\nb", "new\n...\nb"),
        ("a\n...\nold", "a\nx\nnew", "a\n...\nnew"),
        ("a\n...\nb", "a\nx\nb\nadded", "a\n...\nb\nadded"),
        ("a\n...", "a\nx\ny", "a\n..."),
    ],
)
def test_an_output_is_written_with_the_gaps_of_its_block(shown, printed, written):
    assert doc_runs.with_gaps(shown.splitlines(), printed.splitlines()) == written
    assert doc_pages.differs(written, printed) == ""


@pytest.mark.parametrize("page", doc_pages.pages(), ids=lambda path: str(path.relative_to(doc_pages.ROOT)))
def test_each_command_that_a_page_names_can_be_typed(page):
    assert [" ".join(words) for words in doc_pages.commands_of(page) if not can_be_typed(words)] == []


def can_be_typed(words):
    """Read a command line as ``ddpdoctor`` reads it; in the place of a value there may be a name for it."""
    from typer.main import get_command

    from ddpdoctor.cli.verbs import UsageError, app
    from ddpdoctor.model.errors import UserError

    words = [word for word in words if word not in {"...", "…"}]
    if not words or words[0] in {"--help", "--version", "--install-completion"}:
        return True
    verb, *rest = words
    if verb not in VERBS:
        return False
    try:
        group: Any = get_command(app)
        command = group.get_command(group.make_context("ddpdoctor", [], resilient_parsing=True), verb)
        command.make_context(verb, [word for word in rest if word not in {"--help", "-h"}])
    except UserError as error:
        return error.message.startswith("no script to run")
    except UsageError as error:
        return type(error).__name__ == "MissingParameter"
    return True


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("check-env --skip xid --deep", True), ("check-env --skipp xid", False), ("check-environment", False),
        ("wrap --nproc-per-node 8 train.py --any-option", True), ("wrap --hang-timeout never train.py", False),
        ("report RUN_DIR --format pdf", False), ("check-checkpoint", True),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_seen(line, right):
    assert can_be_typed(line.split()) is right


@pytest.mark.parametrize(
    ("shown", "printed", "first"),
    [
        ("a 1.5 ms\nb", "a 22 ms\nb", ""),
        ("a\nb", "a\nx\nb", "b"),
        ("a\n... (more)\nb", "a\nx\ny\nb", ""),
        ("a\n...", "a\nx", ""),
        ("a", "a\nx", "and then: x"),
        ("a\nrank one is stuck", "a\nrank one is stopped", "rank one is stuck"),
        ("report in ddpdoctor-demo-abc/report", "report in /tmp/ddpdoctor-demo-x_1/report", ""),
    ],
)
def test_an_output_that_differs_is_seen(shown, printed, first):
    assert doc_pages.differs(shown, printed) == first
