import importlib.util

import pytest


@pytest.fixture(scope="session")
def rtx():
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("tensorrt_rtx_bindings is not installed: pip install 'trt-zoo[rtx]'")
    from engines.flavors import flavor

    return flavor("rtx")
