"""What CI runs on the stand-in: one scenario of each kind."""

import pytest

from tests.gpu.test_faults import test_fault, test_gone, test_trains
from tests.gpu.test_hangs import test_sleeper_detail, test_sleeper_off
from tests.gpu.test_healthy import test_kernels, test_sleeper_detail_healthy, test_sleeper_healthy

pytestmark = pytest.mark.standin
