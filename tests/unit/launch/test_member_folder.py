"""Each member of a job has a run folder of its own, also on a file system that all see, and at each start."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from ddpdoctor.launch.command.placement import Placement
from ddpdoctor.launch.folders.member_folder import MemberFolder, Starter, make_member_folder
from ddpdoctor.model.errors import UserError

NOW = datetime(2026, 3, 4, 5, 6, 7)  # noqa: DTZ001  a name, not a moment
JOB = {"SLURM_JOB_ID": "12"}
AGAIN = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def make(asked: Path | None, number: int | None = 0, *, most: int = 3, host: str = "h", **more: object) -> MemberFolder:
    env = more.pop("env", {})
    starter = Starter(
        script="train.py", is_module=False, command=("ddpdoctor", "wrap", "train.py"), host=host,
        env=env, now=NOW,
    )  # fmt: skip
    return make_member_folder(asked, Placement(number=number, expected=most, most=most, **more), starter)


def leave_run(folder: Path, env: dict[str, str], host: str = "h") -> None:
    """Leave what ``wrap`` writes first."""
    run = {"environment": env, "host": host, "command": ["ddpdoctor", "wrap", "train.py"]}
    (folder / "run.json").write_text(json.dumps(run))


def seen(base: Path, made: MemberFolder) -> tuple[str, str]:
    return str(made.folder.relative_to(base)), str(made.report.relative_to(base))


def test_members_share_a_folder_without_a_clash(tmp_path):
    for number in (2, 0, 1):
        made = make(tmp_path / "run", number)
        own = f"nodes/{number}" if number else "."
        report = f"node-{number}.json" if number else "report.json"
        assert seen(tmp_path / "run", made) == (own, report)
        assert made.folder.stat().st_mode & 0o777 == 0o700
        leave_run(made.folder, {})
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_one_node_has_the_folder_that_was_asked_for(tmp_path):
    assert seen(tmp_path, make(tmp_path / "run", most=1)) == ("run", "run/report.json")


@pytest.mark.parametrize("number", [0, 1])
def test_another_run_is_left_alone(tmp_path, number):
    leave_run(make(tmp_path, number).folder, {})
    with pytest.raises(UserError, match="already holds another run"):
        make(tmp_path, number)


@pytest.mark.parametrize("number", [0, 1])
def test_another_job_is_left_alone_by_all_its_members(tmp_path, number):
    leave_run(make(tmp_path).folder, {"SLURM_JOB_ID": "11"})
    with pytest.raises(UserError, match="already holds another run"):
        make(tmp_path, number, env=AGAIN)


def test_members_without_a_number_are_called_by_their_host(tmp_path):
    assert seen(tmp_path, make(tmp_path, None, host="n 1")) == ("nodes/n_1", "node-n_1.json")


def test_members_without_a_number_on_one_host(tmp_path):
    made = [make(tmp_path, None, one_host=True) for _ in range(3)]
    assert [seen(tmp_path, one) for one in made] == [
        (".", "report.json"), ("nodes/h", "node-h.json"), ("nodes/h-2", "node-h-2.json"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_a_job_that_was_requeued_has_a_folder_beside_its_former_start(tmp_path, number, shared):
    for member in (0, 1) if shared else (number,):
        leave_run(make(tmp_path, member, env=JOB).folder, JOB)
    # Whoever comes first, the others choose alike.
    if shared:
        leave_run(make(tmp_path, 1 - number, env=AGAIN).folder, AGAIN)
    made = make(tmp_path, number, env=AGAIN)
    assert made.folder == tmp_path / "restart-1" / ("nodes/1" if number else "")
    assert made.report.parent == tmp_path / "restart-1"
    third = make(tmp_path, number, env=AGAIN | {"SLURM_RESTART_COUNT": "2"})
    assert third.folder == tmp_path / "restart-2" / ("nodes/1" if number else "")


def test_a_requeued_job_on_new_hosts_needs_no_folder_beside(tmp_path):
    assert make(tmp_path, env=AGAIN).folder == tmp_path


def test_a_second_step_of_one_job_is_another_run(tmp_path):
    leave_run(make(tmp_path, env=AGAIN).folder, AGAIN)
    with pytest.raises(UserError, match="already holds another run"):
        make(tmp_path, env=AGAIN)


def test_a_container_that_is_started_again(tmp_path):
    for expected in (tmp_path, tmp_path / "restart-1", tmp_path / "restart-2"):
        made = make(tmp_path, env=POD)
        assert made.folder == expected
        leave_run(made.folder, {})
    with pytest.raises(UserError, match="already holds another run"):
        make(tmp_path, env=POD, host="another pod")


def test_a_run_that_cannot_be_read_is_another_run(tmp_path):
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(UserError, match="already holds another run"):
        make(tmp_path, env=AGAIN)


def test_by_default_members_of_a_step_find_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [make(None, number, batch_job="12.0", env=JOB) for number in (0, 1)]
    base = Path("ddpdoctor-report/slurm-12.0-train")
    assert [seen(base, one) for one in made] == [(".", "report.json"), ("nodes/1", "node-1.json")]
    leave_run(made[0].folder, {"SLURM_JOB_ID": "12"})
    # Slurm counts jobs from one again once its state was lost.
    other = make(None, 0, batch_job="12.0", env=JOB)
    assert other.folder == Path("ddpdoctor-report/20260304-050607-train")


def test_by_default_other_members_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = Path("ddpdoctor-report")
    made = [make(None, number, host="n1") for number in (0, 1, None)]
    assert [seen(base, one) for one in made] == [
        ("20260304-050607-train", "20260304-050607-train/report.json"),
        ("20260304-050607-train-node-1", "20260304-050607-train-node-1/node-1.json"),
        ("20260304-050607-train-node-n1", "20260304-050607-train-node-n1/node-n1.json"),
    ]
