"""What a tool of the server says of a defect, and of a call that takes too long."""

import tempfile

import pytest
from mcp.server.mcpserver.exceptions import ToolError

from ddpdoctor.cli.mcp_server import _ask
from ddpdoctor.cli.mcp_tools import answer


def test_a_defect_is_an_error_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    error = answer("report", {"another": 3})["error"]
    assert "internal error in ddpdoctor: TypeError" in error
    assert "github.com/ddpdoctor" in error
    assert "Traceback" not in error
    (saved,) = tmp_path.glob("ddpdoctor-defect-*.txt")
    assert "TypeError" in saved.read_text()
    assert str(saved) in error


def test_a_call_that_takes_too_long_is_stopped_and_says_what_to_do():
    with pytest.raises(
        ToolError, match=r"explain had no answer within 0.0 s and was stopped\nGive fewer or smaller files"
    ):
        _ask(0.0, "explain", name="DD601")
