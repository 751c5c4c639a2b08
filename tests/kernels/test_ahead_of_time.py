"""Every Triton kernel compiles for every capability that we name, without a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from zoo.kernels.ahead_of_time import SHARED_KILOBYTES, too_much_shared
from zoo.kernels.launch import CAPABILITIES


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    jobs = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    command = [sys.executable, "-m", "zoo.kernels.ahead_of_time", "--capability", str(capability)]
    command += ["--jobs", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sm_{capability} causal_short_conv forward" in done.stdout


def test_more_shared_memory_than_a_program_may_have_is_a_failure():
    assert too_much_shared(99 * 1024, 89) == ""
    assert "FAILED at launch: 1 B" in too_much_shared(99 * 1024 + 1, 120)
    assert set(SHARED_KILOBYTES) == set(CAPABILITIES)
