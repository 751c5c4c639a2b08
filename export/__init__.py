"""From a PyTorch module to ONNX: one graph a part and dtype, custom ops as ``zoo`` nodes with their bodies."""

from export.bundle_export import export
from export.onnx_export import OnnxPart, export_part
from export.weights import compare_weights

__all__ = ["OnnxPart", "compare_weights", "export", "export_part"]
