import pytest
import torch

from zoo import verbs
from zoo.bundle import Bundle


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Bundle:
    """A small random model, exported in three dtypes; tests copy it before they change it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("bundle") / "tiny"
    bundle = verbs.init("gbla-tiny", path, overrides={"hash_rows": 64, "codebook_size": 16, "d_model": 32})
    verbs.export(bundle)
    return bundle
