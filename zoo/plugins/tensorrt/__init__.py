"""The custom ops as TensorRT plugins written in Python, one creator an OpSpec.

They let an engine be built, and an op be run under TensorRT, where the C++ library is not at hand. Their kernels run
through PyTorch, so they are for builds and tests, not for a server and not for CUDA graph capture.

    contract.py    what an op demands of a node's fields, shapes and dtypes, and what it gives; no TensorRT in it
    creators.py    IPluginCreatorV3One and IPluginV3 made from a spec
    execution.py   device pointers as torch tensors, and the op run on the caller's stream

``register_creators`` takes the module, so TensorRT, TensorRT-RTX and the lean runtime share the code.
"""

from zoo.plugins.tensorrt.creators import plugin_fields, recorded_problems, register_creators

__all__ = ["plugin_fields", "recorded_problems", "register_creators"]
