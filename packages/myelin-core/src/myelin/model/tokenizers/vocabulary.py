"""The vocabulary of a header: the tokens' bytes, what kind each token is, and which ids are special.

The rules are llama.cpp's (``src/llama-vocab.cpp``), since ids must equal its ids; where it guesses an id for a missing
key, we have none instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from myelin.errors import ModelError
from myelin.model.strings import StringArray


class Kind(IntFlag):
    """What a token is. A token may be of two kinds, where its text makes it a control token whatever the file says."""

    NONE = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    UNUSED = 16
    BYTE = 32


# GGUF's ``tokenizer.ggml.token_type``, by number; others are of no kind.
_KINDS = {1: Kind.NORMAL, 2: Kind.UNKNOWN, 3: Kind.CONTROL, 4: Kind.USER_DEFINED, 5: Kind.UNUSED, 6: Kind.BYTE}

HIDDEN = Kind.CONTROL | Kind.UNKNOWN
"""Kinds that are recognised in text only on request, and have no text of their own in an answer."""

# Texts that end a generation, whatever id and type the file gives them.
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# Fill-in-the-middle markers: the key that names the token, the texts it is known by, and whether it ends a generation.
_INFILL_TEXTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    (
        "fim_pre_token_id",
        (
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ),
        False,
    ),
    (
        "fim_suf_token_id",
        (
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ),
        False,
    ),
    (
        "fim_mid_token_id",
        (
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ),
        False,
    ),
    ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), True),
    ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), True),
    ("fim_sep_token_id", ("<|file_sep|>",), True),
)

# Control tokens of one family that its answers must show.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is recognised as a whole in text.

    Attributes:
        id, text: The token.
        hidden: Recognised only where special tokens are parsed.
        strips_right: White space after it is swallowed.
    """

    id: int
    text: str
    hidden: bool
    strips_right: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        model: ``tokenizer.ggml.model``: ``gpt2``, ``llama``.
        pieces: Each token's bytes, as the file has them (byte-level text of ``gpt2``, U+2581 for a space of ``llama``).
        ids: The token of each piece; where a piece is there twice, the first.
        kinds: ``uint8[n]``: :class:`Kind` of each token.
        specials: Tokens recognised as a whole, longest first.
        bos_id, eos_id, unknown_id: None where the model has none.
        add_bos, add_eos: Whether a prompt begins and ends with them.
        end_ids: Tokens that end a generation.
    """

    model: str
    pieces: Sequence[bytes]
    ids: Mapping[bytes, int]
    kinds: NDArray[np.uint8]
    specials: tuple[SpecialToken, ...]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    end_ids: frozenset[int]

    def is_hidden(self, token: int) -> bool:
        """Whether the token is a control token or the unknown token."""
        return bool(self.kinds[token] & HIDDEN)

    def is_silent(self, token: int) -> bool:
        """Whether the token has no text in an answer: hidden ones, but for text that merely looks like an end."""
        kind = int(self.kinds[token])
        return bool(kind & HIDDEN) and not (kind & Kind.USER_DEFINED and token not in self.end_ids)


def read_vocabulary(metadata: Mapping[str, object], *, add_bos_by_default: bool) -> Vocabulary:
    """The vocabulary of a header.

    Args:
        metadata: The header's keys.
        add_bos_by_default: Whether a prompt begins with BOS if the header doesn't say.

    Raises:
        ModelError: There are no tokens, or a key has a value of the wrong kind.
    """
    model = metadata.get("tokenizer.ggml.model")
    pieces = _pieces(metadata)
    count = len(pieces)
    # A later duplicate never hides an earlier token: fill from the end.
    ids = dict(zip(reversed(pieces), range(count - 1, -1, -1), strict=True))
    kinds = _kinds(metadata, count)

    def named(key: str, default: int | None = None) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise _malformed(key, "is not a token id")
        return value if 0 <= value < count else default

    def flag(key: str, default: bool) -> bool:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _malformed(key, "is not true or false")
        return value

    def usual(token: int) -> int | None:
        """SentencePiece's usual place of a special token, if that is what is there."""
        return token if model == "llama" and token < count and kinds[token] & HIDDEN else None

    bos_id = named("bos_token_id", usual(1))
    eos_id = named("eos_token_id", usual(2))
    unknown_id = named("unknown_token_id", usual(0))
    end_ids = _end_ids(ids, kinds, [named("eot_token_id"), named("eom_token_id")], named)
    if eos_id is not None:
        end_ids.add(eos_id)
    name = metadata.get("general.name")
    return Vocabulary(
        model=model if isinstance(model, str) else "",
        pieces=pieces,
        ids=ids,
        kinds=kinds,
        specials=_specials(pieces, kinds, name if isinstance(name, str) else ""),
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=unknown_id,
        add_bos=flag("add_bos_token", add_bos_by_default) and bos_id is not None,
        add_eos=flag("add_eos_token", False) and eos_id is not None,
        end_ids=frozenset(end_ids),
    )


