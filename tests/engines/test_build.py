"""Engines of a small graph, built by TensorRT-RTX with no GPU."""

import json
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from engines import build as build_module
from engines import compile as compile_module
from engines.build import build
from engines.manifest import check_manifest, load_manifest, plugins_in_engine
from tests.engines import graphs
from zoo import files, verbs
from zoo.bundle import Bundle
from zoo.errors import BundleError, ConfigError, EngineBuildError

pytestmark = pytest.mark.usefixtures("rtx")
ONE = {"lengths": (16,), "batch": (1, 2, 4), "targets": ("sm89",)}
UNKNOWN_VERSION = {**graphs.PLUGIN, "plugin_version": "7"}
LAYERS = {"CausalShortConv": 1, "GatedBidirectionalLinearAttention": 1}


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_each_dtype_builds_with_a_plugin_for_every_zoo_node(tmp_path, dtype):
    bundle = graphs.bundle(tmp_path, dtype)
    (record,) = build(bundle, dtype=dtype, **ONE)
    assert record.status == "built"
    assert plugins_in_engine(record.path) == LAYERS
    assert {plugin.name: plugin.count for plugin in record.manifest.plugins} == LAYERS
    assert check_manifest(bundle, record.path.with_suffix(".json")) == []


def test_the_attributes_of_the_nodes_arrive_in_the_engine(tmp_path):
    """TensorRT keeps the address of a field's data; were it freed, another value would be written."""
    (record,) = build(graphs.bundle(tmp_path), **ONE)
    data = record.path.read_bytes()
    for name, value in (("num_heads", graphs.HEADS), ("head_dim", graphs.HEAD_DIM), ("key_gate", 1)):
        int32, one = (5).to_bytes(4, "little"), (1).to_bytes(4, "little")
        assert name.encode() + b"\0" + int32 + one + value.to_bytes(4, "little") in data
    assert b"activation\0" + (6).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"silu" in data


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_softmax_attention_builds_in_each_dtype(tmp_path, dtype):
    bundle = graphs.bundle(tmp_path, dtype, softmax_attention=True)
    (record,) = build(bundle, dtype=dtype, **ONE)
    assert check_manifest(bundle, record.path.with_suffix(".json")) == []


def test_there_is_one_engine_a_length_and_target_where_the_layout_says(tmp_path, rtx):
    bundle = graphs.bundle(tmp_path)
    seen = []
    records = build(
        bundle,
        lengths=(24, 16, 24),
        batch=(1, 2, 4),
        targets=("sm120", "sm86"),
        progress=lambda phrase, done, total: seen.append((done, total)),
    )
    places = [str(record.path.relative_to(tmp_path)) for record in records]
    folder = f"engines/rtx-{rtx.version}"
    assert places == [
        f"{folder}/{target}/mixer-fp16-L{length}.engine" for length in (16, 24) for target in ("sm86", "sm120")
    ]
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert records[0].manifest.inputs[0].max == (4, 16, graphs.WIDTH)


def test_a_part_without_a_history_has_one_engine_for_all_lengths(tmp_path):
    sizes = {"num_items": 20, "window": 4, "codebook_size": 8, "num_loops": 1}
    bundle = verbs.init("sinkrec-tiny", tmp_path / "bundle", overrides=sizes)
    verbs.export(bundle, dtypes=("fp16",))
    records = build(bundle, **ONE | {"lengths": (16, 24)})
    assert [record.path.name for record in records] == [
        "prefill-fp16-L16.engine", "prefill-fp16-L24.engine", "step-fp16.engine",
    ]  # fmt: skip
    assert [record.manifest.length for record in records] == [16, 24, None]
    assert [check_manifest(bundle, record.path.with_suffix(".json")) for record in records] == [[], [], []]
    again = build(bundle, **ONE | {"lengths": (16,)})
    assert [record.status for record in again] == ["up to date", "up to date"]
    found = verbs.inspect(bundle)["engines"]
    assert [record["length"] for record in found] == [16, 24, None]


def test_a_second_build_with_nothing_changed_does_nothing(tmp_path, monkeypatch):
    build(graphs.bundle(tmp_path), **ONE)
    before = snapshot(tmp_path)
    monkeypatch.setattr(build_module, "compile_engine", lambda *_, **__: pytest.fail("it was built again"))
    (record,) = build(tmp_path, **ONE)
    assert record.status == "up to date"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("change", ["graph", "batch", "engine", "manifest", "tensorrt settings", "force"])
def test_whatever_changed_is_built_again(tmp_path, monkeypatch, change):
    bundle = graphs.bundle(tmp_path)
    (first,) = build(bundle, **ONE)
    settings = dict(ONE)
    if change == "graph":
        graphs.put(bundle, seed=1)
    elif change == "batch":
        settings["batch"] = (1, 2, 5)
    elif change == "engine":
        first.path.write_bytes(first.path.read_bytes()[:-1] + b"!")
    elif change == "manifest":
        first.path.with_suffix(".json").write_text("{")
    elif change == "tensorrt settings":
        monkeypatch.setitem(build_module.BUILDER_SETTINGS, "tf32", True)
    (second,) = build(bundle, force=change == "force", **settings)
    assert second.status == "built"
    assert check_manifest(bundle, second.path.with_suffix(".json")) == []


def test_a_node_that_fell_back_to_its_function_body_stops_the_build(tmp_path, monkeypatch):
    bundle = graphs.bundle(tmp_path, bodies=True, plugin=UNKNOWN_VERSION)
    with pytest.raises(EngineBuildError, match="made none into plugin layers"):
        build(bundle, **ONE)
    assert not list(tmp_path.glob("engines/**/*.engine"))

    # The check is what stopped it: without it the engine builds, and its own bytes tell.
    monkeypatch.setattr(compile_module, "_check_plugins", lambda *_: {})
    (record,) = build(bundle, **ONE)
    (problem,) = check_manifest(bundle, record.path.with_suffix(".json"))
    assert "holds the plugin layers {}" in problem


