"""docs/prompt-rpc.md names exactly the fields of the prompt RPC's messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

from myelin.serve.prompt_protocol import MAX_LINE_BYTES, SubmitPrompt, done, fault, parse_request, text_delta
from myelin.values import FinishReason

PAGE = (Path(__file__).parents[2] / "docs" / "prompt-rpc.md").read_text(encoding="utf-8")


def fields_of(message: str) -> list[str]:
    section = PAGE.split(f"### `{message}`", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_a_request_has_the_fields_of_the_page() -> None:
    assert fields_of("SubmitPrompt") == list(SubmitPrompt.model_fields)


def test_answers_have_the_fields_of_the_page() -> None:
    for line in (text_delta(1, "x"), done(1, "x", 1, 1, FinishReason.STOP), fault(1, "x", "y", "z")):
        ((message, body),) = json.loads(line).items()
        assert fields_of(message) == list(body)


def test_the_example_is_a_real_exchange() -> None:
    example = PAGE.split("```")[1].strip().splitlines()
    assert parse_request(example[0].removeprefix("→ ").encode()).request_id == "r1"
    kinds = [next(iter(json.loads(line.removeprefix("← ")))) for line in example[1:]]
    assert kinds == ["TextDelta", "TextDelta", "Done"]
    answer = json.loads(example[-1].removeprefix("← "))["Done"]
    assert list(answer) == fields_of("Done")


def test_the_limit_is_the_real_one() -> None:
    assert f"longer than {MAX_LINE_BYTES >> 20} MiB" in PAGE
