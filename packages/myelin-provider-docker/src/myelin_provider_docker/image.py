"""The node image: what goes into its build, and the build itself.

The context is made in a temporary folder: the Dockerfile of this package, Myelin's own wheels, what to install, and the
exact version of everything that comes with it. Wheels of Myelin are made of the source tree where it is installed from
one, and left to pip's index where it is a release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import url2pathname

from myelin.plugin import ProviderError
from myelin_provider_docker.daemon import Daemon
from myelin_provider_docker.section import DockerSection, default_image
from myelin_provider_docker.troubles import explained

OURS = ("myelin-core", "myelin-worker-cpu")
FOR_CUDA = ("myelin-worker-triton",)
BUILD_TIMEOUT_S = 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """What to build.

    Attributes:
        cuda: With the GPU engine, and what it needs.
        tag: The image's name; this version's default where it is empty.
        base: An image with Python to build on, in place of the pinned one.
        wheels: A folder that has the wheels of everything, our own included; nothing is fetched then.
        packages: More requirements, such as those of other engines or transports.
    """

    cuda: bool = False
    tag: str = ""
    base: str = ""
    wheels: Path | None = None
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The image's name."""
        return self.tag or default_image(cuda=self.cuda)


def requirements(request: ImageRequest, version: str) -> list[str]:
    """What is installed in the image: Myelin's packages in the very version that runs here. Pure."""
    ours = OURS + (FOR_CUDA if request.cuda else ())
    return [*(f"{name}=={version}" for name in ours), *request.packages]


def build_arguments(request: ImageRequest) -> dict[str, str]:
    """The build's ``ARG`` values. Pure."""
    arguments = {"VARIANT": "cuda" if request.cuda else "cpu"}
    if request.base:
        arguments["BASE"] = request.base
    if request.wheels is not None:
        arguments["PIP_NO_INDEX"] = "1"
    return arguments


def image_labels(request: ImageRequest, version: str) -> dict[str, str]:
    """What the image says of itself. Pure."""
    return {
        "org.opencontainers.image.title": "Myelin node",
        "org.opencontainers.image.version": version,
        "myelin.variant": "cuda" if request.cuda else "cpu",
    }


def build(request: ImageRequest, section: DockerSection, say: Say, environment: Mapping[str, str] = os.environ) -> str:
    """Build the node image with the daemon that the section names. Blocking: minutes, where much is fetched.

    Args:
        say: Is told each line of the build.

    Returns:
        The image's id.

    Raises:
        ProviderError: A wheel can't be made, the daemon can't be reached, or the build failed; its last words are told.
    """
    version = metadata.version("myelin-core")
    daemon = Daemon(section.model_copy(update={"timeout_s": BUILD_TIMEOUT_S}), environment)
    try:
        daemon.information()  # before anything that takes long
        with TemporaryDirectory(prefix="myelin-image-") as folder, tempfile.TemporaryFile() as archive:
            context = Path(folder)
            fill_context(context, request, version, say)
            pack(context, archive)
            archive.seek(0)
            with explained(f"the image {request.name} could not be built", daemon.host):
                steps = daemon.api().build(
                    fileobj=archive,
                    custom_context=True,
                    tag=request.name,
                    buildargs=build_arguments(request),
                    labels=image_labels(request, version),
                    rm=True,
                    forcerm=True,
                    decode=True,
                )
                return _followed(steps, request.name, say)
    finally:
        daemon.close()


def _followed(steps: object, name: str, say: Say) -> str:
    """Tell each line of a build, and find out how it ended."""
    image, last = "", ""
    for step in steps:  # type: ignore[attr-defined]  # the SDK has no types
        for line in str(step.get("stream", "")).splitlines():
            if line.strip():
                last = line.strip()
                say(last)
        image = str((step.get("aux") or {}).get("ID", image))
        if error := step.get("error"):
            told = " ".join(str(error).split())
            raise ProviderError(
                f"the image {name} could not be built: {told}",
                f"the last that the build said: {last}" if last else "see the Docker daemon's log",
                reason="image-build",
            )
    return image


def fill_context(folder: Path, request: ImageRequest, version: str, say: Say) -> None:
    """Put all that the Dockerfile needs into a folder.

    Raises:
        ProviderError: There is no folder of wheels, or one can't be made.
    """
    for name, text in (("Dockerfile", dockerfile()), ("constraints.txt", constraints())):
        (folder / name).write_text(text, encoding="utf-8")
    wanted = requirements(request, version)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
    wheels = folder / "wheels"
    wheels.mkdir()
    if request.wheels is not None:
        found = sorted(request.wheels.glob("*.whl"))
        if not found:
            raise ProviderError(f"there are no wheels in {request.wheels}", "name a folder of .whl files")
        for wheel in found:
            shutil.copy2(wheel, wheels / wheel.name)
        return
    for name in OURS + (FOR_CUDA if request.cuda else ()):
        if (tree := source_tree(name)) is not None:
            say(f"making a wheel of {name} from {tree}")
            make_wheel(tree, wheels)


def dockerfile() -> str:
    """The Dockerfile of this package."""
    return (resources.files("myelin_provider_docker") / "node" / "Dockerfile").read_text(encoding="utf-8")


def constraints() -> str:
    """The version of every dependency that was tested: a file of this package, or of the tree that it runs from."""
    inside = resources.files("myelin_provider_docker") / "node" / "constraints.txt"
    if inside.is_file():
        return inside.read_text(encoding="utf-8")
    return (Path(__file__).parents[4] / "constraints.txt").read_text(encoding="utf-8")


def source_tree(distribution: str) -> Path | None:
    """The folder that a distribution is installed from, as PEP 610 tells it; None for a release."""
    with suppress(metadata.PackageNotFoundError, ValueError, AttributeError):
        told = json.loads(metadata.distribution(distribution).read_text("direct_url.json") or "{}")
        address = urlsplit(str(told.get("url", "")))
        folder = Path(url2pathname(address.path))
        if address.scheme == "file" and (folder / "pyproject.toml").is_file():
            return folder
    return None


def make_wheel(tree: Path, into: Path) -> None:
    """Make the wheel of a source tree, with pip.

    Raises:
        ProviderError: It failed; pip's last line is told.
    """
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(tree)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        hint = "or name a folder of wheels with --wheels"
        raise ProviderError(f"no wheel could be made of {tree}: {last}", hint, reason="image-build")


def pack(folder: Path, archive: object) -> None:
    """Write a folder as a tar file that depends on its contents alone: no owner, no time."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        entry.mode = 0o755 if entry.isdir() else 0o644
        return entry

    with tarfile.open(fileobj=archive, mode="w") as tar:  # type: ignore[call-overload]  # any file that can be written
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=plain)


def words_of(packages: Sequence[str] | None) -> tuple[str, ...]:
    """The requirements that a command line names."""
    return tuple(packages or ())
