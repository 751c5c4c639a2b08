"""ONNX graphs to TensorRT engines, one a part, length and target, each with a manifest beside it.

build.py           the stage: what to build, what is up to date, writing
compile.py         one graph to one serialized engine
manifest.py        what an engine is, in JSON, and whether the file still is that
flavors.py         TensorRT-RTX and TensorRT behind one API; targets
profile.py         lengths, batches and beams as shapes
graph.py           what the ONNX file says about itself
messages.py        TensorRT's log
driver.py          the CUDA driver
rtx_libraries.py   a trap of the TensorRT-RTX wheels, closed
"""
