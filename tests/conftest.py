"""Settings of all tests. Property tests use the same cases in every run, so a failure is due to the change under test.
`make fuzz` uses new cases.

Only the reasons listed here allow a test to be skipped. Any other reason fails the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.commands import commlayer_called  # noqa: F401
from support.coordinators import all_opened  # noqa: F401
from support.keys import made_folders  # noqa: F401
from support.sites import Sites

from commlayer import native
from commlayer.config import quiet_grpc

# Scripts started by tests import `support`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))

os.environ["COMMLAYER_CACHE"] = ""  # no test begins with what another one has learned
USER_FOLDER = tempfile.TemporaryDirectory(prefix="commlayer-")
os.environ["XDG_CONFIG_HOME"] = USER_FOLDER.name  # no test counts as traffic of this user's homes
# Before torch and numpy are imported. Tensors in tests are small; with several tests per core, OpenMP threads would spend most
# of the time spinning. Child processes inherit it; torchrun sets the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if native.core is None:  # all codecs run on the oracle's kernels
    from oracle import codec_kernels

    from commlayer.compressors import kernels

    ORACLE = kernels.use(codec_kernels)
    ORACLE.__enter__()

quiet_grpc()  # some tests import grpc first

# A busy machine may take a second for a case, so cases have no deadline.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", derandomize=False, deadline=None)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell ignores SIGINT, and so would its children, to which some tests send it.
    with contextlib.suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

MACHINE = (
    r"pinned memory needs a GPU", r"no nvcc", r"this CPU cannot flush denormals", r"no default route",
    r"needs aarch64-linux-gnu-g\+\+", r"there is no clang\+\+", r"only Linux reports",
    r"sockets are paced on Linux only", r"the WAN lab needs",
    r"which `make (recipes|engines)` installs", r"chromium is not installed",
)
"""Reasons that no installation from the project's own files removes: hardware, operating system, network."""
TOOLS = (
    r"no C\+\+ compiler", r"the compiler has no sanitizer runtime", r"needs .* to build", r"without the native core",
    r"the native core is not built", r"built without the native core", r"without a compiler", r"no native core",
    r"matplotlib", r"is not installed",
)
"""Reasons that `make setup` and packages remove. With REQUIRE_TOOLS=1, as in continuous integration, they fail the run."""

_skipped: Counter[str] = Counter()


@pytest.fixture
def sites() -> Iterator[Sites]:
    processes = Sites()
    yield processes
    processes.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that only `make test-all` runs as `nightly`.

    These are the tests of three folders, and all but N cases of a test marked `commit(N)` in any folder.
    """
    tables: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("commit"):
            tables[item.nodeid.partition("[")[0]].append(item)
        elif item.path.parent.name in {"nightly", "chaos", "attack"}:
            item.add_marker("nightly")
    for cases in tables.values():
        mark = cases[0].get_closest_marker("commit")
        assert mark is not None
        (count,) = mark.args
        per_case = max(len(cases) // count, 1)
        # Evenly spread and shifted by one each time: in a table of scripts x modes, each mode gets a different script.
        kept = {n * len(cases) // count + n % per_case for n in range(min(count, len(cases)))}
        for n, item in enumerate(cases):
            if n not in kept:
                item.add_marker("nightly")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
        _skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def _forbidden() -> list[str]:
    allowed = MACHINE if os.environ.get("REQUIRE_TOOLS") else MACHINE + TOOLS
    return [reason for reason in _skipped if not any(re.search(pattern, reason) for pattern in allowed)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _forbidden() and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in _forbidden():
        terminalreporter.write_line(f"ERROR: {_skipped[reason]} tests were skipped for a reason that is not allowed: {reason}")
