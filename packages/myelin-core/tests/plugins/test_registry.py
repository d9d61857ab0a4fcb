"""Loading, checking and asking plugins: the states, the errors, and what each typed method gives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_distributions import MadeUpDistribution, made_up
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from myelin.cluster.provider import ProviderContext
from myelin.engine.contract import EngineOptions
from myelin.errors import ConfigError, PlanError, PluginError, UsageError
from myelin.model.source import SourceOptions
from myelin.plugins.registry import Registry
from myelin.plugins.report import PluginState
from myelin.plugins.specs import TelemetryContext
from myelin.values import RunId

Write = Callable[[str], str]

PROVIDER = """
class Thing:
    async def offers(self, need): ...
    async def launch(self, offer, boot, *, key): ...
    async def leases(self): ...
    async def release(self, lease): ...
    def logs(self, lease): ...
    async def close(self): ...

@hookimpl
def myelin_provider(name, context):
    return Thing()
"""

CONTEXT = ProviderContext(RunId("run"))


def registry(*distributions: MadeUpDistribution, **more: object) -> Registry:
    return Registry.discover(distributions=distributions, **more)


def provider(module: str, name: str = "mine", distribution: str = "dist") -> MadeUpDistribution:
    return made_up(distribution, f"[myelin.providers]\n{name} = {module}\n")


def only_row(found: Registry) -> tuple[PluginState, str]:
    (row,) = found.report()
    return row.state, row.reason


def test_a_provider_is_made_by_name(module: Write) -> None:
    found = registry(provider(module(PROVIDER)))
    assert type(found.provider("mine", CONTEXT)).__name__ == "Thing"
    assert only_row(found) == (PluginState.LOADED, "")


def test_nothing_is_imported_before_it_is_asked_for(module: Write) -> None:
    name = module(PROVIDER)
    found = registry(provider(name))
    assert name not in sys.modules
    found.engine_support()
    assert name not in sys.modules
    found.require({"myelin.providers": ["mine"]})
    assert name in sys.modules


def test_a_missing_plugin_says_what_to_install_and_what_there_is(module: Write) -> None:
    with pytest.raises(PluginError) as caught:
        registry(provider(module(PROVIDER), "process"), wanted={"myelin.providers": ["vastai"]})
    assert caught.value.message == "The provider 'vastai' is not installed"
    assert caught.value.hint == "pip install myelin-provider-vastai, or use one that is installed: process"
    assert caught.value.reason == "plugin-missing"


def test_a_name_near_an_installed_one_is_suggested(module: Write) -> None:
    with pytest.raises(PluginError) as caught:
        registry(provider(module(PROVIDER), "process")).provider("proces", CONTEXT)
    assert caught.value.hint.startswith("did you mean 'process'?")


def test_all_failures_of_what_is_wanted_come_at_once(module: Write) -> None:
    distributions = [
        provider(module("raise RuntimeError('no luck')"), "broken", "dist-broken"),
        provider("nowhere", "twice", "dist-one"),
        provider("nowhere", "twice", "dist-two"),
        made_up("dist-old", "[myelin.providers]\nold = nowhere\n", requires=("myelin-core>=99",)),
    ]
    with pytest.raises(PluginError) as caught:
        registry(*distributions, wanted={"myelin.providers": ["broken", "twice", "old"], "myelin.engines": ["none"]})
    for part in (
        "4 plugins",
        "dist-broken 1.0",
        "no luck",
        "dist-one 1.0 and dist-two 1.0",
        "myelin-core>=99",
        "'none'",
    ):
        assert part in caught.value.message
    assert "pip install myelin-worker-none" in caught.value.hint


def test_failures_of_what_is_not_wanted_are_rows(module: Write) -> None:
    found = registry(
        provider(module("import surely_not_installed"), "broken", "dist-broken"),
        provider(module(PROVIDER), "well", "dist-well"),
        wanted={"myelin.providers": ["well"]},
    )
    rows = {row.name: row for row in found.report()}
    assert rows["well"].state is PluginState.LOADED
    assert rows["broken"].state is PluginState.BROKEN
    assert "surely_not_installed" in rows["broken"].reason


@pytest.mark.parametrize(
    "source",
    ["import surely_not_installed", "1 / 0", "raise SystemExit(3)", "assert False, 'reached'", "def broken(:"],
)
def test_whatever_an_import_does_the_plugin_is_broken(module: Write, source: str) -> None:
    state, reason = only_row(registry(provider(module(source))))
    assert state is PluginState.BROKEN
    assert "importing" in reason


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            PROVIDER + "\n@hookimpl\ndef myelin_providr(name): ...\n",
            "myelin_providr is no hook of Myelin (nearest: myelin_provider)",
        ),
        (PROVIDER.replace("@hookimpl\n", ""), "myelin_provider isn't marked with hookimpl"),
        (
            PROVIDER + "\ndef myelin_not_redy(): ...\n",
            "myelin_not_redy is no hook of Myelin (nearest: myelin_not_ready)",
        ),
        (PROVIDER.replace("name, context", "nam, context"), "myelin_provider: Argument(s) {'nam'}"),
        (PROVIDER + "\n@hookimpl\ndef myelin_plan(request): ...\n", "isn't registered in the group myelin.planners"),
        (
            PROVIDER + "\n@hookimpl(wrapper=True)\ndef myelin_not_ready():\n    return (yield)\n",
            "wrapper",
        ),
        ("", "has no hook myelin_provider"),
        (PROVIDER + "\n@hookimpl\ndef myelin_not_ready():\n    return 3\n", "gave a int, not a str"),
        (PROVIDER + "\n@hookimpl\ndef myelin_config_section():\n    return 3\n", "gave a int, not a ConfigSection"),
        (
            PROVIDER + "\n@hookimpl\ndef myelin_config_section():\n    return ConfigSection('runtime', int)\n",
            "'runtime' is one of Myelin's own",
        ),
        (
            PROVIDER + "\n@hookimpl\ndef myelin_config_section():\n    return ConfigSection('Bad Name', int)\n",
            "named 'Bad Name'",
        ),
        (
            PROVIDER + "\n@hookimpl\ndef myelin_config_section():\n    return ConfigSection('mine', int)\n",
            "no pydantic model",
        ),
        (
            PROVIDER
            + "\nimport pydantic\nclass Part(pydantic.BaseModel):\n    needed: int\n"
            + "\n@hookimpl\ndef myelin_config_section():\n    return ConfigSection('mine', Part)\n",
            "without a valid default: needed",
        ),
    ],
)
def test_hooks_that_are_not_the_contracts_make_a_plugin_invalid(module: Write, source: str, words: str) -> None:
    found = registry(provider(module(source)))
    state, reason = only_row(found)
    assert state is PluginState.INVALID
    assert words in reason
    with pytest.raises(PluginError, match="not a valid plugin"):
        found.provider("mine", CONTEXT)


def test_an_entry_point_that_is_no_module_is_invalid(module: Write) -> None:
    name = module(PROVIDER)
    state, reason = only_row(registry(provider(f"{name}:Thing")))
    assert state is PluginState.INVALID
    assert "not a module" in reason


def test_a_hook_of_a_newer_contract_may_be_optional(module: Write) -> None:
    source = PROVIDER + "\n@hookimpl(optionalhook=True)\ndef myelin_of_tomorrow(): ...\n"
    assert only_row(registry(provider(module(source)))) == (PluginState.LOADED, "")


def test_one_module_may_serve_two_groups(module: Write) -> None:
    name = module(PROVIDER + "\n@hookimpl\ndef myelin_plan(request):\n    return None\n")
    found = registry(made_up("dist", f"[myelin.providers]\nmine = {name}\n[myelin.planners]\nmine = {name}\n"))
    assert [row.state for row in found.report()] == [PluginState.LOADED, PluginState.LOADED]


def test_a_plugin_that_is_not_ready_needs_no_hook_yet_and_says_why(module: Write) -> None:
    found = registry(provider(module("@hookimpl\ndef myelin_not_ready():\n    return 'it comes in spring'\n")))
    assert only_row(found) == (PluginState.NOT_READY, "it comes in spring")
    with pytest.raises(PluginError, match="can't be used yet: it comes in spring") as caught:
        found.provider("mine", CONTEXT)
    assert caught.value.reason == "plugin-not-ready"


def test_a_disabled_plugin_is_not_imported(module: Write) -> None:
    name = module(PROVIDER)
    found = registry(provider(name), disabled=["mine"])
    with pytest.raises(PluginError, match="is disabled") as caught:
        found.provider("mine", CONTEXT)
    assert "runtime.disabled_plugins" in caught.value.hint
    assert only_row(found)[0] is PluginState.DISABLED
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("answer", "words"),
    [("return None", "gave nothing for its own name 'mine'"), ("return 3", "a int, which lacks offers, launch")],
)
def test_what_a_hook_gives_is_checked(module: Write, answer: str, words: str) -> None:
    found = registry(provider(module(f"@hookimpl\ndef myelin_provider(name):\n    {answer}\n")))
    with pytest.raises(PluginError) as caught:
        found.provider("mine", CONTEXT)
    assert words in caught.value.message
    assert "dist 1.0" in caught.value.message
    assert only_row(found)[0] is PluginState.INVALID


def test_a_hook_that_raises_is_named_with_its_distribution(module: Write) -> None:
    found = registry(provider(module("@hookimpl\ndef myelin_provider(name):\n    raise OSError('gone')\n")))
    with pytest.raises(PluginError, match=r"of dist 1\.0 is broken: myelin_provider failed with OSError: gone"):
        found.provider("mine", CONTEXT)


def test_an_error_for_people_comes_through_as_it_is(module: Write) -> None:
    found = registry(
        provider(module("@hookimpl\ndef myelin_provider(name):\n    raise ConfigError('no key', 'set one')\n"))
    )
    with pytest.raises(ConfigError, match="no key"):
        found.provider("mine", CONTEXT)
    assert only_row(found)[0] is PluginState.LOADED


def test_only_the_named_plugin_is_asked(module: Write) -> None:
    greedy = "@hookimpl(tryfirst=True)\ndef myelin_provider(name):\n    raise OSError('not me')\n"
    found = registry(provider(module(greedy), "greedy", "dist-a"), provider(module(PROVIDER), "mine", "dist-b"))
    found.report()
    assert type(found.provider("mine", CONTEXT)).__name__ == "Thing"


def test_hooks_may_leave_out_arguments(module: Write) -> None:
    source = PROVIDER.replace("(name, context)", "()")
    assert registry(provider(module(source))).provider("mine", CONTEXT) is not None


# Planners


PLANNER = """
from myelin.planner.run_plan import RunPlan

