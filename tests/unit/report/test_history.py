"""The history of a job, as text at 80 columns."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

from ddpdoctor.diagnose.history_sums import sum_up
from ddpdoctor.model.findings import JobStatus
from ddpdoctor.model.history import Blamed, PassSeen, Start
from ddpdoctor.report.verbs.live import plain_histories, render_history
from tests.doc_pages import DOCS

ZERO = datetime(2026, 3, 14, 10, tzinfo=timezone.utc)


def start(minutes, **changes):
    began = ZERO + timedelta(minutes=minutes)
    one = Start(
        run="run", attempt=0, status=JobStatus.FAILED, began_at=began, first_step_at=began + timedelta(minutes=1),
        last_progress_at=began + timedelta(minutes=40), ended_at=began + timedelta(minutes=41), steps=1200, hosts=2,
        passes=(PassSeen(epoch=0, steps=1000), PassSeen(epoch=1, steps=200)), first_epoch=0, code="DD605",
        kind="killed", summary="rank 3 was killed by SIGKILL", blamed=(Blamed(rank=3, host="node7"),),
    )  # fmt: skip
    return replace(one, **changes)


def history():
    stopped = start(180, status=JobStatus.INTERRUPTED, code="", summary="", blamed=(), first_epoch=1, steps=7)
    starts = [start(0), start(50), start(100, status=JobStatus.HUNG, code="DD601", kind="stuck"), stopped]
    return sum_up(("ddpdoctor", "wrap", "train.py"), starts, ZERO)


def test_one_sentence_a_table_and_the_reasons():
    shown = render_history([history()], [], width=80, color=False)
    assert shown == (
        "ddpdoctor: 4 starts in 3 h 41 min, 3 failures; rank 3 on node7 was to blame in 3\n"
        "of them; mean time between failures 55 min\n"
        "\n"
        "  #  started            ran  step  ended                           lost    lost\n"
        "     UTC                                                          steps    time\n"
        "  1  03-14 10:00:00  41 min  1200  DD605 killed, rank 3 on node7   1200  11 min\n"
        "  2  03-14 10:50:00  41 min  1200  DD605 killed, rank 3 on node7   1200  11 min\n"
        "  3  03-14 11:40:00  41 min  1200  DD601 stuck, rank 3 on node7     200  41 min\n"
        "  4  03-14 13:00:00  41 min     7  interrupted\n"
        "  lost: steps made again at most, and time from the last step to the next\n"
        "  start's first; ?: not known\n"
        "\n"
        "  1: DD605 killed, rank 3 on node7: rank 3 was killed by SIGKILL\n"
        "  2: DD605 killed, rank 3 on node7: rank 3 was killed by SIGKILL\n"
        "  3: DD601 stuck, rank 3 on node7: rank 3 was killed by SIGKILL\n"
    )
    assert f"```\n{shown.partition(chr(10) * 2 + '  1: ')[0]}\n```" in (DOCS / "history.md").read_text()


def test_as_an_object_it_has_what_each_start_cost():
    plain = plain_histories([history()], ["x: damaged"])
    assert (plain["format"], plain["version"], plain["unread"]) == ("ddpdoctor-history", 1, ["x: damaged"])
    (job,) = plain["jobs"]
    assert [one["lost_s"] for one in job["starts"]] == [660.0, 660.0, 41 * 60.0, None]
    assert [one["lost_steps"] for one in job["starts"]] == [1200, 1200, 200, None]
    assert job["starts"][0]["began_at"] == "2026-03-14T10:00:00+00:00"
    assert job["returning"] == [{"rank": 3, "host": "node7", "times": 3}]


def test_several_jobs_have_their_command_lines_and_what_was_not_read_is_said():
    shown = render_history([history(), history()], ["runs/x: it is \x1b damaged"], width=None, color=False)
    assert shown.count("ddpdoctor wrap train.py\n") == 2
    assert shown.endswith("not read: runs/x: it is \\x1b damaged\n")
