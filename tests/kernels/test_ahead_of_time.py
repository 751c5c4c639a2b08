"""Every Triton kernel compiles for every capability that we name, without a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from zoo.kernels.ahead_of_time import SHARED_KILOBYTES, all_builds, is_quick, too_much_shared
from zoo.kernels.launch import CAPABILITIES

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_of_long_ops_a_part(capability):
    printed = compiled(capability, "--quick")
    for name in ("causal_short_conv forward", "gated_delta gradients bf16 K64 V64"):
        assert f"sm_{capability} {name}" in printed


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_at_every_width(capability):
    assert f"sm_{capability} gated_delta gradients fp32 K128 V128" in compiled(capability)


def compiled(capability, *options):
    """Return what the command prints, run in a process of its own without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    jobs = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    command = [sys.executable, "-m", "zoo.kernels.ahead_of_time", "--capability", str(capability)]
    command += ["--jobs", str(jobs), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_quick_leaves_out_only_a_part_of_long_ops():
    names = [build.name for capability in CAPABILITIES for build in all_builds(capability)]
    chosen = [name for name in names if is_quick(name)]
    assert all(name.startswith("gated_delta ") for name in set(names) - set(chosen))
    for dtype in ("bf16", "fp16", "fp32"):
        for kernel in ("solve", "walk output", "walk back output", "gradients", "step"):
            assert any(name.startswith(f"gated_delta {kernel} {dtype}") for name in chosen), (kernel, dtype)


def test_more_shared_memory_than_a_program_may_have_is_a_failure():
    assert too_much_shared(99 * 1024, 89) == ""
    assert "FAILED at launch: 1 B" in too_much_shared(99 * 1024 + 1, 120)
    assert set(SHARED_KILOBYTES) == set(CAPABILITIES)
