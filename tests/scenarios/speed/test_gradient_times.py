"""It is recorded on real ranks when each gradient is ready, in which buckets they go out, and what is unused."""

from itertools import pairwise
from pathlib import Path

import pytest

from ddpdoctor.collect.rank.gradient_times import read_gradient_times
from ddpdoctor.collect.rank.rings import read_rings
from ddpdoctor.model.gradient_times import GradientTimes
from tests.scenarios.running import PATIENT, run

pytestmark = pytest.mark.usefixtures("preloaded_python")

SLEEP_MS = 10.0
WEIGHT_BYTES, BIAS_BYTES = 16 * 16 * 4, 16 * 4


def recorded(unused: str, folder: Path) -> list[GradientTimes]:
    """Return what the two ranks of the job recorded of their one model."""
    ran = run("gradient_times", folder, "--speed", *PATIENT, ranks=2, args=(unused,))
    assert ran.status == 0, ran.stderr
    read = [read_gradient_times(list(ring.notes)) for ring in read_rings(folder).contents.values()]
    found = [models[0] for models in read if models]
    assert [len(models) for models in read if models] == [1, 1]
    return found


def test_each_gradient_is_ready_one_layer_after_the_other(tmp_path: Path) -> None:
    for times in recorded("fixed", tmp_path):
        assert times.sizes_bytes == (WEIGHT_BYTES, BIAS_BYTES) * 5
        weights = [ready for ready in times.ready_ms[::2] if ready is not None]
        assert len(weights) == 5
        assert all(before - after >= SLEEP_MS for before, after in pairwise(weights)), times
        assert times.compute_end_ms >= weights[0] - 1
        assert times.bucket_bytes == (2 * (WEIGHT_BYTES + BIAS_BYTES),) * 2 + (WEIGHT_BYTES + BIAS_BYTES,)
        assert times.cap_bytes == int(0.002 * 2**20)
        assert (times.finds_unused, times.static_graph, times.unused_bytes) == (False, False, 0)


@pytest.mark.parametrize("unused", ["never", "changing"])
def test_a_branch_that_was_left_out_once_is_seen(unused: str, tmp_path: Path) -> None:
    for times in recorded(unused, tmp_path):
        assert (times.finds_unused, times.same_unused) == (True, unused == "never"), times