@hookimpl{options}
def myelin_plan(request):
    return {answer}
"""
PLAN = "RunPlan('uri', (), (), 1, 1, 1)"


def planner(module: Write, name: str, answer: str, options: str = "") -> MadeUpDistribution:
    written = module(PLANNER.format(answer=answer, options=options))
    return made_up(f"dist-{name}", f"[myelin.planners]\n{name} = {written}\n")


def test_planners_are_asked_until_one_does_not_decline_and_the_built_in_one_comes_last(module: Write) -> None:
    found = registry(
        planner(module, "builtin", PLAN, "(trylast=True)"),
        planner(module, "declines", "None"),
        planner(module, "mine", PLAN),
    )
    assert found.plan(None).planner == "mine"
    assert found.plan(None, "builtin").planner == "builtin"


def test_the_next_planner_is_asked_when_one_declines(module: Write) -> None:
    found = registry(planner(module, "builtin", PLAN, "(trylast=True)"), planner(module, "mine", "None"))
    assert found.plan(None).planner == "builtin"
    with pytest.raises(PlanError, match="Every planner declined: mine"):
        found.plan(None, "mine")


def test_a_plan_that_is_none_names_the_distribution(module: Write) -> None:
    with pytest.raises(PluginError, match=r"dist-mine 1\.0.*myelin_plan gave a int, not a RunPlan"):
        registry(planner(module, "mine", "3")).plan(None)


def test_without_any_planner_there_is_an_error() -> None:
    with pytest.raises(PluginError, match="No planner"):
        registry().plan(None)


# Engines, sources, telemetry, sections


ENGINE = """
@hookimpl
def myelin_engine(name, options):
    return None

