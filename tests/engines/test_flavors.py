"""Flavors that are missing or unknown, and the trap in the RTX wheels' libraries."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines import flavors, rtx_libraries
from engines.driver import present_gpu
from tests.engines import graphs
from zoo.errors import ConfigError, MissingDependencyError


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


BUILD = """
    from engines.build import build
    (record,) = build({bundle!r}, lengths=(16,), batch=(1, 2, 4), targets=("sm89",))
    print(record.status)
"""


def test_a_missing_flavor_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(flavors, "make_findable", lambda: None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "trt-zoo\[rtx\]"'):
        flavors._rtx.__wrapped__()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "trt-zoo\[tensorrt\]".*own package index'):
        flavors.flavor("tensorrt")


def test_the_tensorrt_flavor_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(flavors, "_import", lambda module, remedy: None)
    monkeypatch.setattr(flavors, "present_gpu", lambda: None)
    with pytest.raises(ConfigError, match="this machine has none"):
        flavors._tensorrt.__wrapped__()


def test_the_tensorrt_flavor_builds_for_the_present_gpu_only():
    hopper = flavors.Flavor("tensorrt", None, "11.4", ("sm90",), ("sm90",), needs_gpu=True)
    assert hopper.check_targets(None) == ("sm90",)
    with pytest.raises(ConfigError, match="here sm90; leave --targets out"):
        hopper.check_targets(("sm89",))


def test_the_rtx_flavor_names_its_module_version_and_targets(rtx):
    assert rtx.folder == f"rtx-{rtx.module.__version__}"
    assert {"sm80", "sm86", "sm89", "sm120"} <= set(rtx.targets)
    assert rtx.check_targets(("sm120", "sm89", "sm120")) == ("sm89", "sm120")


def test_asking_for_a_driver_on_any_machine_gives_an_answer():
    found = present_gpu()
    assert found is None or found.startswith("sm")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_plugin_imports_where_nothing_can_be_written(rtx, tmp_path):
    """Neither the site-packages nor the cache: the links go to a folder of the process."""
    graphs.bundle(tmp_path / "bundle")
    blocked = tmp_path / "file"
    blocked.touch()
    done = run(BUILD.format(bundle=str(tmp_path / "bundle")), TRT_ZOO_CACHE=str(blocked / "cache"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "built\n", "")
    assert not (rtx_libraries.installed_folder() / "libtensorrt_rtx.so").exists()


def test_the_trap_is_real_and_the_links_are_what_closes_it(rtx, tmp_path):
    graphs.bundle(tmp_path / "bundle")
    if (rtx_libraries.installed_folder() / "libtensorrt_rtx.so").exists():
        pytest.skip("this machine has a libtensorrt_rtx.so beside the library")
    disarm = "import engines.flavors; engines.flavors.make_findable = lambda: None"
    done = run(textwrap.dedent(disarm) + textwrap.dedent(BUILD.format(bundle=str(tmp_path / "bundle"))))
    assert done.returncode != 0, "the wheels have changed: rtx_libraries.py may no longer be needed"


def test_bindings_that_were_imported_first_are_mended_or_refused(rtx, tmp_path):
    """The libraries are copied, so that a link can be put beside them and the installed ones stay as they are."""
    real = rtx_libraries.installed_folder()
    if (real / "libtensorrt_rtx.so").exists():
        pytest.skip("this machine has a libtensorrt_rtx.so beside the library")
    bindings = Path(importlib.util.find_spec("tensorrt_rtx_bindings").origin).parent
    packages = tmp_path / "packages"
    for source in (real, bindings):
        (packages / source.name).mkdir(parents=True)
        for file in source.iterdir():
            if file.is_file():
                _hard_link_or_copy(file, packages / source.name / file.name)
    graphs.bundle(tmp_path / "bundle")
    script = "import tensorrt_rtx_bindings\n" + textwrap.dedent(BUILD.format(bundle=str(tmp_path / "bundle")))
    done = run(script, PYTHONPATH=f"{packages}:{Path.cwd()}")
    assert (done.returncode, done.stdout) == (0, "built\n"), done.stderr
    assert (packages / real.name / "libtensorrt_rtx.so").is_symlink()


def test_a_parser_loaded_first_from_a_folder_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    (tmp_path / "libtensorrt_rtx.so.1").touch()
    monkeypatch.setattr(rtx_libraries, "_loaded_parser", lambda: Path("/proc/libtensorrt_onnxparser_rtx.so.1"))
    with pytest.raises(ConfigError, match=r"import engines\.flavors first"):
        rtx_libraries.make_findable(tmp_path)


def test_many_threads_may_make_the_links_at_once(tmp_path):
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    with ThreadPoolExecutor(16) as pool:
        folders = set(pool.map(lambda _: rtx_libraries._filled(tmp_path / "links", libraries), range(64)))
    (folder,) = folders
    names = {link.name: link.readlink().name for link in folder.iterdir()}
    assert names == {
        "libtensorrt_rtx.so": "libtensorrt_rtx.so.1",
        "libtensorrt_onnxparser_rtx.so.1": "libtensorrt_onnxparser_rtx.so.1",
    }


def _hard_link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        target.write_bytes(source.read_bytes())
