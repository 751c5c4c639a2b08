"""A bundle's export: what is written, recorded, kept and made again."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from export import bundle_export, export
from export.onnx_export import OnnxPart, data_path
from zoo import files, verbs
from zoo.bundle import WEIGHTS, Bundle
from zoo.errors import BundleError, ConfigError
from zoo.models.loading import load_model


@pytest.fixture
def bundle(tmp_path):
    return verbs.init("gbla-tiny", tmp_path / "bundle")


@pytest.fixture
def made(monkeypatch):
    """Replace the slow export of a part; returns the names of the parts that were exported."""
    names = []

    def stand_in(part, path, *, dtype, opset):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"graph")
        data_path(path).write_bytes(b"weights")
        names.append(f"{part.name}-{dtype}")
        return OnnxPart(part.name, dtype, path, opset, {"CausalShortConv": 2}, 9, 12, True, 0.1)

    monkeypatch.setattr(bundle_export, "export_part", stand_in)
    return names


def rewrite_weights(bundle, change):
    weights = load_file(bundle.path / WEIGHTS)
    change(weights)
    save_file(weights, bundle.path / WEIGHTS)
    bundle.update([WEIGHTS])


def test_a_part_is_written_and_recorded_and_a_second_export_does_nothing(bundle):
    (part,) = export(bundle, dtypes=("fp16",), parts=("decoder_step",))
    assert not part.up_to_date and bundle.file("onnx/decoder_step-fp16.onnx") == part.path
    section = Bundle.open(bundle.path).manifest["export"]
    assert (section["opset"], section["dtypes"]) == (23, ["fp16"])
    record = section["parts"]["decoder_step-fp16"]
    assert (record["bytes"], record["nodes"]) == (part.size, part.nodes)
    stamp = part.path.stat().st_mtime_ns
    (again,) = export(bundle.path, dtypes=("fp16",), parts=("decoder_step",))
    assert again.up_to_date and again.path.stat().st_mtime_ns == stamp


def test_every_part_and_dtype_is_exported_and_recorded_with_its_data(bundle, made):
    steps = []
    exported = export(bundle, progress=lambda *step: steps.append(step))
    assert made == [f"{part.part}-{part.dtype}" for part in exported]
    assert made == [f"{part}-{dtype}" for dtype in ("fp32", "fp16", "bf16") for part in ("encoder", "decoder_step")]
    assert steps[0] == ("encoder fp32", 0, 6) and steps[-1][1:] == (6, 6)
    section = bundle.manifest["export"]
    assert section["dtypes"] == ["fp32", "fp16", "bf16"] and section["ops"] == {"CausalShortConv": 1}
    for name in made:
        assert bundle.file(f"onnx/{name}.onnx") and bundle.file(f"onnx/{name}.onnx.data")


def test_only_what_is_missing_damaged_or_forced_is_made_again(bundle, made):
    export(bundle)
    made.clear()
    export(bundle)
    assert made == []
    (bundle.path / "onnx/encoder-fp16.onnx.data").write_bytes(b"damage")
    (bundle.path / "onnx/decoder_step-bf16.onnx").unlink()
    export(bundle)
    assert made == ["encoder-fp16", "decoder_step-bf16"]
    made.clear()
    export(bundle, dtypes=("fp32",), force=True)
    assert made == ["encoder-fp32", "decoder_step-fp32"]
    made.clear()
    export(bundle, dtypes=("fp32",), opset=22)
    assert made == ["encoder-fp32", "decoder_step-fp32"]


def test_new_weights_leave_no_old_graph_in_the_section(bundle, made):
    export(bundle)
    rewrite_weights(bundle, lambda weights: weights["start"].add_(1))
    export(bundle, dtypes=("fp16",))
    assert made[6:] == ["encoder-fp16", "decoder_step-fp16"]
    assert bundle.manifest["export"]["dtypes"] == ["fp16"]


def test_a_loaded_model_has_the_weights_and_is_ready_to_infer(bundle):
    model = load_model(bundle)
    assert not model.training
    weights = load_file(bundle.path / WEIGHTS)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("start"), "start is missing"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is unknown"),
        (lambda weights: weights.update(start=torch.zeros(3)), r"start is \[3\] and should be \[64\]"),
        (lambda weights: weights.clear(), "is missing and .* more"),
    ],
    ids=["missing", "unknown", "misshapen", "empty"],
)
def test_weights_of_another_model_are_refused_by_name(bundle, change, words):
    rewrite_weights(bundle, change)
    with pytest.raises(BundleError, match=words):
        export(bundle)


def test_damaged_weights_and_what_is_no_bundle_are_refused(bundle, tmp_path):
    (bundle.path / WEIGHTS).write_bytes(b"no safetensors")
    with pytest.raises(BundleError, match="checksum"):
        export(bundle)
    bundle.update([WEIGHTS])
    with pytest.raises(BundleError, match="cannot be read"):
        export(bundle)
    with pytest.raises(BundleError, match="not a bundle"):
        export(tmp_path / "nowhere")


def test_a_bundle_of_another_version_and_unknown_names_are_refused(bundle, made):
    with pytest.raises(ConfigError, match="fp8"):
        export(bundle, dtypes=("fp8",))
    with pytest.raises(ConfigError, match="encoder, decoder_step"):
        export(bundle, parts=("tower",))
    bundle.manifest["signatures"]["encoder"]["inputs"][0]["name"] = "items"
    files.write_json(bundle.path / "bundle.json", bundle.manifest)
    with pytest.raises(BundleError, match="not those of this version"):
        export(bundle)
    assert made == []
