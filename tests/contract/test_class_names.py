"""One class name means one thing in all of ddpdoctor."""

import ast
from collections import Counter
from pathlib import Path

import ddpdoctor

ONE_A_VERB = {"Options"}


def test_no_two_classes_have_one_name():
    names = Counter(
        node.name
        for path in Path(ddpdoctor.__file__).parent.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(names) > 300
    assert {name for name, count in names.items() if count > 1} == ONE_A_VERB