@hookimpl
def myelin_engine_support():
    {answer}
"""


def engine(module: Write, name: str, answer: str) -> MadeUpDistribution:
    return made_up(f"dist-{name}", f"[myelin.engines]\n{name} = {module(ENGINE.format(answer=answer))}\n")


def support(name: str, rank: int, unavailable: str = "") -> str:
    return f"return EngineSupport({name!r}, frozenset(), frozenset(), {rank}, {unavailable!r})"


def test_engines_are_listed_best_first_and_bad_ones_left_out(module: Write) -> None:
    not_ready = module("@hookimpl\ndef myelin_not_ready():\n    return 'no kernels'\n")
    found = registry(
        engine(module, "slow", support("slow", 0)),
        engine(module, "fast", support("fast", 50)),
        engine(module, "absent", support("absent", 100, "no GPU")),
        engine(module, "liar", support("fast", 99)),
        engine(module, "broken", "raise OSError('gone')"),
        engine(module, "wrong", "return 3"),
        made_up("dist-soon", f"[myelin.engines]\nsoon = {not_ready}\n"),
    )
    listed = found.engine_support()
    assert [(one.name, one.unavailable) for one in listed] == [
        ("fast", ""),
        ("slow", ""),
        ("absent", "no GPU"),
        ("soon", "no kernels"),
    ]
    rows = {row.name: row for row in found.report()}
    assert "calls itself 'fast'" in rows["liar"].reason
    assert rows["broken"].state is PluginState.BROKEN
    assert rows["wrong"].state is PluginState.INVALID


def test_an_engine_that_is_wanted_must_not_fail(module: Write) -> None:
    found = registry(engine(module, "broken", "raise OSError('gone')"), wanted={"myelin.engines": ["broken"]})
    with pytest.raises(PluginError, match="gone"):
        found.engine_support()
    with pytest.raises(PluginError):
        found.engine("broken", EngineOptions())


SOURCE = """
class Source:
    uri = "x"
    def open(self, progress=None): return ()

