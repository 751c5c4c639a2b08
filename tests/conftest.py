"""Shared fixtures and the tolerance rule."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("search", max_examples=400, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
