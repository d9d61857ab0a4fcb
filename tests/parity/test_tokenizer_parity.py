"""Token ids and chat prompts equal to llama.cpp's, on the real models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myelin.model.chat_template import ChatTemplate, encode_chat
from myelin.model.gguf import read_facts
from myelin.model.local import LocalFile
from myelin.model.tokenizer import Tokenizer, build_tokenizer
from myelin_testkit.models import smollm2_path
from myelin_testkit.prompts import PROMPTS

pytestmark = pytest.mark.parity

RealModel = Any  # of conftest.py, which can't be imported

SCRIPTS = {
    "empty": "",
    "space": " ",
    "null": "\x00a\x00",
    "newlines": "\n\n\n a\r\n\r\nb\n",
    "spaces": "a  b   c    d" + " " * 40 + "e",
    "tabs": "\t\ta\t b\n\t\tc",
    "odd white space": "a\u00a0b\u2003c\u3000d\u1680e\u2028f\x85g\x1ch\x0bi",
    "digits": "1 12 123 1234 3.14159 ١٢٣ ²³ ½ Ⅷ 1,000,000",
    "contractions": "I'm you're THEY'LL don't it's 'tis O'Neill 'S",
    "thai": "ภาษาไทยไม่มีการเว้นวรรคระหว่างคำ",
    "tamil": "தமிழ் மொழி",
    "hebrew": "שָׁלוֹם עוֹלָם",
    "traditional chinese": "春眠不覺曉，處處聞啼鳥。",
    "hiragana": "いろはにほへとちりぬるを",
    "combining": "e\u0301 ñ n\u0303 a\u030a\u0323",
    "zero width joiners": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ❤️",
    "private and unassigned": "\ue000\U000f0000\u0378\ufdd0\uffff",
    "unicode 16": "\u1c89\u1c8a \U00016d43\U00016d44 \U0001fae9",
    "special tokens in text": "<|im_start|>system\n<|im_end|><bos></s><eos><unk><pad><|endoftext|><0x0A>",
    "html": "<table><tr><td>a</td></tr></table> <b>x</b> <s>y</s>",
    "escaped space": "a▁b ▁▁ c",
    "almost special": "<|im_start|><|im_end| ><|im_ end|> <bo s>",
    "code": "for (int i = 0; i < n; ++i) {\n\tx[i] = y[i] * 0x1F; // ok\n}\n\n\n",
    "url": "https://example.org/a_b/c-d?e=f&g=%20h#i",
    "repeated": "ha" * 300 + "a" * 300,
    "replacement": "\ufffd\ufffd a",
}

ALPHABETS = [
    st.characters(codec="utf-8"),
    st.sampled_from(" \n\t\r  ab12'\"<|>_/.,;:!?~$"),
    st.characters(min_codepoint=0x370, max_codepoint=0xE80, codec="utf-8"),
    st.characters(min_codepoint=0x3000, max_codepoint=0xFFFF, codec="utf-8"),
    st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF),
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<bos>", "</s>", "<table>", "<unused5>", "▁", "\u200d", "'s", "'LL"]
    ),
]
TEXTS = st.lists(st.one_of(ALPHABETS), max_size=40).map("".join)


def tokenizer_of(path: Path) -> Tokenizer:
    return build_tokenizer(read_facts([LocalFile(path)]))


@pytest.fixture(scope="module")
def tokenizer(real_model: RealModel) -> Tokenizer:
    return tokenizer_of(real_model.path)


def check(real_model: RealModel, tokenizer: Tokenizer, text: str) -> None:
    for special in (False, True):
        ours = tokenizer.encode(text, add_special=special, parse_special=special)
        assert ours == real_model.oracle.tokenize(text, add_special=special, parse_special=special), repr(text)


@pytest.mark.parametrize("name", [*PROMPTS, *SCRIPTS])
def test_the_ids_of_a_corpus_are_llama_cpp_s(real_model: RealModel, tokenizer: Tokenizer, name: str) -> None:
    check(real_model, tokenizer, PROMPTS.get(name) or SCRIPTS[name])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_the_ids_of_any_text_are_llama_cpp_s(real_model: RealModel, tokenizer: Tokenizer, text: str) -> None:
    check(real_model, tokenizer, text)


def test_the_ids_of_a_long_text_are_llama_cpp_s(real_model: RealModel, tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    words = " ".join([*PROMPTS.values(), *SCRIPTS.values()]).split(" ")
    check(real_model, tokenizer, " ".join(draw.choice(words) for _ in range(20_000)))


def test_every_character_has_llama_cpp_s_ids(real_model: RealModel, tokenizer: Tokenizer) -> None:
    for first in range(0, 0x20000, 0x800):
        characters = [chr(code) for code in range(first, first + 0x800) if not 0xD800 <= code < 0xE000]
        check(real_model, tokenizer, " a".join(characters) + "1".join(characters))


def test_the_bytes_of_every_token_are_llama_cpp_s(real_model: RealModel, tokenizer: Tokenizer) -> None:
    # Joined behind a letter: llama.cpp takes a space off the beginning, and invalid bytes come back as U+FFFD.
    letter = tokenizer.encode("a", add_special=False)
    plain = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token)]
    for first in range(0, len(plain), 4096):
        ids = letter + plain[first : first + 4096]
        ours = b"".join(map(tokenizer.token_bytes, ids))
        theirs = real_model.oracle.detokenize(ids)
        assert (
            ours.decode("utf-8", "ignore") == theirs.replace("\ufffd", "") or ours.decode("utf-8", "replace") == theirs
        )


CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Wörter\n\n你好 😀  "}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.\n```python\nprint(3)\n```"},
        {"role": "user", "content": "<b>four</b> & 'five' \"six\""},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_chat_is_rendered_and_encoded_as_llama_cpp_does(
    messages: list[dict[str, str]], real_model: RealModel, tokenizer: Tokenizer
) -> None:
    facts = read_facts([LocalFile(real_model.path)])
    template = ChatTemplate.from_facts(facts, tokenizer)
    if real_model.name == "gemma3":
        assert template is None  # a base model: it has no template
        return
    assert template is not None
    theirs = real_model.oracle.apply_template(messages)
    assert template.render(messages) == theirs
    expected = real_model.oracle.tokenize(theirs, add_special=True, parse_special=True)
    assert encode_chat(template, tokenizer, messages) == expected


def test_smollm2_is_what_we_think_it_is() -> None:
    tokenizer = tokenizer_of(smollm2_path())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert {0, 2} <= tokenizer.end_ids
    assert tokenizer.vocab_size == 49_152


def test_gemma_3_is_what_we_think_it_is(gemma3: Path) -> None:
    tokenizer = tokenizer_of(gemma3)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (2, 1, True)
    assert tokenizer.end_ids == {1, 106}
    assert tokenizer.vocab_size == 262_144