@hookimpl{options}
def myelin_model_source(uri, options):
    return Source() if uri.startswith({prefix!r}) else None
"""


def test_a_source_is_found_by_spelling(module: Write, tmp_path: Path) -> None:
    def source(name: str, prefix: str, options: str = "") -> MadeUpDistribution:
        written = module(SOURCE.format(prefix=prefix, options=options))
        return made_up(f"dist-{name}", f"[myelin.sources]\n{name} = {written}\n")

    found = registry(source("any", "x", "(trylast=True)"), source("special", "x:"))
    options = SourceOptions(tmp_path)
    special = found.model_source("x:1", options)
    assert type(special).__module__ != type(found.model_source("xyz", options)).__module__
    with pytest.raises(UsageError, match="No model source recognises 'q'") as caught:
        found.model_source("q", options)
    assert "special" in caught.value.hint


def test_telemetry_sinks_give_exporters_and_get_their_section(module: Write) -> None:
    sink = module(
        """
        import pydantic
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        class Part(pydantic.BaseModel):
            on: bool = False
        @hookimpl
        def myelin_config_section():
            return ConfigSection("sink", Part)
        @hookimpl
        def myelin_telemetry(context):
            return (InMemorySpanExporter(),) if context.section is not None and context.section.on else None
        """
    )
    wrong = module("@hookimpl\ndef myelin_telemetry(context):\n    return [3]\n")
    found = registry(made_up("dist", f"[myelin.telemetry]\nsink = {sink}\nwrong = {wrong}\n"))
    (section,) = found.config_sections()
    context = TelemetryContext("service", "")
    assert found.telemetry(context) == ()
    (exporter,) = found.telemetry(context, {"sink": section.model.model_validate({"on": True})})
    assert isinstance(exporter, InMemorySpanExporter)
    rows = {row.name: row.reason for row in found.report()}
    assert rows["wrong"] == "myelin_telemetry gave a int, not a SpanExporter or TelemetrySink"


SECTION = """
import pydantic
class Part(pydantic.BaseModel):
    level: int = 3
