"""Compile every Triton kernel for several GPUs without having one: ``python -m zoo.kernels.ahead_of_time``."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from zoo.kernels.launch import CAPABILITIES, KernelBuild

OPS = (
    "zoo.kernels.causal_short_conv.launch",
    "zoo.kernels.rms_norm_short_conv.launch",
    "zoo.kernels.gated_bidirectional_linear_attention.builds",
    "zoo.kernels.gated_delta_rule.builds",
)
"""Modules with a function ``builds(capability) -> list[KernelBuild]``; one that is missing is left out."""

SHARED_KILOBYTES = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Most shared memory of one program by compute capability (CUDA C++ Programming Guide, technical specifications).
Triton compiles kernels that ask for more; they fail at the first launch."""


_LONG = {
    "gated_delta": re.compile(
        r"bf16 K64 V64|bf16 K128 V128 specialized|(solve|output|states|scan|step|gradients) (fp16|fp32) K32 V32"
    )
}
"""What ``--quick`` compiles of ops whose builds take many minutes: everything at the width that matters most in bf16,
whole rows at a narrow width in the other dtypes. A wide float32 kernel takes up to a minute."""


@functools.cache
def all_builds(capability: int) -> tuple[KernelBuild, ...]:
    """Return the builds of every op that has Triton kernels; which they are may depend on the capability."""
    modules = [importlib.import_module(name) for name in OPS if importlib.util.find_spec(name) is not None]
    return tuple(build for module in modules if hasattr(module, "builds") for build in module.builds(capability))


def is_quick(name: str) -> bool:
    """Return whether ``--quick`` compiles the build of this name: all but the wide ones of ops that take long."""
    return all(not name.startswith(op) or chosen.search(name) is not None for op, chosen in _LONG.items())


def compile_one(job: tuple[int, int]) -> tuple[bool, str]:
    """Compile the build of a (capability, index into ``all_builds``); return success and one line about it."""
    capability, index = job
    build = all_builds(capability)[index]
    name = f"sm_{capability} {build.name}"
    try:
        compiled = build.compile(capability)
    except Exception as error:
        return False, f"{name}: FAILED {type(error).__name__}: {error}"
    complaint = too_much_shared(compiled.metadata.shared, capability)
    return not complaint, f"{name}: {complaint}{report(compiled)}"


def too_much_shared(found: int, capability: int) -> str:
    """Say what is wrong with the bytes of shared memory of a kernel; nothing where a program may have them."""
    most = 1024 * SHARED_KILOBYTES[capability]
    return f"FAILED at launch: {found - most} B of shared memory more than {most} B, the most; " if found > most else ""


def report(compiled: Any) -> str:
    """Return warps, shared memory, registers and stack (where spills go) of a compiled kernel."""
    found = [f"{compiled.metadata.num_warps} warps", f"{compiled.metadata.shared} B shared"]
    usage = resource_usage(compiled.asm.get("cubin"))
    if usage is not None:
        found += [f"{usage['REG']} registers", f"{usage['STACK'] + usage['LOCAL']} B spilled"]
    return ", ".join(found)


def resource_usage(cubin: bytes | None) -> dict[str, int] | None:
    """Return REG, STACK, SHARED and LOCAL of a kernel from Triton's own cuobjdump, or None where that is no help."""
    from triton import knobs

    if cubin is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, RuntimeError, subprocess.CalledProcessError):
            return None
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return usage if {"REG", "STACK", "LOCAL"} <= set(usage) else None


def main(arguments: list[str] | None = None) -> int:
    """Compile, print one line a kernel and capability, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--capability", type=int, action="append", choices=CAPABILITIES, help="90 for 9.0; repeatable; all by default"
    )
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--quick", action="store_true", help="of ops that take long only a part, as CI does")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; one a core by default")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        parser.error('triton is not installed: pip install -e ".[triton]"')
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; use 1 or more")
    jobs = [
        (capability, index)
        for capability in options.capability or CAPABILITIES
        for index, build in enumerate(all_builds(capability))
        if options.match in build.name and (is_quick(build.name) or not options.quick)
    ]
    if not jobs:
        parser.error(f"no kernel's name contains {options.match!r}")
    failed = 0
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        for ok, line in pool.map(compile_one, jobs):
            failed += not ok
            print(line, flush=True)
    print(f"{failed} of {len(jobs)} failed" if failed else f"all {len(jobs)} compiled")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