def raw_strings(strings: object, key: str) -> list[bytes]:
    """The bytes of every string of a header's array.

    Raises:
        ModelError: It isn't an array of strings.
    """
    if isinstance(strings, StringArray):
        return list(strings.raws())
    if isinstance(strings, Sequence) and not isinstance(strings, str | bytes):
        texts: list[bytes] = []
        for text in strings:
            if not isinstance(text, str):
                raise _malformed(key, "is not an array of strings")
            texts.append(text.encode("utf-8", "surrogatepass"))
        return texts
    raise _malformed(key, "is not an array of strings")


def _pieces(metadata: Mapping[str, object]) -> list[bytes]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError(
            "the model has no vocabulary (tokenizer.ggml.tokens)",
            "Give a tokenizer.json, or use a file that holds its tokenizer.",
            reason="tokenizer-missing",
        )
    pieces = raw_strings(tokens, "tokens")
    if b"" in pieces:
        pieces = [piece or b"[EMPTY_%d]" % index for index, piece in enumerate(pieces)]
    return pieces


def _kinds(metadata: Mapping[str, object], count: int) -> NDArray[np.uint8]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return np.full(count, Kind.NORMAL, dtype=np.uint8)
    numbers = np.asarray(types)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise _malformed("token_type", "is not an array of integers")
    if len(numbers) < count:
        raise _malformed("token_type", f"has {len(numbers)} entries for {count} tokens")
    table = np.zeros(7, dtype=np.uint8)
    for number, kind in _KINDS.items():
        table[number] = kind
    numbers = numbers[:count]
    return table[np.where((numbers >= 0) & (numbers < len(table)), numbers, 0)]


def _end_ids(
    ids: Mapping[bytes, int],
    kinds: NDArray[np.uint8],
    named_ends: Iterable[int | None],
    named: Callable[[str], int | None],
) -> set[int]:
    """Collect the tokens that end a generation, and make control tokens of those whose text says that they are."""
    ends = {token for token in named_ends if token is not None}
    for key, texts, ends_generation in _INFILL_TEXTS:
        token = named(key)
        if token is None:
            token = _first(ids, texts)
            if token is None:
                continue
            kinds[token] |= Kind.CONTROL
        if ends_generation:
            ends.add(token)
    by_text: dict[str, int] = {}
    for text in _END_TEXTS:
        token = _first(ids, (text,))
        if token is None:
            continue
        by_text[text] = token
        # «</s>» is also HTML. A vocabulary that lists it as ordinary text means that.
        if not (text == "</s>" and kinds[token] == Kind.USER_DEFINED):
            ends.add(token)
        kinds[token] |= Kind.CONTROL
    for text in _SHOWN_TEXTS:
        token = _first(ids, (text,))
        if token is not None:
            kinds[token] = Kind.USER_DEFINED
    # Where a call or a return ends the turn, <|end|> only ends one message of several.
    calls = not by_text.keys().isdisjoint({"<|call|>", "<|calls|>"})
    finals = not by_text.keys().isdisjoint({"<|return|>", "<|flush|>"})
    if "<|end|>" in by_text and calls and finals:
        ends.discard(by_text["<|end|>"])
        kinds[by_text["<|end|>"]] = Kind.USER_DEFINED
    if "<|tool_response>" in by_text and "</s>" in by_text:
        ends.discard(by_text["</s>"])
        kinds[by_text["</s>"]] = Kind.NORMAL
    return ends


def _first(ids: Mapping[bytes, int], texts: Iterable[str]) -> int | None:
    for text in texts:
        token = ids.get(text.encode())
        if token is not None:
            return token
    return None


def _specials(pieces: Sequence[bytes], kinds: NDArray[np.uint8], name: str) -> tuple[SpecialToken, ...]:
    # The file has no room for this attribute; Phi-3's tokenizer swallows white space after its special tokens.
    swallows = any(family in name.lower() for family in ("phi-3", "phi3"))
    found: list[tuple[int, SpecialToken]] = []
    for token in np.flatnonzero(kinds & (Kind.CONTROL | Kind.USER_DEFINED | Kind.UNKNOWN)).tolist():
        piece = pieces[token]
        text = piece.decode("utf-8", "replace")
        strips = swallows and text not in ("<unk>", "<s>", "<|endoftext|>")
        found.append((len(piece), SpecialToken(token, text, bool(kinds[token] & HIDDEN), strips)))
    found.sort(key=lambda entry: -entry[0])
    return tuple(special for _, special in found)


def _malformed(key: str, why: str) -> ModelError:
    return ModelError(
        f"the model's tokenizer.ggml.{key} {why}", "The file is damaged: fetch it again.", reason="tokenizer-malformed"
    )
