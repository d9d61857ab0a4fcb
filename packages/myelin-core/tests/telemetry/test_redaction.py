"""Planted secrets are found, and ordinary words are left alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import BaseModel, SecretStr

from myelin.telemetry.redaction import REDACTED, Redactor, environment_secrets, secret_values
from myelin.telemetry.signals import Signal
from myelin_testkit.telemetry_compliance import otlp_request

PLANTED = (
    ("hf_" + "aB3" * 9, "token is {}"),
    ("sk-" + "x9" * 20, "used {} for it"),
    ("ghp_" + "a1B2" * 9, "cloning with {}@github.com"),
    ("github_pat_" + "a1B2" * 9, "{}"),
    ("AKIA" + "ABCD1234EFGH5678", "aws id {}"),
    ("AIza" + "a" * 35, "google {}"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "jwt={}"),
    ("c2VjcmV0LXZhbHVl", "Authorization: Bearer {}"),
    ("c2VjcmV0LXZhbHVl", '{{"authorization": "Basic {}"}}'),
    ("0123456789abcdef", "VAST_API_KEY={}"),
    ("0123456789abcdef", '"api_key": "{}"'),
    ("hunter2hunter2", "password={}"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "key: {}"),
    ("the-run's-own-secret", "started with {}"),
)


@pytest.mark.parametrize(("secret", "around"), PLANTED)
def test_a_planted_secret_is_taken_out(secret: str, around: str) -> None:
    redactor = Redactor(["the-run's-own-secret"])
    clean = redactor.text(around.format(secret))
    assert secret not in clean
    assert REDACTED in clean


@pytest.mark.parametrize(
    "text",
    [
        "loaded seconds=14.94 fetched_bytes=47814912",
        "32 prompt tokens, 8 new (length); 100.5 tokens/s",
        "gen_ai.request.max_tokens: 64",
        "listening address=127.0.0.1:37557 pid=5994",
        "the key of a tensor: blk.3.attn_k.weight",
    ],
)
def test_ordinary_words_are_left_alone(text: str) -> None:
    assert Redactor(["x", ""]).text(text) == text


def test_every_text_of_a_request_is_searched() -> None:
    redactor = Redactor(["open-sesame"])
    for signal in (Signal.TRACES, Signal.LOGS):
        request = otlp_request(signal, "one", service="open-sesame")
        if signal is Signal.TRACES:
            span = request.resource_spans[0].scope_spans[0].spans[0]
            span.status.message = "failed with open-sesame"
            span.events[0].attributes.add(key="k").value.string_value = "open-sesame"
            span.attributes.add(key="list").value.array_value.values.add(string_value="open-sesame")
        else:
            record = request.resource_logs[0].scope_logs[0].log_records[0]
            record.body.string_value = "says open-sesame"
            record.attributes.add(key="map").value.kvlist_value.values.add(key="k").value.string_value = "open-sesame"
        redactor.request(request)
        assert b"open-sesame" not in request.SerializeToString()


def test_secrets_are_found_where_they_are_held() -> None:
    class Part(BaseModel):
        key: SecretStr = SecretStr("in-a-model")
        plain: str = "plain"

    @dataclass
    class Holder:
        part: Part
        several: tuple[SecretStr, ...]
        by_name: dict[str, SecretStr]

    holder = Holder(Part(), (SecretStr("in-a-list"),), {"x": SecretStr("in-a-map")})
    assert secret_values(holder) == ["in-a-model", "in-a-list", "in-a-map"]


def test_variables_that_say_so_are_secret() -> None:
    environment = {
        "HF_TOKEN": "hf-token-value",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=header-value,x=other-value",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/etc/key.pem",
        "PATH": "/usr/bin",
        "KEYBOARD": "qwertyuiop",
    }
    assert sorted(environment_secrets(environment)) == ["header-value", "hf-token-value", "other-value"]
