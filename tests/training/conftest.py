from pathlib import Path

import numpy as np
import polars
import pytest

from zoo.data import Dataset, prepare

TINY = {
    "d_model": 16, "num_heads": 2, "head_dim": 8, "mlp_width": 16, "hash_rows": 64, "hash_width": 4, "codebook_size": 8,
}  # fmt: skip
"""Changes to gbla-tiny that make a step take milliseconds."""

RECIPE = {
    "steps": 12, "batch_size": 16, "max_length": 10, "targets_per_history": 2, "checkpoint_every": 4, "eval_every": 6,
}  # fmt: skip


def write_events(path: Path, users: int = 20, items: int = 30, seed: int = 0) -> Path:
    """Each user walks up the item numbers from a random start: the last item says the next one."""
    draw = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        start, length = int(draw.integers(items)), int(draw.integers(4, 15))
        rows += [(user, (start + i) % items, 1000 * user + i) for i in range(length)]
    user, item, time = (list(column) for column in zip(*rows, strict=True))
    polars.DataFrame({"user": user, "item": item, "timestamp": time}).write_parquet(path)
    return path


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("walks")
    return prepare(write_events(folder / "walks.parquet"), out=folder / "out", codebook_size=8)
