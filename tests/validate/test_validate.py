import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import validate.run
from export import compare_weights
from validate import validate as run_validate
from zoo.bundle import Bundle
from zoo.errors import BundleError, ConfigError
from zoo.models.loading import load_model


@pytest.fixture
def bundle(exported, tmp_path) -> Bundle:
    shutil.copytree(exported.path, tmp_path / "copy")
    return Bundle.open(tmp_path / "copy")


def change_initializer(bundle: Bundle, name: str, tensor: str, change) -> None:
    """Rewrite one initializer of an exported file and record the file anew, so that only parity can notice."""
    path = bundle.path / name
    model = onnx.load(path)
    (initializer,) = [item for item in model.graph.initializer if item.name == tensor]
    values = numpy_helper.to_array(initializer).copy()
    change(values)
    initializer.CopyFrom(numpy_helper.from_array(values, tensor))
    onnx.save(model, path)
    bundle.update([name])


def flip_smallest(values: np.ndarray) -> None:
    """Flip the sign of the weight nearest to zero: the least that a flipped bit can do."""
    flat = values.reshape(-1)
    flat[np.where(flat == 0, np.inf, np.abs(flat)).argmin()] *= -1


def float_initializers(bundle: Bundle, name: str) -> list[str]:
    graph = onnx.load(bundle.path / name).graph
    return [i.name for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT and np.prod(i.dims) > 1]


def test_an_untouched_bundle_passes_in_every_dtype_and_says_what_was_not_run(bundle):
    report = run_validate(bundle, lengths=[1, 7, 33])
    assert report.ok, [check for check in report.checks if not check.ok]
    assert {check.dtype for check in report.checks} == {"fp32", "fp16", "bf16"}
    assert {check.part for check in report.checks} == {"encoder", "decoder_step"}
    assert {check.kind for check in report.checks} == {"parity", "weights"}
    assert any("bf16" in line for line in report.not_run)
    written = json.loads((bundle.path / "reports/parity.json").read_text())
    assert written["ok"] is True and len(written["checks"]) == len(report.checks)


@pytest.mark.parametrize("part", ["encoder", "decoder_step"])
def test_the_sign_of_one_weight_flipped_in_any_tensor_is_found_bit_by_bit(bundle, part):
    name = f"onnx/{part}-fp32.onnx"
    (found,) = [found for found in load_model(bundle).parts() if found.name == part]
    original = (bundle.path / name).read_bytes()
    for tensor in float_initializers(bundle, name):
        change_initializer(bundle, name, tensor, flip_smallest)
        assert compare_weights(bundle.path / name, found.module.state_dict(), "fp32"), tensor
        (bundle.path / name).write_bytes(original)


def test_one_flipped_weight_fails_the_whole_report(bundle):
    name = "onnx/encoder-fp32.onnx"
    change_initializer(bundle, name, float_initializers(bundle, name)[0], flip_smallest)
    report = run_validate(bundle, lengths=[9], dtypes=["fp32"])
    assert not report.ok


def test_one_flipped_weight_is_found_by_parity_alone(bundle, monkeypatch):
    monkeypatch.setattr(validate.run, "compare_weights", lambda *arguments: [])
    name = "onnx/encoder-fp32.onnx"
    tensor = next(n for n in float_initializers(bundle, name) if "mlp" in n or "norm" in n or "MatMul" in n)

    def flip_largest(values):
        values.reshape(-1)[np.abs(values).argmax()] *= -1

    change_initializer(bundle, name, tensor, flip_largest)
    report = run_validate(bundle, lengths=[9], dtypes=["fp32"])
    failed = [check for check in report.checks if not check.ok]
    assert failed and {check.kind for check in failed} == {"parity"}
    assert all("are allowed" in check.detail for check in failed)


def test_a_file_that_is_not_the_recorded_one_is_named(bundle):
    path = bundle.path / "onnx/encoder-fp32.onnx"
    path.write_bytes(path.read_bytes()[:-10])
    report = run_validate(bundle, lengths=[3], dtypes=["fp32"])
    (failed,) = [check for check in report.checks if not check.ok]
    assert failed.kind == "file" and "checksum" in failed.detail


def test_a_truncated_graph_with_a_matching_checksum_is_named_too(bundle):
    path = bundle.path / "onnx/encoder-fp32.onnx"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    bundle.update(["onnx/encoder-fp32.onnx"])
    report = run_validate(bundle, lengths=[3], dtypes=["fp32"])
    assert not report.ok


def test_an_engine_manifest_that_is_no_manifest_fails_the_report(bundle):
    folder = bundle.path / "engines/rtx-1/sm89"
    folder.mkdir(parents=True)
    (folder / "encoder-fp16-L8.json").write_text("{}")
    report = run_validate(bundle, lengths=[3], dtypes=["fp32"])
    assert [check.kind for check in report.checks if not check.ok] == ["engine"]


def test_an_engine_without_a_manifest_fails_the_report(bundle):
    folder = bundle.path / "engines/rtx-1/sm89"
    folder.mkdir(parents=True)
    (folder / "encoder-fp16-L8.engine").write_bytes(b"engine")
    report = run_validate(bundle, lengths=[3], dtypes=["fp32"])
    assert [check.kind for check in report.checks if not check.ok] == ["engine"]


def test_a_changed_file_that_no_graph_reads_is_named(bundle):
    (bundle.path / "notes.txt").write_text("recorded")
    bundle.update(["notes.txt"])
    (bundle.path / "notes.txt").write_text("changed!")
    report = run_validate(bundle, lengths=[3], dtypes=["fp32"])
    (failed,) = [check for check in report.checks if not check.ok]
    assert failed.subject == "notes.txt" and "checksum" in failed.detail


def test_a_signature_that_is_not_the_models_is_named(bundle):
    bundle.manifest["signatures"]["extra"] = bundle.manifest["signatures"]["encoder"]
    report = run_validate(bundle, lengths=[3], dtypes=["fp32"])
    assert any("signatures" in check.detail for check in report.checks if not check.ok)


def test_what_cannot_be_asked_is_an_error(bundle, tmp_path):
    with pytest.raises(ConfigError, match="int8"):
        run_validate(bundle, dtypes=["int8"])
    with pytest.raises(ConfigError, match="lengths start at 1"):
        run_validate(bundle, lengths=[0])
    for lengths in ((), 3, ("3",), (2.5,)):
        with pytest.raises(ConfigError, match="whole numbers"):
            run_validate(bundle, lengths=lengths)
    for dtypes in ((), "fp32"):
        with pytest.raises(ConfigError, match="as a tuple"):
            run_validate(bundle, dtypes=dtypes)
    del bundle.manifest["export"]
    with pytest.raises(BundleError, match="zoo export"):
        run_validate(bundle)
