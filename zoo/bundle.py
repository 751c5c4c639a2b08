"""The bundle: the folder that carries one model from training to engines.

    bundle.json                what is in it: schema, model configuration, signatures, checksums, tool versions
    model.safetensors          weights
    semantic_ids.safetensors   item <-> code table and trie
    onnx/<part>-<dtype>.onnx   one graph a part and dtype (weights of large ones beside it in <part>-<dtype>.onnx.data)
    engines/<flavor>-<version>/<target>/<part>-<dtype>-L<length>.engine, and .json beside each
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

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

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
        bundle = cls(Path(path), manifest)
        bundle.path.mkdir(parents=True, exist_ok=True)
        return bundle

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
        try:
            manifest = json.loads(file.read_text())
            version = manifest["schema_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{file} is damaged ({error}); make the bundle again") from error
        if version != SCHEMA_VERSION:
            raise BundleError(f"{file} has schema version {version}; this version reads {SCHEMA_VERSION}")
        return cls(path, manifest)

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

    def update(self, names: Iterable[str] = (), **sections: Any) -> None:
        """Record files (paths relative to the bundle) with size and checksum, set sections, write bundle.json."""
        for name in names:
            path = self.path / name
            self.manifest["files"][name] = {"size": path.stat().st_size, "sha256": files.sha256_of(path)}
        self.manifest.update(sections)
        files.write_json(self.path / _MANIFEST, self.manifest)


def tool_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape what a bundle holds."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "onnx", "onnxscript", "onnxruntime", "tensorrt-rtx-cu13-libs", "tensorrt"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