@hookimpl
def myelin_config_section():
    return ConfigSection({name!r}, Part)
"""


def test_sections_are_collected_by_name_also_of_plugins_that_are_not_ready(module: Write) -> None:
    soon = module(SECTION.format(name="soon") + "\n@hookimpl\ndef myelin_not_ready():\n    return 'later'\n")
    found = registry(provider(module(PROVIDER + SECTION.format(name="mine"))), provider(soon, "soon", "dist-soon"))
    sections = found.config_sections()
    assert [section.name for section in sections] == ["mine", "soon"]
    assert all(issubclass(section.model, BaseModel) for section in sections)
    assert found.section_of("myelin.providers", "mine") == "mine"
    assert found.section_of("myelin.providers", "other") == ""


def test_a_section_that_is_taken_names_both_distributions(module: Write) -> None:
    found = registry(
        provider(module(PROVIDER + SECTION.format(name="same")), "one", "dist-one"),
        provider(module(PROVIDER + SECTION.format(name="same")), "two", "dist-two"),
    )
    found.config_sections()
    for row in found.report():
        assert row.state is PluginState.CONFLICTING
        assert "dist-one" in row.reason
        assert "dist-two" in row.reason
    with pytest.raises(PluginError, match="ambiguous"):
        found.provider("one", CONTEXT)


def test_rows_are_in_order_of_groups_and_names_and_a_conflict_is_one_row() -> None:
    found = registry(
        made_up("b", "[myelin.sources]\nz = nowhere\n[myelin.providers]\nb = nowhere\n"),
        made_up("a", "[myelin.providers]\nb = nowhere\na = nowhere\n"),
    )
    assert [(row.group, row.name, row.distribution) for row in found.report()] == [
        ("myelin.providers", "a", "a"),
        ("myelin.providers", "b", "a, b"),
        ("myelin.sources", "z", "b"),
    ]


def test_a_wanted_plugin_that_is_missing_is_a_row() -> None:
    found = registry()
    with pytest.raises(PluginError):
        found.require({"myelin.providers": ["gone"]})
    (row,) = found.report()
    assert row.as_json() == {
        "group": "myelin.providers",
        "name": "gone",
        "distribution": "",
        "version": "",
        "state": "missing",
        "reason": "no installed distribution has it",
    }


def test_a_group_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(PluginError, match="is no group"):
        registry(wanted={"myelin.provider": ["x"]})


def test_everything_that_this_repository_installs_is_well() -> None:
    rows = Registry.discover().report()
    ours = [row for row in rows if row.distribution == "myelin-core"]
    assert {row.state for row in ours} == {PluginState.LOADED}
    assert {row.group for row in ours} == {
        "myelin.transports",
        "myelin.planners",
        "myelin.engines",
        "myelin.sources",
        "myelin.telemetry",
    }


COMMANDS = """
@hookimpl
def myelin_commands():
    import typer
    app = typer.Typer()
    @app.command("greet")
    def greet():
        print("hello")
    @app.command("part")
    def part():
        print("farewell")
    return app
"""


def test_a_plugin_may_have_commands_and_only_it_is_imported_for_them(module: Write) -> None:
    mine = provider(module(PROVIDER + COMMANDS))
    found = registry(mine, provider(module("raise AssertionError('imported')\n"), "other", "dist-other"))
    commands = found.commands("mine")
    assert commands is not None
    assert {command.name for command in commands.registered_commands} == {"greet", "part"}
    assert found.commands("nobody") is None
    assert registry(provider(module(PROVIDER))).commands("mine") is None


def test_commands_that_fail_are_named_with_their_distribution(module: Write) -> None:
    failing = "@hookimpl\ndef myelin_commands():\n    raise OSError('gone')\n"
    with pytest.raises(PluginError, match="myelin_commands failed with OSError: gone") as caught:
        registry(provider(module(PROVIDER + failing))).commands("mine")
    assert "dist" in caught.value.message
