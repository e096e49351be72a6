"""The documents agree with the code: rule pages with docstrings, verb pages with the options there are."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpdoctor.cli.listing import VERBS
from ddpdoctor.model.exit_status import MEANINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def written_pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def read_help(verb: str) -> str:
    command = [sys.executable, "-m", "ddpdoctor", verb, "--help"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200, cwd=ROOT, env=environment)
    own, _, _ = done.stdout.partition("torchrun's options, passed on")
    # Only what starts a line is an option of the verb; the sentences may name others.
    return "\n".join(line for line in own.splitlines() if line.startswith("  -"))


def test_rule_pages_are_their_docstrings() -> None:
    generate = load_generator()
    from ddpdoctor.rules.registry import all_rules

    assert generate.find_drift(generate.render_pages(all_rules()), DOCS / "rules") == [], "run: python docs/generate.py"


def test_drift_is_seen_and_mended(tmp_path: Path) -> None:
    generate = load_generator()
    wanted = {"a.md": "A", "b.md": "B"}
    (tmp_path / "a.md").write_text("changed")
    (tmp_path / "old.md").write_text("of a code that is gone")

    drift = generate.find_drift(wanted, tmp_path)
    assert drift == ["a.md", "b.md", "old.md"]
    generate.write_pages(wanted, drift, tmp_path)
    assert generate.find_drift(wanted, tmp_path) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_page_has_every_option_of_the_verb(verb: str) -> None:
    page = (DOCS / f"{verb}.md").read_text()
    options = set(OPTION.findall(read_help(verb))) - {"--help"}

    assert options <= set(OPTION.findall(page))


@pytest.mark.parametrize("path", written_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]

    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_page_of_exit_statuses_names_each() -> None:
    page = (DOCS / "exit-status.md").read_text()

    assert "".join(f"| {status.value} | {meaning} |\n" for status, meaning in MEANINGS.items()) in page


def test_readme_has_the_command_that_ci_runs() -> None:
    assert "<!-- ci: test -->\n```sh\npython3 -m venv .venv && " in (ROOT / "README.md").read_text()


def test_no_other_module_has_numbers_for_exit_statuses() -> None:
    forms = (r"\bstatus=[1-9]", r"\bsys\.exit\([1-9]", r"\bos\._exit\([1-9]", r"\bExit\([0-9]", r"^[A-Z_]*STATUS = \d")
    numbers = re.compile("|".join(forms), re.MULTILINE)
    modules = [path for path in (ROOT / "ddpdoctor").rglob("*.py") if path.name != "exit_status.py"]

    assert {str(path): numbers.findall(path.read_text()) for path in modules if numbers.search(path.read_text())} == {}


def test_each_code_that_a_page_names_is_a_rule() -> None:
    from ddpdoctor.rules.registry import all_rules

    named = {(code, path.name) for path in written_pages() for code in re.findall(r"\bDD\d{3}\b", path.read_text())}

    assert {(code, page) for code, page in named if code not in {rule.code for rule in all_rules()}} == set()
