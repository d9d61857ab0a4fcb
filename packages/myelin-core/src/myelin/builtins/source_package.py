"""Model source ``pkg:package/file.gguf``: a GGUF inside an installed Python package.

The package is located, never imported: model packages may do anything at import. A file too large for one package may
be cut into pieces ``file.gguf.part00``, ``.part01``, … that lie in the package, in its ``data`` folder, or in the same
places of packages named ``<package>_part1``, ``_part2``, …; they are read where they lie, as one file.
"""

from __future__ import annotations

import re
from importlib import metadata, util
from pathlib import Path, PurePosixPath

from myelin.errors import ModelError, UsageError
from myelin.model.local import JoinedFiles, open_all, open_files
from myelin.model.shard import ByteSource
from myelin.model.source import FetchProgress, ModelSource, SourceOptions
from myelin.plugin import hookimpl

_SPELLING = re.compile(r"pkg:(?P<package>[A-Za-z_][A-Za-z0-9_.]*)/(?P<file>.+)")
_MOST_PIECES = 1000


class PackageSource:
    """A file inside an installed package."""

    def __init__(self, package: str, file: str) -> None:
        self._package = package
        self._file = PurePosixPath(file)

    @property
    def uri(self) -> str:
        """``pkg:package/file``."""
        return f"pkg:{self._package}/{self._file}"

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Open the file, the parts of a split model, or the pieces of a cut one.

        Raises:
            ModelError: The package isn't installed, or has no such file.
        """
        folders = _folders(self._package)
        if not folders:
            raise ModelError(
                f"the package '{self._package}' is not installed",
                f"Install it: python -m pip install {self._package.split('.')[0].replace('_', '-')}",
                reason="model-missing",
            )
        for folder in folders:
            if (folder / self._file).is_file():
                return open_files(folder / self._file)
        pieces = _pieces(self._package, self._file)
        if not pieces:
            held = sorted(file.name for folder in folders for file in folder.rglob("*.gguf"))
            raise ModelError(
                f"the package '{self._package}' has no file {self._file}",
                f"It has {', '.join(held[:5])}." if held else "It has no .gguf file at all.",
                reason="model-missing",
            )
        return (JoinedFiles(open_all(pieces), self._file.name),)


def _folders(package: str) -> list[Path]:
    """Where a package's files are, without importing it: only its outermost name is looked up, the rest are folders."""
    outermost, *inner = package.split(".")
    try:
        spec = util.find_spec(outermost)
    except (ImportError, ValueError):
        return []
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [folder for location in locations if (folder := Path(location, *inner)).is_dir()]


def _pieces(package: str, file: PurePosixPath) -> list[Path]:
    """The pieces of a cut file, in order, as far as they go without a gap.

    Raises:
        ModelError: There are later pieces after a gap.
    """
    packages = [package]
    while len(packages) < _MOST_PIECES and _folders(f"{package}_part{len(packages)}"):
        packages.append(f"{package}_part{len(packages)}")
    places = [place for name in packages for folder in _folders(name) for place in (folder, folder / "data")]
    found: dict[int, Path] = {}
    suffix = re.compile(re.escape(file.name) + r"\.part(\d+)")
    for place in places:
        for candidate in sorted((place / file.parent).glob("*.part*")):
            match = suffix.fullmatch(candidate.name)
            if match is not None:
                found.setdefault(int(match[1]), candidate)
    first = min(found, default=0)
    for number in range(first, first + len(found)):
        if number not in found or first > 1:
            raise ModelError(
                f"piece {number if number not in found else 0} of {file.name} is missing",
                f"Install all packages of the model again: {_distributions(package)}",
                reason="model-part",
            )
    return [found[number] for number in sorted(found)]


def _distributions(package: str) -> str:
    """What the package's own distribution asks for, for a hint."""
    try:
        names = metadata.packages_distributions().get(package.split(".")[0], [])
    except Exception:  # a damaged installation must not hide the real error
        names = []
    return ", ".join(sorted(set(names))) or package


@hookimpl
def myelin_model_source(uri: str, options: SourceOptions) -> ModelSource | None:
    """``pkg:package/file``."""
    if not uri.startswith("pkg:"):
        return None
    match = _SPELLING.fullmatch(uri)
    if match is None or ".." in PurePosixPath(match["file"]).parts or match["file"].startswith("/"):
        raise UsageError(
            f"'{uri}' does not name a file in a package", "Write it as pkg:package/file.gguf", reason="model-source"
        )
    return PackageSource(match["package"], match["file"])
