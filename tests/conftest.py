# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import gzip
import logging
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

# Nearly all of the tests' time is compilation, much of it of the same programs: in scripts that
# tests run, and the next time. JAX reads what another process still writes: workers do not share.
# To keep a small program takes as long as to compile it.
KEPT = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
KEPT = Path(os.environ.setdefault("COMPILED_FOR_TESTS", str(KEPT)))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(KEPT / os.environ.get("PYTEST_XDIST_WORKER", "main"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith(("0.8.", "0.9.", "0.10.")):  # newer ones do not know the flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # half the time
DEVICES = "--xla_force_host_platform_device_count=8"  # emulated; the first is the default
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK} {DEVICES}"
# A program over these devices holds a thread for each until all have come to a collective. With as
# many threads as devices, two programs at once could wait for each other.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("MPLBACKEND", "Agg")  # tests open no windows

import jax  # noqa: E402  reads these variables when it is imported
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

if "PYTEST_XDIST_WORKER" not in os.environ:
    # ArviZ 0.23 writes a file on its first import of the day; workers that do at once fail.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import_module("arviz")

gc.freeze()  # what is imported stays, and need not be looked at again and again

# A first call compiles, so its time says nothing; the same examples every time.
settings.register_profile("numpyro_largecat", deadline=None, derandomize=True)
settings.load_profile("numpyro_largecat")


@pytest.hookimpl(tryfirst=True)  # before pytest itself leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let n cases of a test that is marked ``some_cases(n)`` run always, and the others slowly."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_cases"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("some_cases")
        assert marker is not None
        (num_always,) = marker.args
        always = {i * len(of_test) // num_always for i in range(num_always)}
        for i, item in enumerate(of_test):
            if i not in always:
                item.add_marker(pytest.mark.slow)


MOST_MAPPINGS = 40_000  # of memory: each compiled program has several, and Linux allows 65,530


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Drop compiled programs between files where a worker has too many, before it is killed."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """A function that gives the names of the programs compiled in this test so far, in all threads.

    Sizes of the caches of functions, which JAX has too, are wrong after ``jax.clear_caches()``.
    """

    def names() -> list[str]:
        return re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)

    jax.config.update("jax_log_compiles", True)  # ``jax.log_compiles()`` is of one thread
    with caplog.at_level(logging.WARNING, "jax"):
        yield names
    jax.config.update("jax_log_compiles", False)


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where a shell in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def x64() -> Iterator[None]:
    """Run one test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def write(request, tmp_path):
    """Write bytes to a file, plain or compressed."""

    def write_file(content):
        path = tmp_path / ("file.gz" if request.param else "file")
        path.write_bytes(gzip.compress(content) if request.param else content)
        return path

    return write_file
