"""What every test shares: its backend, memory that shows what nobody wrote, the choice of cases."""

import os
import sys
import tomllib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import backends, selection

# Where a GPU's time is limited: what none has run yet, then few and quick tests of others' models.
ORDER = {"test_compile.py": -2, "test_transformers_gpu.py": -1}
NOT_REHEARSED = Path(__file__).parent / "gpu/not_rehearsed.toml"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--backend",
        choices=backends.BACKENDS,
        help="where kernels run: the CPU's references (default, and a GPU's tests if one is "
        "visible), Triton's interpreter, compiled code executed in software, or a GPU",
    )
    parser.addoption(
        "--rehearse",
        choices=["bodies", "all"],
        help="run a GPU's tests without one (tests/gpu/rehearsal.py): a case of each test, or all",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=50,
        metavar="N",
        help="how often tests/faults kill a run; fewer than 50 also leave out what takes long",
    )
    parser.addoption("--first-case", action="store_true", help="run the first case of each test")
    # Now, for conftest.py files of folders import Triton before options are known.
    arguments = pluginmanager.get_plugin("pytestconfig").invocation_params.args
    options = parser.parse_known_args([str(argument) for argument in arguments])
    backends.prepare(options.backend, options.rehearse)


def pytest_configure(config: pytest.Config) -> None:
    selected = backends.selected(config)
    if backends.EXECUTED in selected or config.getoption("rehearse"):
        from tests.gpu import rehearsal

        rehearsal.begin()
    elif backends.GPU in selected and not torch.cuda.is_available():
        raise pytest.UsageError("--backend gpu needs a CUDA device, none is visible: --rehearse")
    elif backends.GPU in selected and hasattr(config, "workerinput"):
        config.pluginmanager.register(ReplaceLostWorkers())


def pytest_report_header(config: pytest.Config) -> str:
    return f"backend: {', '.join(backends.selected(config))}; others: --backend NAME"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Say why no test ran, which fails the run."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        others = ", ".join(b for b in backends.BACKENDS if b not in backends.selected(config))
        terminalreporter.write_line(
            f"no selected test runs on {', '.join(backends.selected(config))}; "
            f"--backend names another: {others}",
            red=True,
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import tests of the CPU alone in a process of another backend."""
    selected = set(backends.selected(config))
    folder = backends.folder_of(collection_path, config)
    if backends.CPU in selected or folder in ("tests", "tests/ops"):
        return None
    return None if backends.FOLDERS.get(folder) in selected else True


# After -k and -m have chosen.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = set(backends.selected(config))
    chosen = [item for item in items if selected & set(backends.backends_of(item))]
    if config.getoption("rehearse"):
        chosen = selection.rehearsed(chosen, tomllib.loads(NOT_REHEARSED.read_text("utf-8")))
    if config.getoption("first_case") or config.getoption("rehearse") == "bodies":
        chosen = selection.first_cases(chosen)
    selection.keep(config, items, chosen)
    items.sort(key=lambda item: ORDER.get(item.path.name, 0) if on_gpu(item) else 0)


def on_gpu(item: pytest.Item) -> bool:
    """Return whether a selected test runs on a GPU, real or rehearsed."""
    return backends.GPU in backends.backends_of(item) and (
        backends.GPU in backends.selected(item.config)
    )


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in every test, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


# --- Triton's interpreter -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def prepare_the_language_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton replaces its builtins again at every call of a device function: half of the time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    def prepare_if_needed(fn: Callable[..., Any]) -> Any:
        named = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if named and not any(tl.core.is_builtin(language.load) for language in named):
            return interpreter._LangPatchScope()
        return prepare(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_if_needed)


@pytest.fixture(autouse=True)
def rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let bfloat16 be right, and round as a GPU does where a test is parametrized with "gpu"."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.interpreter.rounding import like_a_gpu, right_bfloat16

    with like_a_gpu() if getattr(request, "param", "exact") == "gpu" else right_bfloat16():
        yield


@pytest.fixture
def gpu_rounding(rounding: None) -> Iterator[None]:
    """Round as a GPU does."""
    from tests.interpreter.rounding import like_a_gpu

    with like_a_gpu():
        yield


# --- The executor of compiled kernels -------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def executor(pytestconfig: pytest.Config) -> None:
    """Skip, with the reason, where the executor cannot be built."""
    if backends.EXECUTED not in backends.selected(pytestconfig):
        return
    from bench.gpu_model import library

    try:
        library.load()
    except library.NoCompilerError as error:
        pytest.skip(str(error))


# --- A GPU ----------------------------------------------------------------------------------------


class ReplaceLostWorkers:
    """End a worker of pytest-xdist whose CUDA context is lost, so that another takes its place."""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # torch.AcceleratorError is one
                sys.stderr.write(f"the CUDA context is lost after {nodeid}: {error}\n")
                sys.stderr.flush()
                os._exit(70)


@pytest.fixture(autouse=True)
def begin_anew_on_a_gpu(request: pytest.FixtureRequest) -> None:
    """Draw the same numbers whichever tests ran before, and compile each case of a test."""
    if on_gpu(request.node):
        torch.manual_seed(0)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("rehearse") and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped, and not listed: {report.longrepr}"
    return report
