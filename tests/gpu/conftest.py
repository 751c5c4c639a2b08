"""GPU tests skip, with the reason, where there is no CUDA device. CI has none: run them on the GPU machine."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no CUDA device: run `pytest tests/gpu` on the GPU machine"))
