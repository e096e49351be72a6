"""The example that the README wraps: it learns, it resumes, and it leaves the checkpoints it should."""

import re
from pathlib import Path

from tests import forking
from tests.scenarios.running import clean_environment, free_port

TRAIN = Path(__file__).parents[2] / "docs" / "examples" / "train.py"
EXIT_ABORT = "terminate called without an active exception"
EPOCH = re.compile(r"^epoch (\d+)/(\d+)  loss ([\d.]+)  accuracy ([\d.]+)$", re.MULTILINE)


def run(*arguments: str, launcher: str = "as torchrun") -> list[tuple[str, ...]]:
    """Run the example by torchrun, on ranks as torchrun makes them, or alone; return what it printed of each epoch."""
    # On a machine with GPUs too: fewer GPUs than ranks would be another test.
    job = clean_environment(CUDA_VISIBLE_DEVICES="")
    words, ranks = (str(TRAIN), *arguments), ({},)
    if launcher == "torchrun":
        words = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *words)
    elif launcher == "as torchrun":
        job |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = ({"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1", "LOCAL_RANK": "1"})
    started = [forking.start(*words, env=job | rank) for rank in ranks]
    ended = [process.communicate(timeout=forking.LIMIT_S) for process in started]
    for process, (_, stderr) in zip(started, ended, strict=True):
        # After its last line a job on Gloo is aborted now and then, while the interpreter ends: see exit-abort (DD612).
        assert process.wait() == 0 or EXIT_ABORT in stderr, stderr
    return [row for stdout, _ in ended for row in EPOCH.findall(stdout)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_job_ends_where_an_unbroken_one_does_and_keeps_as_many_checkpoints_as_asked(tmp_path: Path) -> None:
    unbroken = run("--epochs", "4", "--checkpoint-dir", str(tmp_path / "unbroken"), launcher="torchrun")
    first = run("--epochs", "2", "--checkpoint-dir", str(tmp_path / "broken"))
    second = run("--epochs", "4", "--checkpoint-dir", str(tmp_path / "broken"), "--resume", "--keep", "1")

    assert [row[0] for row in unbroken] == ["1", "2", "3", "4"]
    assert [row[0] for row in second] == ["3", "4"]
    # Loss and accuracy to the digit: dropout draws from the restored random state.
    assert [row[2:] for row in first + second] == [row[2:] for row in unbroken]
    assert float(unbroken[-1][3]) > 0.9
    assert names(tmp_path / "unbroken") == ["epoch-0003.pt", "epoch-0004.pt"]
    assert names(tmp_path / "broken") == ["epoch-0004.pt"]
    holds_all_that_a_resumed_job_needs(tmp_path / "broken" / "epoch-0004.pt")


def holds_all_that_a_resumed_job_needs(checkpoint: Path) -> None:
    import torch

    state = torch.load(checkpoint, weights_only=True)
    assert state["epochs_done"] == 4
    assert len(state["rng_states"]) == 2
    assert not any(name.startswith("module.") for name in state["model"])
    assert {"model", "optimizer", "scaler"} <= set(state)


def test_one_process_without_a_launcher_and_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    rows = run("--epochs", "1", "--checkpoint-dir", str(tmp_path), "--resume", launcher="")

    assert [row[0] for row in rows] == ["1"]
