"""The pages agree with the command line: each command that they name can be typed, and prints what they show."""

from pathlib import Path

import pytest

from ddpdoctor.cli.listing import VERBS
from tests import doc_pages, doc_runs

BLOCKS = {f"{block.name} in {block.page.name}": block for block in doc_pages.blocks()}
RECORDED = [key for key, block in BLOCKS.items() if doc_runs.is_recorded(block.name)]
QUICK = [key for key, block in BLOCKS.items() if key not in RECORDED and block.name not in doc_runs.OF_DEMO]


def test_each_block_with_output_has_a_name():
    bare = [
        f"{page.name}: {match['body'].splitlines()[0]}"
        for page in doc_pages.pages()
        for match in doc_pages.FENCE.finditer(page.read_text())
        if not match["name"] and any(line.startswith("$ ") for line in match["body"].splitlines())
    ]
    assert bare == []


@pytest.mark.parametrize("key", RECORDED)
def test_a_recorded_run_is_drawn_as_its_page_shows_it(key: str) -> None:
    block = BLOCKS[key]
    drawn = doc_runs.draw(doc_runs.recorded(block.name))
    assert doc_pages.differs(block.shown, drawn, doc_pages.mask_places) == "", "run: python -m tests.doc_runs"


@pytest.mark.parametrize("key", QUICK)
def test_a_command_prints_what_its_page_shows(key: str, tmp_path: Path) -> None:
    block = BLOCKS[key]
    printed = doc_runs.print_for(block, tmp_path)
    assert doc_pages.differs(block.shown, printed) == "", "run: python -m tests.doc_runs"


@pytest.mark.parametrize("page", doc_pages.pages(), ids=lambda path: str(path.relative_to(doc_pages.ROOT)))
def test_each_command_that_a_page_names_can_be_typed(page):
    assert [" ".join(words) for words in doc_pages.commands_of(page) if not can_be_typed(words)] == []


def can_be_typed(words: list[str]) -> bool:
    """Read a command line as ``ddpdoctor`` reads it; in the place of a value there may be a name for it."""
    from ddpdoctor.cli.verbs import UsageError, make_command
    from ddpdoctor.model.errors import UserError

    words = [word for word in words if word not in {"...", "…"}]
    if not words or words[0] in {"--help", "--version", "--install-completion"}:
        return True
    verb, *rest = words
    if verb not in VERBS:
        return False
    try:
        make_command(verb).make_context(verb, [word for word in rest if word not in {"--help", "-h"}])
    except UserError as error:
        return error.message.startswith("no script to run")
    except UsageError as error:
        return type(error).__name__ == "MissingParameter"
    return True


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("check-env --skip xid --deep", True),
        ("check-env --skipp xid", False),
        ("check-environment", False),
        ("wrap --nproc-per-node 8 train.py --any-option", True),
        ("wrap --hang-timeout never train.py", False),
        ("report RUN_DIR --format pdf", False),
        ("check-checkpoint", True),
    ],
)
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
