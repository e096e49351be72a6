"""The user's own functions: found, called, and reported of where they fail."""

import sys

import pytest

from ddpdoctor.model.errors import UserError
from ddpdoctor.probes.checkpoint.session import read_expected
from ddpdoctor.probes.user_code import load_callable, users_turn

CODE = """
import sys
number = 3
class Maker:
    @staticmethod
    def make(): return "made"
def make():
    print("to stdout")
    return sys.argv
def fail():
    raise ValueError("no such folder\\nand more")
def configured(config): return config
def leave(): sys.exit(4)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "users_module.py").write_text(CODE)
    (tmp_path / "users_broken.py").write_text("x = 1\nimport no_such_package_of_anybody\n")
    (tmp_path / "users_wrong.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "users_leaving.py").write_text("raise SystemExit(2)\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("project")
def test_functions_and_methods_of_the_working_directory_are_found():
    assert load_callable("users_module:Maker.make", "--dataset")() == "made"


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("users_module", "which is not package.module:function", "imported from here"),
        ("users_module.py:make", "which is not package.module:function", "users_module:make"),
        ("./src/train.py", "which is no", "src.train:function"),
        ("no_such_module:make", "there is no module no_such_module", "Modules are searched"),
        ("users_module:mak", "users_module has no mak", "Did you mean make?"),
        ("users_module:Maker.mak", "users_module.Maker has no mak", "Did you mean make?"),
        ("users_module:number", "is an int, not a function", "package.module:function"),
        ("users_broken:make", "No module named 'no_such_package_of_anybody'", "users_broken.py:2"),
        ("users_wrong:make", "SyntaxError", "users_wrong.py:2"),
        ("users_leaving:make", "it ended the process (SystemExit: 2)", "users_leaving.py:1"),
    ],
)
def test_what_cannot_be_found_is_reported_with_what_to_do(name, message, hint):
    with pytest.raises(UserError) as raised:
        load_callable(name, "--dataset")
    assert message in raised.value.message
    assert raised.value.message.startswith("--dataset")
    assert hint in raised.value.help
    assert raised.value.status == 2


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("name", "message"), [("fail", "it failed: ValueError: no such folder"), ("leave", "SystemExit: 4")]
)
def test_an_error_is_reported_by_its_first_line_and_the_users_own(name, message):
    function = load_callable(f"users_module:{name}", "--dataset")
    with pytest.raises(UserError, match="it failed") as raised, users_turn("it failed"):
        function()
    assert raised.value.message.endswith(message) or message in raised.value.message
    assert f"in {name}" in raised.value.help


@pytest.mark.usefixtures("project")
def test_a_call_that_does_not_fit_the_function_has_no_line_of_ours():
    with pytest.raises(UserError, match="positional argument") as raised:
        read_expected("users_module:configured")
    assert not raised.value.help


@pytest.mark.usefixtures("project")
def test_stdout_and_the_command_line_are_not_the_functions(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddpdoctor", "check-data", "--epochs", "2"])
    with users_turn("it failed"):
        seen = load_callable("users_module:make", "--dataset")()
    assert seen == ["ddpdoctor"]
    assert sys.argv[1] == "check-data"
    assert capsys.readouterr() == ("", "to stdout\n")
