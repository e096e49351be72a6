"""A defect in a tool of the server is an error that says where the traceback is, and shows none."""

import tempfile

import pytest
from mcp.server.mcpserver.exceptions import ToolError

from ddpdoctor.cli.mcp_server import _answer


def test_a_defect_is_an_error_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ToolError) as error:
        _answer(lambda: {}["gone"])
    assert "internal error in ddpdoctor: KeyError" in str(error.value)
    assert "github.com/ddpdoctor" in str(error.value)
    assert "Traceback" not in str(error.value)
    (saved,) = tmp_path.glob("ddpdoctor-defect-*.txt")
    assert "KeyError" in saved.read_text()
    assert str(saved) in str(error.value)