def test_without_registered_creators_the_body_is_taken_and_the_build_says_so(tmp_path):
    graphs.bundle(tmp_path, bodies=True)
    script = f"""
        import engines.compile
        engines.compile.register_creators = lambda trt: []
        from engines.build import build
        from zoo.errors import EngineBuildError
        try:
            build({str(tmp_path)!r}, **{ONE!r})
        except EngineBuildError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert "made none into plugin layers" in done.stdout, done.stderr


def test_a_wrong_packed_width_is_named_with_the_input_and_the_width_it_needs(tmp_path):
    bundle = graphs.bundle(tmp_path, width=graphs.WIDTH + 6)
    with pytest.raises(EngineBuildError, match=r"node attention .*") as caught:
        build(bundle, **ONE)
    assert "input packed has shape [-1, -1, 270], 270 columns, but P must be 264 for num_heads=2" in str(caught.value)


def test_two_float_dtypes_in_one_node_are_named(tmp_path):
    bundle = graphs.bundle(tmp_path, taps_dtype="fp32")
    with pytest.raises(EngineBuildError, match="input weight is float32, but x is float16"):
        build(bundle, **ONE)


def test_a_graph_that_does_not_parse_is_an_error_with_the_node(tmp_path):
    bundle = graphs.bundle(tmp_path, plugin=UNKNOWN_VERSION)
    with pytest.raises(EngineBuildError, match=r"mixer-fp16, length 16, sm89: node conv \(CausalShortConv\): "):
        build(bundle, **ONE)


def test_a_bundle_without_the_export_names_the_command(tmp_path):
    bundle = Bundle.create(tmp_path, config={}, signatures={"mixer": graphs.signature()})
    with pytest.raises(BundleError, match="zoo export"):
        build(bundle, **ONE)
    graphs.put(bundle, "fp32")
    with pytest.raises(BundleError, match=r"not exported in fp16 \(only in fp32\)"):
        build(bundle, **ONE)


def test_a_graph_that_was_changed_behind_the_bundle_is_refused(tmp_path):
    bundle = graphs.bundle(tmp_path)
    path = bundle.path / "onnx/mixer-fp16.onnx"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(BundleError, match="checksum differs"):
        build(bundle, **ONE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lengths": ()}, "one or more history lengths"),
        ({"lengths": (0,)}, "length 0 is not a whole number"),
        ({"lengths": (16.0,)}, "length 16.0"),
        ({"batch": (1, 8)}, "smallest, the usual and the largest"),
        ({"batch": (4, 2, 8)}, "must not fall"),
        ({"beams": 0}, "beams 0"),
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of fp32, fp16, bf16"),
        ({"parts": ("decoder",)}, "no part 'decoder'; it has mixer"),
        ({"targets": ("sm90",)}, r"it builds for sm75, sm80, .*H100 and H200 \(sm90\) need --flavor tensorrt"),
        ({"targets": ("l40s",)}, "'l40s'; it builds for sm75"),
        ({"targets": ()}, "give a list such as"),
        ({"flavor": "openvino"}, "choose one of rtx, tensorrt"),
    ],
)
def test_a_setting_that_makes_no_sense_is_explained(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        build(graphs.bundle(tmp_path), **{**ONE, **settings})


@pytest.mark.parametrize("suffix", [".engine", ".json"])
def test_a_write_that_fails_leaves_no_broken_file(tmp_path, monkeypatch, suffix):
    bundle = graphs.bundle(tmp_path)
    real = files.write_bytes

    def fail(path, data):
        if str(path).endswith(suffix):
            with files.replacing(path) as temporary:
                temporary.write_bytes(bytes(data[:1]))
                raise OSError("the disk is full")
        real(path, data)

    monkeypatch.setattr(files, "write_bytes", fail)
    with pytest.raises(OSError, match="disk is full"):
        build(bundle, **ONE)
    left = {path.suffix for path in tmp_path.glob("engines/**/*") if path.is_file()}
    assert left == ({".engine"} if suffix == ".json" else set())
    monkeypatch.undo()
    (record,) = build(bundle, **ONE)
    assert check_manifest(bundle, record.path.with_suffix(".json")) == []


def test_a_killed_build_leaves_no_broken_file_and_the_next_one_goes_on(tmp_path):
    bundle = graphs.bundle(tmp_path)
    script = f"""
        import os, signal
        from zoo import files
        real = files._fsync_directory
        files._fsync_directory = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # after the first rename
        from engines.build import build
        build({str(tmp_path)!r}, **{ONE!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (record,) = build(bundle, **ONE)
    assert record.status == "built"
    assert check_manifest(bundle, record.path.with_suffix(".json")) == []


def test_two_threads_may_build_the_same_bundle(tmp_path):
    bundle = graphs.bundle(tmp_path)
    failures = []

    def run():
        try:
            build(bundle, force=True, **ONE)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    (manifest,) = tmp_path.glob("engines/*/*/*.json")
    assert check_manifest(bundle, manifest) == []


def test_a_record_as_json_is_its_manifest_with_path_and_status(tmp_path):
    (record,) = build(graphs.bundle(tmp_path), **ONE)
    value = json.loads(json.dumps(record.to_json()))
    assert (value.pop("path"), value.pop("status")) == (str(record.path), "built")
    assert value == json.loads(record.path.with_suffix(".json").read_text())
    assert load_manifest(record.path.with_suffix(".json")) == record.manifest
    assert (record.seconds > 0, record.size) == (True, record.path.stat().st_size)
