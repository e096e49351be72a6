"""What a report says of checkpoint files that were read."""

import pytest

from ddpdoctor.diagnose.checkpoints import checkpoint_report
from ddpdoctor.model.checkpoint import Checkpoints, Damage, FileSeen, Form, ReadState


@pytest.mark.parametrize(
    ("state", "damaged", "said"),
    [
        (ReadState.WHOLE, (), "whole"),
        (ReadState.WHOLE, (Damage(record="data/0"),), "damaged"),
        (ReadState.CUT, (Damage(record="data/0"),), "cut off"),
    ],
)
def test_a_file_with_a_wrong_checksum_is_not_called_whole(state, damaged, said):
    seen = FileSeen(path="a.pt", size_bytes=9, form=Form.ZIP, state=state, damaged=damaged)
    report = checkpoint_report(Checkpoints(files=(seen,)), ("ddpdoctor",), "2026-01-01T00:00:00Z")
    assert [one["state"] for one in report.data["files"]] == [said]
