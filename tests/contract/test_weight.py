"""The house only gets lighter: no package has more files, code, functions or tiny functions than it ever needed."""

import json

from tests.bench import weight


def test_no_package_gets_heavier():
    held, now = json.loads(weight.HELD.read_text()), weight.weigh_all()
    assert now.keys() == held.keys()
    heavier = {
        f"{package}: {key}": f"{value}, held {held[package][key]}"
        for package, found in now.items()
        for key, value in found.items()
        if value > held[package][key]
    }
    assert not heavier, (
        "merge as much as you add: a section instead of a file, rows of a table instead of functions; "
        "`python -m tests.bench.weight` shows the figures, and `--lower` writes those that fell"
    )


def test_what_is_counted(tmp_path):
    (tmp_path / "one.py").write_text(
        '"""Two\nlines."""\nimport json\nfrom os import (\n    path,\n)\n\n# why\nA = 1  # code\n\n\n'
        'def used_once():\n    """Doc."""\n    return json\n\n\ndef used_twice():\n    return used_once() or path\n\n\n'
        "class C:\n    def long(self):\n        return [\n"
        + "            used_twice,\n" * 9
        + "        ]\n\n\nB = C().long\n"
    )
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "two.py").write_text("def never_named():\n    pass\n")
    assert weight.weigh(tmp_path) == {"files": 2, "code": 21, "functions": 4, "tiny": 1}
