"""trt-zoo: long-history recommenders, from PyTorch to TensorRT engines proven equal.

The verbs of the command line are Python functions too: ``from zoo import verbs``.
"""

__version__ = "0.1.0"
