"""What check_manifest finds, each on a copy of one good engine."""

import json
import shutil

import pytest

from engines.build import build
from engines.manifest import check_manifest, load_manifest
from tests.engines import graphs
from zoo.bundle import Bundle
from zoo.errors import BundleError


@pytest.fixture(scope="module")
def good(rtx, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "bundle"
    build(graphs.bundle(folder), lengths=(16,), batch=(1, 2, 4), targets=("sm89",))
    return folder


@pytest.fixture
def bundle(good, tmp_path):
    return Bundle.open(shutil.copytree(good, tmp_path / "bundle"))


@pytest.fixture
def manifest(bundle):
    (path,) = bundle.path.glob("engines/*/*/*.json")
    return path


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def only_problem(bundle, manifest):
    (problem,) = check_manifest(bundle, manifest)
    return problem


def test_a_good_engine_has_no_problem(bundle, manifest):
    assert check_manifest(bundle, manifest) == []


def test_a_truncated_engine_is_found(bundle, manifest):
    engine = manifest.with_suffix(".engine")
    engine.write_bytes(engine.read_bytes()[:1000])
    assert "has 1000 bytes" in only_problem(bundle, manifest)


def test_one_changed_byte_is_found(bundle, manifest):
    engine = manifest.with_suffix(".engine")
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    assert "is damaged" in only_problem(bundle, manifest)


def test_a_missing_engine_is_found(bundle, manifest):
    manifest.with_suffix(".engine").unlink()
    assert "is missing" in only_problem(bundle, manifest)


def test_a_graph_exported_again_makes_the_engine_stale(bundle, manifest):
    graphs.put(bundle, seed=1)
    assert "is stale" in only_problem(bundle, manifest)


def test_a_graph_that_is_gone_is_found(bundle, manifest):
    (bundle.path / "onnx/mixer-fp16.onnx").unlink()
    assert "onnx/mixer-fp16.onnx" in only_problem(bundle, manifest)


@pytest.mark.parametrize("field", ["name", "dtype", "min", "max"])
def test_an_input_that_is_not_the_signatures_is_found(bundle, manifest, field):
    inputs = json.loads(manifest.read_text())["inputs"]
    inputs[0][field] = {"name": "z", "dtype": "fp32", "min": [1, 15, graphs.WIDTH], "max": [4, 16, 8]}[field]
    edit(manifest, inputs=inputs)
    assert "but the bundle says" in only_problem(bundle, manifest)


def test_plugin_layers_that_the_graph_does_not_have_are_found(bundle, manifest):
    plugins = json.loads(manifest.read_text())["plugins"]
    plugins[0]["count"] = 5
    edit(manifest, plugins=plugins)
    assert "records the plugin layers {'CausalShortConv': 5" in only_problem(bundle, manifest)


def test_a_manifest_that_was_moved_is_found(bundle, manifest):
    other = manifest.with_name("mixer-fp16-L32.json")
    shutil.copy(manifest.with_suffix(".engine"), other.with_suffix(".engine"))
    manifest.rename(other)
    assert "holds the manifest of" in only_problem(bundle, other)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 99}'])
def test_a_damaged_manifest_is_one_sentence(bundle, manifest, text):
    manifest.write_text(text)
    assert "build again" in only_problem(bundle, manifest)
    with pytest.raises(BundleError):
        load_manifest(manifest)


def test_an_engine_of_a_part_that_the_bundle_lacks_is_found(bundle, manifest):
    bundle.manifest["signatures"] = {}
    assert "no part 'mixer'" in only_problem(bundle, manifest)
