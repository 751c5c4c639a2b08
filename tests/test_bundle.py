import json
import threading

import pytest

from zoo import files, verbs
from zoo.bundle import Bundle
from zoo.errors import BundleError, BusyError, ConfigError

SMALL = {"num_layers": 1, "hash_rows": 16, "d_model": 8, "head_dim": 4, "mlp_width": 8, "codebook_size": 4}


@pytest.fixture
def bundle(tmp_path) -> Bundle:
    return verbs.init("gbla-tiny", tmp_path / "bundle", overrides=SMALL)


def test_a_bundle_reads_back_as_it_was_written(bundle):
    again = Bundle.open(bundle.path)
    assert again.manifest == bundle.manifest
    assert again.file("model.safetensors").is_file() and set(again.signatures) == {"encoder", "decoder_step"}


@pytest.mark.parametrize(
    "damage",
    [
        {"files": None},
        {"files": {"model.safetensors": {}}},
        {"files": {"../elsewhere": {"size": 1, "sha256": ""}}},
        {"files": {"/etc/passwd": {"size": 1, "sha256": ""}}},
        {"signatures": {}},
        {"signatures": []},
        {"signatures": {"encoder": {}}},
        {"config": {}},
        {"export": [1]},
        {"training": None},
        {"schema_version": 99},
    ],
    ids=str,
)
def test_a_manifest_of_another_shape_is_named(bundle, damage):
    files.write_json(bundle.path / "bundle.json", {**bundle.manifest, **damage})
    with pytest.raises(BundleError, match=r"bundle\.json"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"schema_version": 1}'], ids=repr)
def test_a_manifest_that_is_no_manifest_is_named(bundle, content):
    (bundle.path / "bundle.json").write_bytes(content)
    with pytest.raises(BundleError, match="damaged"):
        Bundle.open(bundle.path)


def test_two_writers_keep_what_the_other_has_recorded(bundle):
    other = Bundle.open(bundle.path)
    (bundle.path / "a.txt").write_text("a")
    (bundle.path / "b.txt").write_text("b")
    threads = [
        threading.Thread(target=bundle.update, args=(["a.txt"],), kwargs={"first": 1}),
        threading.Thread(target=other.update, args=(["b.txt"],), kwargs={"second": 2}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manifest = json.loads((bundle.path / "bundle.json").read_text())
    assert manifest["first"] == 1 and manifest["second"] == 2
    assert {"a.txt", "b.txt", "model.safetensors"} <= set(manifest["files"])


def test_a_folder_has_one_writer_and_the_second_is_told(tmp_path):
    with files.one_writer(tmp_path), pytest.raises(BusyError, match=str(tmp_path)), files.one_writer(tmp_path):
        pass
    with files.one_writer(tmp_path):
        pass


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be made a folder"):
            verbs.init("gbla-tiny", path, overrides=SMALL)


def test_a_write_that_fails_leaves_the_old_file_and_no_scraps(tmp_path):
    path = tmp_path / "value.json"
    files.write_json(path, 1)
    with pytest.raises(TypeError):
        files.write_json(path, object())
    with pytest.raises(RuntimeError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == 1 and list(tmp_path.iterdir()) == [path]
