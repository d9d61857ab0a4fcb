"""Finding special tokens in text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from myelin.model.tokenizers.vocabulary import SpecialToken

Fragment = int | tuple[int, int]
"""A special token's id, or the bounds of ordinary text between special tokens."""

# What C's isspace knows: the white space that a special token may swallow.
_SPACES = " \t\n\v\f\r"


class SpecialTokens:
    """Splits text at special tokens, as llama.cpp does: the longest token first, everywhere in the text, then the next.

    Args:
        tokens: All special tokens, longest first.
    """

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        self._tokens = tuple(token for token in tokens if token.text)
        self._by_initial: dict[str, dict[str, SpecialToken]] = {}
        for token in self._tokens:
            self._by_initial.setdefault(token.text[0], {}).setdefault(token.text, token)
        self._lengths = {initial: sorted({len(text) for text in group}) for initial, group in self._by_initial.items()}
        self._rank = {token.text: rank for rank, token in reversed(list(enumerate(self._tokens)))}

    def split(self, text: str, *, parse_hidden: bool, barriers: Sequence[int] = ()) -> list[Fragment]:
        """Cut ``text`` into special tokens and the text between them.

        Args:
            text: Any text.
            parse_hidden: Recognise control tokens too, not only user-defined ones.
            barriers: Ascending positions in ``text`` that no hidden token may span.
        """
        if not text:
            return []
        fragments: list[Fragment] = [(0, len(text))]
        for token in self._present(text, parse_hidden):
            blocked = barriers if token.hidden else ()
            cut: list[Fragment] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                else:
                    _cut(text, fragment, token, blocked, cut)
            fragments = cut
        return fragments

    def contained(self, text: str) -> list[str]:
        """Texts of the control tokens that are somewhere in ``text``."""
        return [token.text for token in self._present(text, True) if token.hidden]

    def unfinished(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a control token, so that what follows it could complete one."""
        longest = len(self._tokens[0].text) if self._tokens else 0
        tail = text[-longest:] if longest else ""
        for start, character in enumerate(tail):
            group = self._by_initial.get(character)
            if group is not None:
                rest = tail[start:]
                if any(
                    token.hidden and len(name) > len(rest) and name.startswith(rest) for name, token in group.items()
                ):
                    return True
        return False

    def _present(self, text: str, parse_hidden: bool) -> list[SpecialToken]:
        """The tokens that are somewhere in ``text``, longest first.

        Vocabularies have thousands: look at each only if its first character is in the text, and look the text up in
        them where that is less work.
        """
        found: list[SpecialToken] = []
        for initial, group in self._by_initial.items():
            occurrences = text.count(initial)
            if not occurrences:
                continue
            lengths = self._lengths[initial]
            if occurrences * len(lengths) < len(group):
                seen: set[str] = set()
                position = text.find(initial)
                while position >= 0:
                    seen.update(text[position : position + length] for length in lengths)
                    position = text.find(initial, position + 1)
                found.extend(group[piece] for piece in seen if piece in group)
            else:
                found.extend(token for piece, token in group.items() if piece in text)
        if not parse_hidden:
            found = [token for token in found if not token.hidden]
        found.sort(key=lambda token: self._rank[token.text])
        return found


def _cut(text: str, bounds: tuple[int, int], token: SpecialToken, barriers: Sequence[int], cut: list[Fragment]) -> None:
    """Append the pieces of ``text[bounds]`` around every occurrence of ``token``."""
    start, end = bounds
    position = start
    while True:
        match = text.find(token.text, position, end)
        if match < 0:
            break
        after = match + len(token.text)
        if barriers and spans(barriers, match, after):
            position = match + 1
            continue
        if match > start:
            cut.append((start, match))
        cut.append(token.id)
        start = after
        if token.strips_right:
            while start < end and text[start] in _SPACES:
                start += 1
        position = start
    if start < end:
        cut.append((start, end))


def spans(barriers: Sequence[int], start: int, end: int) -> bool:
    """Whether a barrier lies strictly between ``start`` and ``end``."""
    index = bisect_right(barriers, start)
    return index < len(barriers) and barriers[index] < end
