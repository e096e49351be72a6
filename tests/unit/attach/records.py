"""Records of what attach saw, for tests."""

from ddpdoctor.model.attached import RankBy, SeenRank


def seen_rank(pid: int, rank: int) -> SeenRank:
    """Return a rank of a job of torchrun."""
    return SeenRank(
        pid=pid, namespace_pid=None, start_ticks=1, rank=rank, rank_by=RankBy.ENVIRONMENT, local_rank=0, world_size=2,
        node_rank=0, restart_count=0, launcher="torchrun", parent_pid=1, command="python", user="me", wrap_folder=None,
        variables={},
    )  # fmt: skip
