"""File names of split models: ``name-00001-of-00004.gguf``, counted from 1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from myelin.errors import ModelError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 1000


@dataclass(frozen=True, slots=True)
class SplitName:
    """A part's name: ``stem``, ``number`` from 1, and how many there are."""

    stem: str
    number: int
    count: int

    def sibling(self, number: int) -> str:
        """The name of part ``number``."""
        return f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf"


def split_name(name: str) -> SplitName | None:
    """Take a part's name to pieces; None where it isn't one."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return SplitName(match["stem"], int(match["number"]), int(match["count"]))


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of the model whose (first) file is ``name``; may hold a folder or a URL before the name.

    Raises:
        ModelError: It is a part, but not the first.
    """
    split = split_name(name)
    if split is None:
        return (name,)
    if split.number != 1 or not 1 <= split.count <= _MOST_PARTS:
        first = split.sibling(1).rsplit("/", 1)[-1]
        raise ModelError(
            f"{name.rsplit('/', 1)[-1]} is part {split.number} of {split.count} of a split model",
            f"Name the first part, {first}: the others are found beside it.",
            reason="model-part",
        )
    return tuple(split.sibling(number) for number in range(1, split.count + 1))
