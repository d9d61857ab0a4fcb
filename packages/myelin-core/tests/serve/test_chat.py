"""Conversations: commands, history, what doesn't fit, and prompts of one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from scripted_pipeline import ByteTokenizer, ScriptedPipeline

from myelin.errors import RequestError
from myelin.serve.chat import ChatModel, Command, Conversation, PipelineModel, read_line
from myelin.serve.prompts import Prompter
from myelin.values import SamplingParams


@pytest.fixture(autouse=True)
def plain_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template of ``role=content`` in brackets."""

    def encode(template: object, tokenizer: ByteTokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return tokenizer.encode("".join(f"[{message['role']}={message['content']}]" for message in messages) + ">")

    monkeypatch.setattr("myelin.serve.prompts.encode_chat", encode)


def prompter(max_context: int = 1000, template: object = "any") -> Prompter:
    return Prompter(ByteTokenizer(), template, max_context)


def text(prompt: tuple[int, ...]) -> str:
    return bytes(prompt).decode()


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("hello", "hello"),
        ("  hello  \n", "hello"),
        ("", ""),
        ("/exit", Command.EXIT),
        ("/QUIT\n", Command.EXIT),
        ("/reset", Command.RESET),
        ("/help", Command.HELP),
        ("//etc/hosts", "/etc/hosts"),
    ],
)
def test_lines_are_commands_or_words(line: str, meaning: object) -> None:
    assert read_line(line) == meaning


def test_an_unknown_command_is_not_said_to_the_model() -> None:
    with pytest.raises(RequestError, match="There is no command /reste"):
        read_line("/reste now")


def test_history_grows_with_answers_alone() -> None:
    conversation = Conversation(system="be brief")
    beforehand = {"role": "system", "content": "be brief"}
    one, again = ({"role": "user", "content": word} for word in ("one", "again"))
    assert conversation.ask("one") == [beforehand, one]
    assert conversation.ask("again") == [beforehand, again]
    conversation.answered("again", "sure")
    assert conversation.ask("one") == [beforehand, again, {"role": "assistant", "content": "sure"}, one]
    conversation.reset()
    assert conversation.ask("one") == [beforehand, one]
    assert Conversation().ask("one") == [one]


async def answers(model: ChatModel, conversation: Conversation, question: str) -> str:
    return "".join([piece async for piece in model.answer(conversation.ask(question))])


async def test_a_conversation_that_does_not_fit_any_more_says_how_to_go_on() -> None:
    model = PipelineModel(ScriptedPipeline(), prompter(max_context=40), max_tokens=100)
    conversation = Conversation()
    conversation.answered("x" * 10, "y" * 10)
    with pytest.raises(RequestError, match="tokens, and the context 40 with the answer") as caught:
        await answers(model, conversation, "z" * 10)
    assert "/reset" in conversation.hint(caught.value)
    conversation.reset()
    assert await answers(model, conversation, "z" * 10) == "<[user=zzzzzzzzzz]>>"
    with pytest.raises(RequestError) as caught:
        await answers(model, conversation, "z" * 40)
    assert "shorten" in conversation.hint(caught.value)


async def test_answers_are_asked_for_as_they_were_set() -> None:
    pipeline = ScriptedPipeline(lambda text: "one END")
    sampling = SamplingParams(0.5, seed=3)
    model = PipelineModel(pipeline, prompter(), max_tokens=9, sampling=sampling, stop=("END",))
    assert await answers(model, Conversation(), "q") == "one "
    assert (pipeline.calls[0].max_tokens, pipeline.calls[0].sampling) == (9, sampling)


def test_one_question_goes_through_the_template_unless_raw() -> None:
    assert text(prompter().one("hi")) == "[user=hi]>"
    assert text(prompter().one("hi", system="s")) == "[system=s][user=hi]>"
    assert text(prompter().one("hi", raw=True)) == "hi"
    assert text(prompter(template=None).one("hi")) == "hi"


def test_raw_text_may_hold_control_tokens_and_other_text_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def encode(self: ByteTokenizer, words: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        asked.append((add_special, parse_special))
        return [1]

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    prompter(template=None).one("hi", raw=True)
    prompter(template=None).one("hi")
    assert asked == [(True, True), (True, False)]


@pytest.mark.parametrize("length", [9, 10, 11])
def test_a_prompt_leaves_room_for_one_token(length: int) -> None:
    if length < 10:
        assert len(prompter(max_context=10).one("x" * length, raw=True)) == length
    else:
        with pytest.raises(RequestError) as caught:
            prompter(max_context=10).one("x" * length, raw=True)
        assert str(length) in caught.value.message
        assert "10" in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        prompter().one("", raw=True)


def test_a_conversation_needs_a_template() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        prompter(template=None).one("hi", system="s")
    with pytest.raises(RequestError, match="no chat template"):
        prompter(template=None).conversation([{"role": "user", "content": "hi"}])
