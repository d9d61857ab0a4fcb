r"""How text is split into words before a ``gpt2`` vocabulary's pairs merge: a rule for each ``tokenizer.ggml.pre``.

A rule is a list of patterns, each of which cuts every piece that the one before has left: matches become words, and so
does what is between them. They are written for Oniguruma and mean what llama.cpp makes of the name, which is not always
what the model's own ``tokenizer.json`` says: it folds all letters into one class, for one thing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What Unicode 16 added. The library's Oniguruma knows it; llama.cpp's tables end with Unicode 15.1 and take it for
# unassigned. Blocks that were new as a whole are written as a whole.
_UNKNOWN_TO_LLAMA_CPP = (
    "\u0897\u1b4e\u1b4f\u1b7f\u1c89\u1c8a\u2427-\u2429\u31e4\u31e5\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105ff"
    "\U00010d40-\U00010d8f\U00010ec2-\U00010ec4\U00010efc\U00011380-\U000113ff\U000116d0-\U000116ff"
    "\U00011bc0-\U00011bff\U00011f5a\U00013460-\U000143ff\U00016100-\U0001613f\U00016d40-\U00016d7f\U00018cff"
    "\U0001cc00-\U0001cebf\U0001e5d0-\U0001e5ff\U0001f8b2-\U0001f8bb\U0001f8c0\U0001f8c1\U0001fa89\U0001fa8f"
    "\U0001fabe\U0001fac6\U0001fadc\U0001fadf\U0001fae9\U0001fbcb-\U0001fbef"
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """One way to split.

    Attributes:
        patterns: Applied one after the other.
        ignore_merges: A word that is a token as a whole is that token, however its pairs would merge.
        add_bos: A prompt begins with BOS unless the header says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def library_patterns(self) -> tuple[str, ...]:
        """The patterns with each category reduced to the characters that llama.cpp has in it."""
        known = rf"[\g<0>&&[^{_UNKNOWN_TO_LLAMA_CPP}]]"
        return tuple(re.sub(r"\\p\{\w+\}", known, pattern) for pattern in self.patterns)


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
# Without the white space in it, which llama.cpp has replaced by then.
_BROAD_CJK = "[[一-龥\u0800-一가-\ud7ff]&&\\S]+"
_ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_SIGNED_WORD = _ASCII_SIGN + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"

_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(upper: str, lower: str, ending: str) -> str:
    return rf"{_LEAD}{upper}*{lower}+{ending}|{_LEAD}{upper}+{lower}*{ending}"


_TEKKEN = rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}|{_SIGNS_SLASH}|{_SPACES}"
_GPT4O = rf"{_cased(_UPPER, _LOWER, _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_SPACES}"
_LETTERS_MARKS = r"[\p{L}\p{M}]"
_AYA = rf"{_LEAD}{_LETTERS_MARKS}+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_SPACES}"
_YOUTU = rf"{_LEAD}{_LETTERS_MARKS}+{_CONTRACTION}?|\p{{N}}|{_SIGNS_SLASH}|{_SPACES}"

_HAN = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\U0002f800-\U0002fa1f"
)
_KIMI = rf"[{_HAN}]+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
# Cased letters that its list leaves out: some scripts, and what Unicode 11 hadn't got.
_NOT_IN_DEEPSEEK_LLM = (
    "\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua78f-\ua7ff\uab30-\uab6f\U00010570-\U000105bf"
    "\U00016e40-\U00016e7f\U0001d400-\U0001d7ff\U0001df00-\U0001dfff"
)
_CASCADE = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_FINNISH = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DIGITS_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
# llama.cpp leaves the first digits with what is before them.
_TEXT_AND_DIGITS = r"[^\p{N}]*" + _DIGITS_FROM_THE_RIGHT

_RULES: tuple[tuple[tuple[str, ...], SplitRule], ...] = (
    (
        ("default",),
        SplitRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        (
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ),
        SplitRule((_GPT2,)),
    ),
    (
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ),
        SplitRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), SplitRule((_LLAMA3,))),
    (
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        SplitRule((r"\p{N}", _GPT2)),
    ),
    (
        (
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ),
        SplitRule((_QWEN2,)),
    ),
    (
        ("qwen35",),
        SplitRule(
            (rf"{_CONTRACTION}|{_LEAD}{_LETTERS_MARKS}+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
        ),
    ),
    (("ufakzeka",), SplitRule((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",))),
    (("laguna",), SplitRule((r"[^\n]+|[\n]+", _QWEN2))),
    (
        ("seed-coder",),
        SplitRule((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ),
    (
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        SplitRule(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"
                rf"{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        ("exaone-moe",),
        SplitRule(
            (
                rf"{_CONTRACTION}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        ("minicpm5",),
        SplitRule(
            (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"),
            ignore_merges=True,
        ),
    ),
    (
        ("jais-2",),
        SplitRule((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_CASCADE}|\s{{1,2}}(?!\S)|\s",)),
    ),
    (
        ("deepseek-llm",),
        SplitRule(
            (
                r"[\r\n]",
                rf"\s?[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_NOT_IN_DEEPSEEK_LLM}]]+",
                "\\s?[!-/:-~！-／：-～‘-‟、。]+",
                r"\s+\z",
                _BROAD_CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        ("deepseek-coder",),
        SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _BROAD_CJK, r"\p{N}")),
    ),
    (
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        SplitRule((r"\p{N}{1,3}", _CJK, rf"{_SIGNED_WORD}[\r\n]*|{_SPACES}")),
    ),
    (
        ("spark2_5",),
        SplitRule((r"\p{N}{1,3}", _CJK, rf"{_SIGNED_WORD}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ),
    (
        ("afmoe",),
        SplitRule(
            (
                _TEXT_AND_DIGITS,
                "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
                "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
                rf"{_SIGNED_WORD}[\r\n]*|{_SPACES}",
            )
        ),
    ),
    (
        ("youtu",),
        SplitRule(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK,
                _YOUTU,
            ),
            ignore_merges=True,
        ),
    ),
    (
        ("falcon",),
        SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ),
    (("tekken",), SplitRule((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), SplitRule((_GPT4O,))),
    (("tiny_aya", "cohere2moe"), SplitRule((_TEXT_AND_DIGITS, _AYA))),
    (("poro-chat", "bloom", "gpt3-finnish"), SplitRule((_FINNISH,))),
    (("viking",), SplitRule((_FINNISH, r"\p{N}"))),
    (("superbpe",), SplitRule((r"\p{N}+", r"[\s\S]+?(?=(?:[0-9]{3})+(?![0-9]))"))),
    (("kimi-k2",), SplitRule((_KIMI,))),
)

SPLIT_RULES: dict[str, SplitRule] = {name: rule for names, rule in _RULES for name in names}
"""The rule of each name that ``tokenizer.ggml.pre`` may have."""
