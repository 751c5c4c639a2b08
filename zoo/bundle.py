"""The bundle: the folder that carries one model from training to engines.

    bundle.json                what is in it: schema, model configuration, signatures, checksums, tool versions
    model.safetensors          weights
    semantic_ids.safetensors   item <-> code table and trie
    onnx/<part>-<dtype>.onnx   one graph a part and dtype (weights of large ones beside it in <part>-<dtype>.onnx.data)
    engines/<flavor>-<version>/<target>/<part>-<dtype>[-L<length>].engine, and .json beside each
    reports/                   parity.json and others

Every stage adds its files and its section to bundle.json, the file last, so a killed stage leaves the old bundle whole.
Imports no model, so that engines/ may read bundles.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from zoo import __version__, files
from zoo.errors import BundleError
from zoo.signature import Signature

SCHEMA_VERSION = 1
WEIGHTS = "model.safetensors"
SEMANTIC_IDS = "semantic_ids.safetensors"
_MANIFEST = "bundle.json"


class Bundle:
    """A bundle on disk. ``manifest`` is the content of bundle.json; ``update`` is the only way to change it."""

    def __init__(self, path: Path, manifest: dict[str, Any], *, is_new: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self._is_new = is_new

    @classmethod
    def create(cls, path: Path | str, *, config: Mapping[str, Any], signatures: Mapping[str, Signature]) -> Bundle:
        """Start a bundle, or start it over where one exists; files are added with ``update``."""
        manifest: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "zoo_version": __version__,
            "config": dict(config),
            "signatures": {part: signature.to_json() for part, signature in signatures.items()},
            "files": {},
            "tools": tool_versions(),
        }
        return cls(files.make_folder(path), manifest, is_new=True)

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """Read a bundle.

        Raises:
            BundleError: no bundle there, not readable, or of another schema version.
        """
        path = Path(path)
        file = path / _MANIFEST
        if not file.is_file():
            raise BundleError(f"{path} is not a bundle: it has no bundle.json; make one with `zoo train` or `zoo init`")
        return cls(path, _read_manifest(file))

    @property
    def config(self) -> dict[str, Any]:
        """The model configuration, ``model`` naming the architecture."""
        return self.manifest["config"]

    @property
    def signatures(self) -> dict[str, Signature]:
        """Inputs and outputs of each part."""
        return {part: Signature.from_json(value) for part, value in self.manifest["signatures"].items()}

    def file(self, name: str, *, verify: bool = True) -> Path:
        """Return the path of a recorded file, after checking that it is there and unchanged.

        Raises:
            BundleError: never recorded, missing, or with another checksum than bundle.json says.
        """
        record = self.manifest["files"].get(name)
        path = self.path / name
        if record is None or not path.is_file():
            raise BundleError(f"{self.path} has no {name}; run the stage that writes it")
        if verify and (path.stat().st_size != record["size"] or files.sha256_of(path) != record["sha256"]):
            raise BundleError(f"{path} is not the file that bundle.json describes (checksum differs); make it again")
        return path

    def has(self, name: str) -> bool:
        """Say whether a file is recorded and there; its content is not checked."""
        return name in self.manifest["files"] and (self.path / name).is_file()

    def reload(self) -> None:
        """Read bundle.json again, for what another process may have recorded."""
        self.manifest = _read_manifest(self.path / _MANIFEST)

    def update(self, names: Iterable[str] = (), **sections: Any) -> None:
        """Record files (paths relative to the bundle) with size and checksum, set sections, write bundle.json.

        What another process has recorded in the meantime is kept.
        """
        records = {
            name: {"size": (self.path / name).stat().st_size, "sha256": files.sha256_of(self.path / name)}
            for name in names
        }
        with files.one_writer(self.path, lock=".bundle.lock", wait=True):
            if not self._is_new:
                self.reload()
            self._is_new = False
            self.manifest["files"].update(records)
            self.manifest.update(sections)
            files.write_json(self.path / _MANIFEST, self.manifest)


def _read_manifest(file: Path) -> dict[str, Any]:
    """Read bundle.json and check its shape, so that no stage has to."""
    try:
        manifest = json.loads(file.read_text())
        version = manifest["schema_version"]
        if version != SCHEMA_VERSION:
            raise BundleError(f"{file} has schema version {version}; this version reads {SCHEMA_VERSION}")
        for section in ("config", "signatures", "files", "tools", "export", "training"):
            if not isinstance(manifest.get(section, {}), dict):
                raise TypeError(f"{section} is no object")
        signatures = [Signature.from_json(value) for value in manifest["signatures"].values()]
        if not signatures or not manifest["config"]:
            raise ValueError("it names no part or no configuration")
        for name, record in manifest["files"].items():
            if not isinstance(record["size"], int) or not isinstance(record["sha256"], str):
                raise TypeError(f"the record of {name} is not a size and a checksum")
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name} lies outside the bundle")
    except BundleError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{file} is damaged ({type(error).__name__}: {error}); make the bundle again") from error
    return manifest


def tool_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape what a bundle holds."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "onnx", "onnxscript", "onnxruntime", "tensorrt-rtx-cu13-libs", "tensorrt"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
