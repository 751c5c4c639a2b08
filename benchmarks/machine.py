"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zoo.bundle import tool_versions

COMMIT_VARIABLE = "TRT_ZOO_COMMIT"
"""Names the commit where the working tree has travelled without its repository, or with an older one."""


def describe_machine() -> dict[str, Any]:
    """Return CPU, memory, GPU and driver where there is one, versions, command line, commit and time."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": os.environ.get(COMMIT_VARIABLE) or _run("git", "rev-parse", "--short", "HEAD"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or None,
        "tools": {**tool_versions(), **_gpu_versions()},
    }


def _gpu_versions() -> dict[str, str]:
    versions = {}
    for package in ("fa3-fwd", "fla-core", "flash-qla", "tilelang"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return versions


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
