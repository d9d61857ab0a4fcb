"""Layers of settings: which wins, what is an error, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from myelin.config.environment import RESERVED_VARIABLES, every_name, nearest
from myelin.config.explain import MASK, explain, shown
from myelin.config.model_choice import model_uri
from myelin.config.sections import CORE_SECTIONS
from myelin.config.settings import Inputs, Layer, Settings, peek_disabled_plugins, resolve
from myelin.errors import ConfigError


class CloudSection(BaseModel):
    """A plugin's section."""

    api_key: SecretStr | None = None
    gpu_name: str = ""
    limit: float = 1.5
    tags: dict[str, str] = {}


SECTIONS = {"cloud": CloudSection}
NOWHERE = Path("/nonexistent")


def read(toml: str = "", **inputs: Any) -> Settings:
    """Settings from the text of a file and other inputs."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if toml:
            (Path(folder) / "myelin.toml").write_text(toml, encoding="utf-8")
        return resolve(Inputs(folder=Path(folder), **inputs), SECTIONS)


def test_defaults_are_those_that_the_documentation_names() -> None:
    found = read()
    assert found.prompt.rpc_addr == "127.0.0.1:19777"
    assert found.prompt.max_tokens == 64
    assert found.prompt.temperature == 0
    assert found.provider.name == "process"
    assert found.runtime.engine == "auto"
    assert model_uri(found) == "hf:bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf"
    assert found.file is None


LAYERS = ("profile", "file", "environment", "command line")


@given(st.sets(st.sampled_from(LAYERS)))
@settings(deadline=None)
def test_the_highest_layer_that_names_a_value_wins(present: set[str]) -> None:
    found = read(
        '[provider]\nname = "from-file"\n' if "file" in present else "",
        environment={"MYELIN_NODE_PROVIDER": "from-environment"} if "environment" in present else {},
        options={"provider.name": ("--provider", "from-option")} if "command line" in present else {},
        profile="deploy" if "profile" in present else "",
    )
    expected = {
        "command line": "from-option",
        "environment": "from-environment",
        "file": "from-file",
        "profile": "vastai",
    }
    winner = next((layer for layer in reversed(LAYERS) if layer in present), None)
    assert found.provider.name == (expected[winner] if winner else "process")
    assert found.origin("provider.name").layer.words == (winner or "default")


@given(
    st.dictionaries(
        st.sampled_from(["threads", "max_sequences", "max_batch_tokens"]),
        st.dictionaries(st.sampled_from(["file", "environment", "set"]), st.integers(1, 1000)),
        max_size=3,
    )
)
@settings(deadline=None)
def test_layers_are_merged_key_by_key(values: dict[str, dict[str, int]]) -> None:
    lines = [f"{key} = {layers['file']}" for key, layers in values.items() if "file" in layers]
    found = read(
        "[runtime]\n" + "\n".join(lines),
        environment={
            f"MYELIN_RUNTIME_{key.upper()}": str(layers["environment"])
            for key, layers in values.items()
            if "environment" in layers
        },
        assignments=[f"runtime.{key}={layers['set']}" for key, layers in values.items() if "set" in layers],
    )
    for key in ("threads", "max_sequences", "max_batch_tokens"):
        layers = values.get(key, {})
        default = CORE_SECTIONS["runtime"].model_fields[key].default
        expected = layers.get("set", layers.get("environment", layers.get("file", default)))
        assert getattr(found.runtime, key) == expected


EXPECTED_VARIABLES = {
    "MYELIN_RUN_ID": "runtime.run_id",
    "MYELIN_NODE_PROVIDER": "provider.name",
    "MYELIN_PIPELINE_STAGES": "runtime.pipeline_stages",
    "MYELIN_GGUF_REPO": "model.gguf_repo",
    "MYELIN_GGUF_FILE": "model.gguf_file",
    "MYELIN_GGUF_REVISION": "model.gguf_revision",
    "MYELIN_GGUF_LOCAL_PATH": "model.gguf_local_path",
    "MYELIN_TOKENIZER_LOCAL_PATH": "model.tokenizer_local_path",
    "MYELIN_MAX_CONTEXT": "runtime.max_context",
    "MYELIN_PROMPT_RPC_BIND": "prompt.rpc_addr",
    "MYELIN_PROMPT_MAX_TOKENS": "prompt.max_tokens",
    "MYELIN_CACHED_MODEL_HOST_PATH": "model.cached_model_host_path",
    "MYELIN_MODEL_CACHE_DIR": "model.cache_dir",
    "HF_TOKEN": "model.token",
    "MYELIN_CLOUD_GPU_NAME": "cloud.gpu_name",
}


def test_the_variables_that_people_know_name_their_settings() -> None:
    owners = {variable: name.key for name in every_name({**CORE_SECTIONS, **SECTIONS}) for variable in name.environment}
    assert {variable: owners[variable] for variable in EXPECTED_VARIABLES} == EXPECTED_VARIABLES


def test_no_variable_names_two_settings() -> None:
    variables = [variable for name in every_name(CORE_SECTIONS) for variable in name.environment]
    assert len(variables) == len(set(variables))
    assert not set(variables) & set(RESERVED_VARIABLES)


def test_every_setting_has_a_description_and_a_valid_default() -> None:
    for model in CORE_SECTIONS.values():
        model()
    assert all(name.info.description for name in every_name(CORE_SECTIONS))


def test_the_longer_variable_wins_over_the_shorter() -> None:
    found = read(environment={"MYELIN_RUNTIME_THREADS": "3", "MYELIN_THREADS": "5"})
    assert found.runtime.threads == 3
    assert found.origin("runtime.threads").name == "MYELIN_RUNTIME_THREADS"


def test_an_empty_variable_of_another_tool_is_none_and_one_of_ours_is_empty() -> None:
    found = read("[provider]\nname = 'x'\n", environment={"HF_HUB_OFFLINE": "", "HF_TOKEN": "", "MYELIN_RUN_ID": ""})
    assert found.model.offline is False
    assert found.model.token is None
    assert found.runtime.run_id == ""
    assert found.origin("runtime.run_id").layer is Layer.ENVIRONMENT


@pytest.mark.parametrize("text", ["10,20", " 10 , 20 ", "[10, 20]"])
def test_several_values_are_written_with_commas_or_as_json(text: str) -> None:
    assert read(environment={"MYELIN_SPLIT": text}).runtime.split == (10, 20)
    assert read(assignments=[f"runtime.split={text}"]).runtime.split == (10, 20)


def test_lists_and_tables_of_the_file_are_taken_as_they_are() -> None:
    found = read('[runtime]\nsplit = [1, 2]\n[prompt]\nstop = ["a,b", "\\n"]\n[cloud.tags]\na = "1"\n')
    assert found.runtime.split == (1, 2)
    assert found.prompt.stop == ("a,b", "\n")
    assert found.sections["cloud"].tags == {"a": "1"}


def test_a_mapping_is_written_as_json() -> None:
    assert read(assignments=['cloud.tags={"a": "1"}']).sections["cloud"].tags == {"a": "1"}


def test_a_value_may_contain_an_equals_sign() -> None:
    assert read(assignments=["model.source=https://host/x?a=b"]).model.source == "https://host/x?a=b"


# What is wrong


def failure(toml: str = "", **inputs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(toml, **inputs)
    return caught.value


@pytest.mark.parametrize(
    ("toml", "inputs", "message", "hint"),
    [
        (
            "[runtime]\nthread = 1\n",
            {},
            "Unknown setting 'runtime.thread' in myelin.toml",
            "did you mean runtime.threads?",
        ),
        ("[runtim]\n", {}, "Unknown section 'runtim' in myelin.toml", "did you mean runtime?"),
        ("threads = 3\n", {}, "Unknown section 'threads' in myelin.toml", "did you mean runtime.threads?"),
        (
            "[prompt]\nthreads = 3\n",
            {},
            "Unknown setting 'prompt.threads' in myelin.toml",
            "did you mean runtime.threads?",
        ),
        ("runtime = 3\n", {}, "'runtime' in myelin.toml is a value, not a section", "write it as [runtime]"),
        (
            "[cloud]\ngpuname = 'x'\n",
            {},
            "Unknown setting 'cloud.gpuname' in myelin.toml",
            "did you mean cloud.gpu_name?",
        ),
        (
            "",
            {"environment": {"MYELIN_PIPELINE_STAGE": "2"}},
            "Unknown environment variable MYELIN_PIPELINE_STAGE",
            "did you mean MYELIN_PIPELINE_STAGES?",
        ),
        (
            "",
            {"environment": {"MYELIN_QQQQQQ": "2"}},
            "Unknown environment variable MYELIN_QQQQQQ",
            "`myelin config` lists the settings; unset this variable",
        ),
        ("", {"assignments": ["promt.stop=1"]}, "Unknown setting 'promt.stop' in --set", "did you mean prompt.stop?"),
        (
            "",
            {"assignments": ["prompt.stop"]},
            "--set 'prompt.stop' has no value",
            "write it as --set section.key=value",
        ),
        (
            "",
            {"options": {"runtime.pipeline_stages": ("-N", "0")}},
            "runtime.pipeline_stages (from -N 0) is wrong: input should be greater than or equal to 1",
            "runtime.pipeline_stages: how many nodes the layers are split over",
        ),
        (  # nobody has that many layers, and a plan with a node for each would fill the memory
            "",
            {"options": {"runtime.pipeline_stages": ("-N", "99999999999999999999")}},
            "runtime.pipeline_stages (from -N 99999999999999999999) is wrong: "
            "input should be less than or equal to 1024",
            "runtime.pipeline_stages: how many nodes the layers are split over",
        ),
        (
            "[prompt]\nmax_tokens = 'many'\n",
            {},
            "prompt.max_tokens (from myelin.toml) is wrong: "
            "input should be a valid integer, unable to parse string as an integer",
            "prompt.max_tokens: new tokens at most",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(toml: str, inputs: dict[str, Any], message: str, hint: str) -> None:
    error = failure(toml, **inputs)
    assert error.message == message
    assert error.hint == hint
    assert error.exit_code == 2


def test_everything_wrong_comes_at_once() -> None:
    error = failure(
        "[runtim]\n[prompt]\ntemperature = 'hot'\n",
        environment={"MYELIN_THREAD": "1", "MYELIN_SPLIT": "[1,"},
        assignments=["prompt.sed=1"],
    )
    assert error.message.startswith("5 settings are wrong: ")
    for part in ("'runtim'", "prompt.temperature", "MYELIN_THREAD", "MYELIN_SPLIT can't be read", "'prompt.sed'"):
        assert part in error.message
    for part in ("runtime?", "MYELIN_THREADS?", "prompt.seed?"):
        assert part in error.hint


@given(st.sampled_from(sorted(name.key for name in every_name(CORE_SECTIONS))), st.data())
@settings(deadline=None)
def test_a_letter_too_few_is_told_with_the_real_name(key: str, data: st.DataObject) -> None:
    section, _, field = key.partition(".")
    place = data.draw(st.integers(1, len(field) - 1))
    misspelt = f"{section}.{field[:place]}{field[place + 1 :]}"
    known = {name.key for name in every_name({**CORE_SECTIONS, **SECTIONS})}
    if misspelt in known:
        return
    error = failure(assignments=[f"{misspelt}=1"])
    assert error.hint.startswith("did you mean ")
    assert error.hint.removeprefix("did you mean ").removesuffix("?") in known


def test_a_secret_is_never_in_an_error() -> None:
    error = failure(
        "[cloud]\napi_key = ['hush-hush']\nlimit = 'hush-hush'\n", environment={"MYELIN_CLOUD_TAGS": '{"a": hush-hush'}
    )
    assert "3 settings" in error.message
    assert "hush-hush" not in error.message + error.hint


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    for inputs in (
        Inputs(file=tmp_path / "none.toml"),
        Inputs(environment={"MYELIN_CONFIG": str(tmp_path / "none.toml")}),
    ):
        with pytest.raises(ConfigError, match="no configuration file"):
            resolve(inputs)


@pytest.mark.parametrize("content", [b"[runtime\n", b"a = \xff\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "myelin.toml").write_bytes(content)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        resolve(Inputs(folder=tmp_path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        resolve(Inputs(file=tmp_path))


# Profiles


def test_a_profile_may_be_named_by_option_variable_or_file() -> None:
    assert read('profile = "deploy"\n').provider.name == "vastai"
    assert read('profile = "deploy"\n', environment={"MYELIN_PROFILE": "local"}).profile == "local"
    assert read('profile = "deploy"\n', profile="local").provider.name == "process"


def test_an_unknown_profile_is_an_error_with_the_nearest() -> None:
    error = failure(profile="deplo")
    assert error.message == "There is no profile 'deplo'"
    assert error.hint == "did you mean 'deploy'? profiles are local and deploy"


# Plugins' sections


def test_sections_of_plugins_that_cannot_be_asked_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "myelin.toml").write_text("[cloud]\nanything = 1\n")
    inputs = Inputs(folder=tmp_path, environment={"MYELIN_CLOUD_X": "1"}, assignments=["cloud.y=2"])
    assert "cloud" not in resolve(inputs, {}, ["cloud"]).sections
    with pytest.raises(ConfigError, match="3 settings"):
        resolve(inputs, {}, [])


def test_disabled_plugins_are_known_before_everything_else_is_right(tmp_path: Path) -> None:
    (tmp_path / "myelin.toml").write_text("[runtime]\ndisabled_plugins = ['a']\nnonsense = 1\n[cloud]\nx = 1\n")
    inputs = Inputs(folder=tmp_path)
    assert peek_disabled_plugins(inputs) == ("a",)
    inputs = Inputs(folder=tmp_path, environment={"MYELIN_RUNTIME_DISABLED_PLUGINS": "b,c"})
    assert peek_disabled_plugins(inputs) == ("b", "c")
    inputs = Inputs(folder=tmp_path, assignments=["runtime.disabled_plugins="])
    assert peek_disabled_plugins(inputs) == ()
    assert peek_disabled_plugins(Inputs(folder=NOWHERE)) == ()


def test_disabled_plugins_of_a_wrong_type_are_an_error() -> None:
    with pytest.raises(ConfigError, match="disabled_plugins"):
        peek_disabled_plugins(Inputs(folder=NOWHERE, assignments=["runtime.disabled_plugins=[1]"]))


# Which model


@pytest.mark.parametrize(
    ("toml", "environment", "options", "uri"),
    [
        ("[model]\nsource = 'pkg:a/b.gguf'\n", {}, {}, "pkg:a/b.gguf"),
        ("[model]\ngguf_local_path = '/a.gguf'\n", {}, {}, "/a.gguf"),
        ("[model]\nsource = 'one'\ngguf_local_path = '/a.gguf'\n", {}, {}, "one"),
        ("[model]\nsource = 'one'\n", {"MYELIN_GGUF_LOCAL_PATH": "/b.gguf"}, {}, "/b.gguf"),
        (
            "[model]\nsource = 'one'\n",
            {},
            {"model.gguf_repo": ("--gguf-repo", "o/r")},
            "hf:o/r/Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        ),
        (
            "[model]\ngguf_repo = 'o/r'\ngguf_file = 'sub/f.gguf'\ngguf_revision = 'main'\n",
            {},
            {},
            "hf:o/r/sub/f.gguf@main",
        ),
        ("", {"MYELIN_GGUF_REPO": "o/r"}, {"model.source": ("--model", "x.gguf")}, "x.gguf"),
    ],
)
def test_the_model_is_the_one_named_on_the_highest_layer(
    toml: str, environment: dict[str, str], options: dict[str, tuple[str, object]], uri: str
) -> None:
    assert model_uri(read(toml, environment=environment, options=options)) == uri


def test_a_cached_copy_takes_the_place_of_fetching(tmp_path: Path) -> None:
    copy = tmp_path / "f.gguf"
    copy.write_bytes(b"GGUF")
    for place in (copy, tmp_path):
        found = read("[model]\ngguf_file = 'sub/f.gguf'\n", environment={"MYELIN_CACHED_MODEL_HOST_PATH": str(place)})
        assert model_uri(found) == str(copy)
    found = read(environment={"MYELIN_CACHED_MODEL_HOST_PATH": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="no cached copy"):
        model_uri(found)


# Explaining


def test_every_setting_is_explained_with_its_origin_and_secrets_masked() -> None:
    found = read(
        "[cloud]\ngpu_name = 'RTX'\n",
        environment={"HF_TOKEN": "hush-hush", "MYELIN_CLOUD_API_KEY": "hush-hush"},
        options={"runtime.threads": ("--threads", "2")},
        assignments=["prompt.seed=7"],
    )
    rows = {row.key: row for row in explain(found)}
    assert set(rows) == {name.key for name in every_name({**CORE_SECTIONS, **SECTIONS})}
    assert (rows["cloud.gpu_name"].value, rows["cloud.gpu_name"].origin) == ("RTX", "myelin.toml")
    assert (rows["runtime.threads"].value, rows["runtime.threads"].origin) == (2, "--threads")
    assert (rows["prompt.seed"].layer, rows["prompt.seed"].origin) == ("command line", "--set prompt.seed")
    assert rows["model.token"].value == MASK
    assert rows["cloud.api_key"].value == MASK
    assert rows["prompt.top_k"].layer == "default"
    text = json.dumps([row.as_json() for row in rows.values()])
    assert "hush-hush" not in text
    assert "hush-hush" not in repr(found)


def test_values_are_shown_as_json_has_them() -> None:
    assert shown({"a": (Path("/x"), SecretStr("s"), None, 1.5)}) == {"a": ["/x", MASK, None, 1.5]}
    assert shown(CloudSection(api_key=SecretStr("s"))) == {
        "api_key": MASK,
        "gpu_name": "",
        "limit": 1.5,
        "tags": {},
    }


def test_nothing_is_near_to_nonsense() -> None:
    assert nearest("zzzzzz", ["runtime", "prompt"]) == ""
