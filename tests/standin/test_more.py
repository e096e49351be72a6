"""The other tests of ``tests/gpu`` that run on the stand-in."""

import pytest

from tests.gpu.test_allreduce_bench import test_bench_stops, test_bench_too_large, test_bench_two, test_event_stream
from tests.gpu.test_cost import test_overhead
from tests.gpu.test_faults import test_abort_at_exit, test_aborted, test_fault, test_gone, test_trains
from tests.gpu.test_hangs import test_blamed, test_pending_oldest, test_watchdog
from tests.gpu.test_healthy import test_groups_healthy, test_sleeper_healthy, test_slow_kernel
from tests.gpu.test_other_verbs import (
    test_a_loss_times_the_world_size,
    test_a_rank_that_came_too_late,
    test_a_rank_that_left_the_loop,
    test_batches_that_a_seed_does_not_repeat,
    test_check_consistency_nccl,
    test_of_one_ranks_dump_alone_no_cause_is_told,
)
from tests.gpu.test_recorder import (
    test_dropout,
    test_flight_source,
    test_gradients_healthy,
    test_gradients_nan,
    test_no_sync,
    test_replicas,
    test_replicas_healthy,
    test_straggler,
)
from tests.gpu.test_speed import test_the_budget_is_what_the_gpu_takes

pytestmark = [pytest.mark.standin, pytest.mark.full]
