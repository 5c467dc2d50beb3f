"""First on a test process's path: its wall clock is off by so many seconds. Its monotonic clock is right."""

import os
import time

_real = time.time
_shift_s = float(os.environ["VLM_TEST_CLOCK_SHIFT_S"])
time.time = lambda: _real() + _shift_s
