"""What all tests share: the default model, few threads, and random tests that are the same every time."""

import functools
import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from quire.catalog.names import DEFAULT_MODEL
from quire.catalog.store import ignore, models_folder
from quire.catalog.wheel import fetch
from quire.core.errors import QuireError
from quire.core.process import freeze_heap
from quire.kernels.cpu.native_build import CHOICE_VARIABLE, cpu_flags
from tests.quick_interpreter import quicken
from tests.shallow_model import write_shallow_model
from tests.tiers import HAS_GPU, LONG_VARIABLE, is_long

if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before anything imports one
# One thread for each process, for those that the tests start too: beside each other, threads that spin while they wait
# for one another take the cores that others need, and what takes a second takes minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for those that have two all the same
# Tests compare the bits of one batch with those of another, and on a matrix unit these differ: it has tests of its own.
if "amx_bf16" in cpu_flags():
    os.environ.setdefault(CHOICE_VARIABLE, "avx512_vnni")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background (`nohup make test &`)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send Ctrl-C, to themselves and to their children

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=60)
settings.load_profile("ci")

TORCH_THREADS = 1
SHALLOW_CACHE = models_folder().parent / "shallow"  # as XDG_CACHE_HOME


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run every example of every grid: see tests/tiers.py")
    parser.addoption("--dose", type=int, help="how many requests, kills, connections or tokens a test with a dose has")
    parser.addoption("--attack-seed", type=int, default=0, help="other random choices of the tests of attacks")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        os.environ[LONG_VARIABLE] = "1"
        settings.load_profile("long")
    config.addinivalue_line("markers", "long(gpu=False): runs with --long only; gpu: and where there is a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: looking for garbage in it takes a fifth of the time of the collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is only for the long tier. The longest file of those behind the servers comes first: at the end,
    where one process waits for the other, files are short."""

    def runs(item: pytest.Item) -> bool:
        return all(is_long(gpu=bool(mark.kwargs.get("gpu"))) for mark in item.iter_markers("long"))

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]
    items.sort(key=lambda item: item.path.parent.name != "sim")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Before several processes begin: of those that would fetch the model at once, all but one would say they wait."""
    with suppress(QuireError):  # the tests that need it report why it is not there
        write_shallow_model(fetch(DEFAULT_MODEL, models_folder(), ignore), SHALLOW_CACHE)


@pytest.fixture(scope="session")
def dose(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """How much of its attack a test makes: as `--dose` says, or the number that the test names."""
    given = pytestconfig.getoption("--dose")
    return lambda usual: usual if given is None else given


@pytest.fixture(scope="session")
def dice(pytestconfig: pytest.Config) -> Callable[[int], random.Random]:
    """Random choices of an attack: those of the number that the test names, or others with `--attack-seed`."""
    given = pytestconfig.getoption("--attack-seed")
    return lambda usual: random.Random(f"{usual} {given}" if given else usual)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model, fetched as a user would get it; later runs find it in the cache."""
    return fetch(DEFAULT_MODEL, models_folder(), ignore)


@pytest.fixture(scope="session")
def shallow_model_path(default_model_path: Path) -> Path:
    """The default model cut down to two layers: its file, its tokenizer, quick steps, senseless text."""
    return write_shallow_model(default_model_path, SHALLOW_CACHE)


@pytest.fixture
def shallow_default(shallow_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as the model that is used where none is named, also in processes that the test starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(SHALLOW_CACHE))
    return shallow_model_path


@pytest.fixture(autouse=True, scope="session")
def _frozen_heap() -> None:
    """The modules and items of all tests are frozen: with them, each full garbage collection takes a second. The others
    come as seldom as in a server. Once: even to count what is frozen takes 0.1 s. Who unfreezes it freezes it again."""
    freeze_heap()


@pytest.fixture(autouse=True, scope="session")
def _certificates_read_once() -> Iterator[None]:
    """Each client of httpx reads the certificates of all authorities, 40 ms that no server of a test needs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("httpx._transports.default", "httpx2._transports.default"):
            if module in sys.modules:
                create = sys.modules[module].create_ssl_context
                patch.setattr(sys.modules[module], "create_ssl_context", _usual_context_once(create))
        yield


def _usual_context_once(create: Callable[..., Any]) -> Callable[..., Any]:
    """What httpx makes for a client without certificates of its own is the same for all of them."""
    usual = functools.cache(create)

    def context(verify: object = True, cert: object = None, trust_env: bool = True) -> Any:
        if verify is True and cert is None and trust_env:
            return usual()
        return create(verify=verify, cert=cert, trust_env=trust_env)

    return context


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_torch_threads() -> Iterator[None]:
    """A module that uses torch has imported it by now; the others do not pay for it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "torch" in sys.modules:
            importlib.import_module("torch").set_num_threads(TORCH_THREADS)
        if "quire.kernels.select" in sys.modules:
            cores = importlib.import_module("quire.kernels.cpu.usable_cores").UsableCores(TORCH_THREADS, "a test")
            monkeypatch.setattr("quire.kernels.select.usable_cores", lambda: cores)
        yield


@pytest.fixture(autouse=True, scope="module")
def _memory_kept() -> Iterator[None]:
    """Engines that are built in this process give none of its memory back: the tests after it would read it again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "quire.engine.first_steps" in sys.modules:
            monkeypatch.setattr("quire.engine.first_steps.release_libraries", lambda: 0)
            monkeypatch.setattr("quire.engine.first_steps.trim_heap", lambda: None)
        yield
