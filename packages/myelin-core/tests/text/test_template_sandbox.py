"""A hostile template: one error, in bounded time and memory."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable

import pytest

from myelin.errors import ModelError, RequestError
from myelin.model.chat_template import ChatTemplate
from myelin.model.facts import ModelFacts
from myelin.model.template_sandbox import SECONDS
from myelin.model.tokenizer import Tokenizer, build_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOO_MUCH = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "nested loops that print": "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}",
    "filtered loop": "{% for i in range(99999) if i in range(99999)|list %}{% endfor %}",
    "multiplied text": "{{ 'a' * 10**10 }}",
    "multiplied from the left": "{% set x = 10**10 * 'a' %}",
    "multiplied list": "{{ [1] * 10**10 }}",
    "joined to itself": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added to itself": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list of itself": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "tuple of itself": "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}",
    "dict of itself": "{% set n = namespace() %}{% for i in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}",
    "own arguments": "{% macro f(n) %}{% if n %}{{ f(n-1, varargs, varargs) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "list of a long text": "{% set s = 'a' * 1000000 %}{{ [s] * 1000000 }}",
    "doubling macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling block": "{% set x %}{% for i in range(99999) %}" + "A" * 9999 + "{% endfor %}{% endset %}",
    "endless output": "{% for i in range(99999) %}" + "A" * 9999 + "{% endfor %}",
    "center": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9, 'y') }}",
    "center filter": "{{ 'x' | center(10**9) }}",
    "mapped center": "{{ ['x'] | map('center', 10**9) | list }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent many": "{% set s = 'a' * 1000000 %}{{ ('%(a)s' * 1000) % dict(a=s) }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format many": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "format map": "{{ ('{a}' * 100000).format_map({'a': 'b' * 1000000}) }}",
    "power": "{{ 2 ** (2 ** 60) }}",
    "power of powers": "{{ (2 ** 4000) ** 4000 }}",
    "number from text": "{{ ('f' * 1000000) | int(0, 16) }}",
    "long range": "{{ range(10**9) | list }}",
    "range joined": "{{ range(99999) | list | join('x' * 1000000) }}",
    "text joined": "{{ ('x' * 1000000).join(range(99999) | map('string')) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace nothing": "{{ ('a' * 1000000) | replace('', 'b' * 1000) }}",
    "indent": "{{ 'a\n' * 1000 | indent(10**9) }}",
    "indent by text": "{{ ('a\n' * 100000) | indent('b' * 100000) }}",
    "json indent": "{{ [[1]] | tojson(indent=10**9) }}",
    "json separators": "{{ ([1] * 100000) | tojson(separators=('x' * 100000, '')) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 100000) | sum(start=[]) | length }}",
    "many slices": "{% set s = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(60)),
    "long text by character": "{% for c in 'a' * 4000000 %}{{ c }}{% endfor %}",
    "date": "{{ strftime_now('%1000000d') }}",
    "source": "x" * (1 << 20),
}
FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__ }}",
    "encode": "{{ 'a'.encode() }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "fromkeys": "{{ dict.fromkeys([1]) }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(a=1) }}",
    "nested format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as y %}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long sum": "{{ " + "+".join(["1"] * 5000) + " }}",
    "endless macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "endless loop": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "batch": "{{ [1] | batch(10**9, 1) | list }}",
}


@pytest.fixture
def tokenizer(byte_level: Callable[..., ModelFacts]) -> Tokenizer:
    return build_tokenizer(byte_level())


UNSEEN = {
    "class": "{{ ''.__class__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "attribute in format": "{{ '{0.__class__}'.format(1) }}",
    "format through a map": "{% set f = ['{0.__class__}'] | map(attribute='format') | first %}{{ f(1) }}",
    "own": "{{ messages.__len__ }}",
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_python_s_internals_are_not_there(tokenizer: Tokenizer, kind: str) -> None:
    assert ChatTemplate(UNSEEN[kind], tokenizer).render(MESSAGES) == ""


def stopped(source: str, tokenizer: Tokenizer) -> RequestError | ModelError:
    """The error that it ends with, within its time (and a little for the machine's sake)."""
    start = time.perf_counter()
    with pytest.raises((RequestError, ModelError)) as caught:
        ChatTemplate(source, tokenizer).render(MESSAGES)
    assert time.perf_counter() - start < 12 * SECONDS
    error = caught.value
    assert isinstance(error, RequestError | ModelError)
    return error


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_template_that_takes_too_much_is_stopped(tokenizer: Tokenizer, kind: str) -> None:
    error = stopped(TOO_MUCH[kind], tokenizer)
    assert error.reason == ("template-broken" if kind == "source" else "template-limit")


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_a_template_that_does_what_it_may_not_is_stopped(tokenizer: Tokenizer, kind: str) -> None:
    assert stopped(FORBIDDEN[kind], tokenizer).reason in ("template-broken", "template-failed")


@pytest.mark.parametrize("kind", ["joined to itself", "many slices", "endless output", "percent many"])
def test_memory_is_bounded(tokenizer: Tokenizer, kind: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            ChatTemplate(TOO_MUCH[kind], tokenizer).render(MESSAGES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_a_namespace_that_holds_itself_shows_nothing(tokenizer: Tokenizer) -> None:
    source = "{% set n = namespace() %}{% set n.n = n %}{{ [n, n] }}"
    assert ChatTemplate(source, tokenizer).render(MESSAGES) == "[<namespace>, <namespace>]"


def test_a_long_conversation_fits(tokenizer: Tokenizer) -> None:
    source = (
        "{% set n = namespace(all=[]) %}{% for m in messages %}{% set n.all = n.all + [m] %}{% endfor %}"
        "{% for m in n.all[::-1] %}{{ '<' ~ m['role'] ~ '>' + m.content | trim | replace('a', 'b') }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a" * 2000} for _ in range(500)]
    assert ChatTemplate(source, tokenizer).render(messages) == ("<user>" + "b" * 2000) * 500


def test_templates_render_in_several_threads(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}", tokenizer)
    results: dict[str, str] = {}

    def work(content: str) -> None:
        results[content] = template.render([{"role": "user", "content": content}])

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {letter: letter * 2000 for letter in "abcd"}
