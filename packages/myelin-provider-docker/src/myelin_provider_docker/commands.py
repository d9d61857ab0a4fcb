"""``myelin docker``: the node image. Also ``python -m myelin_provider_docker``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="The image of the nodes that are containers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """The image of the nodes that are containers."""


@app.command("build")
def build(
    cuda: Annotated[bool, typer.Option("--cuda", help="With the GPU engine.")] = False,
    tag: Annotated[str, typer.Option("--tag", metavar="NAME", help="The image's name.")] = "",
    base: Annotated[str, typer.Option("--base", metavar="IMAGE", help="An image with Python to build on.")] = "",
    wheels: Annotated[
        Path | None,
        typer.Option("--wheels", metavar="FOLDER", help="Wheels of everything; nothing is fetched then."),
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option("--package", metavar="REQUIREMENT", help="One more package; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="URL", help="The Docker daemon; DOCKER_HOST if empty.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say the image's name alone.")] = False,
) -> None:
    """Build the image of this version's nodes."""
    from myelin_provider_docker.image import ImageRequest, words_of
    from myelin_provider_docker.image import build as build_image
    from myelin_provider_docker.section import DockerSection

    def say(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    told = host or os.environ.get("MYELIN_DOCKER_HOST", "")
    request = ImageRequest(cuda, tag or os.environ.get("MYELIN_NODE_IMAGE", ""), base, wheels, words_of(package))
    build_image(request, DockerSection.model_validate({"host": told}), say)
    sys.stdout.write(f"{request.name}\n")
