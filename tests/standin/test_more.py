"""The other tests of ``tests/gpu`` that run on the stand-in."""

import pytest

from tests.gpu.test_hangs import test_early_exit, test_mixed_backend_objects
from tests.gpu.test_healthy import test_mixed_backend_healthy, test_slow_kernel

pytestmark = [pytest.mark.standin, pytest.mark.full]
