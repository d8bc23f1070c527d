"""The import order of the package, read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

import pytest
from support import ROOT

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel

PACKAGE = ROOT / "commlayer"

BOTTOM = {"callbacks", "codec_spec", "errors", "files", "records", "native", "config", "gpu"}
MIDDLE = {"compressors", "planner", "transport", "balance", "optim", "observe"}
FILES_OF_PLANS = {"plan_file", "loss_budget", "last_run"}
BELOW = BOTTOM | MIDDLE | FILES_OF_PLANS | {"cluster", "engine", "autotune"}
SURFACE = {"session", "ddp"}
TOP = {"cli", "demo", "doctor", "integrations", "", "__main__"}
"""The package's own __init__ is the part "": it names everything, lazily."""

ALLOWED: dict[str, set[str]] = {
    "callbacks": set(),
    "errors": set(),
    "files": {"errors"},
    "codec_spec": {"errors", "records"},
    "records": {"errors"},
    "native": {"errors"},
    "gpu": {"errors", "gpu"},
    "config": {"errors", "records", "config"},
    **{part: BOTTOM | {part} for part in MIDDLE},
    "cluster": BOTTOM | MIDDLE | {"cluster"},
    "engine": BOTTOM | MIDDLE | FILES_OF_PLANS | {"cluster", "engine"},
    "autotune": BELOW,
    **dict.fromkeys(FILES_OF_PLANS, BOTTOM | MIDDLE | FILES_OF_PLANS),
    **dict.fromkeys(SURFACE, BELOW | SURFACE),
    **dict.fromkeys(TOP, BELOW | SURFACE | TOP),
}
ROOMS: dict[str, list[set[str]]] = {
    "planner": [
        {"convergence", "model"},
        {"data"},
        {"tree", "tensors", "buckets", "plan_rules", "shards", "memory"},
        {"problem", "costs"},
        {"inputs"},
        {"simulation"},
        {"search"},
        {"explanation", "baselines", "plan_lint"},
    ],
    "engine": [{room} for room in ("components", "model", "hooks", "buckets", "paths", "worker", "sync", "job", "epochs",
                                   "observers", "checkpoints", "guards", "step", "start")],
    "cluster": [{room} for room in ("calls", "processes", "keys", "membership", "servers")],
}
"""Folders and modules inside a part, from the bottom up: each imports only those of its own and lower layers."""
DECIDING = {"engine.epochs.schedule", "autotune.plan_policy", "autotune.link_policy", "autotune.quality.policy",
            "autotune.shares.policy"}
"""Pure modules, with all that they import from autotune/."""
DRIVERS = {"engine.start", "engine.step", "engine.job.job", "engine.epochs.plan_switch", "autotune.controller"}
"""Folders and modules that act; no decision imports them."""
IMPURE = {"torch", "threading", "time", "datetime", "random", "os", "socket", "subprocess", "grpc", "queue", "asyncio",
          "concurrent", "multiprocessing"}
KNOW_PATHS = {"bucket_assembler", "exchange", "worker"}
"""Modules of engine/ outside of paths/ that import a path."""
TORCHLESS = {"codec_spec", "errors", "files", "records", "native", "config", "plan_file", "loss_budget",
             "planner", "balance", "observe", ""}
LATE = {"importlib.import_module", "import_module", "__import__"}


class Import(NamedTuple):
    """One import of `target`, written in dots, by a file."""

    file: Path
    line: int
    target: str


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text("utf-8")))]


@functools.cache
def imports_of(file: Path) -> list[Import]:
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
            origin = ".".join((*base, *([node.module] if node.module else [])))
            found += [Import(file, node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
              and ast.unparse(node.func) in LATE):
            found.append(Import(file, node.lineno, str(node.args[0].value)))
    return found


def part_of(name: str) -> str:
    """commlayer.cluster.membership.client.join belongs to "cluster", commlayer itself to ""."""
    pieces = name.split(".")
    known = len(pieces) > 1 and ((PACKAGE / pieces[1]).is_dir() or (PACKAGE / f"{pieces[1]}.py").is_file())
    return pieces[1] if known else ""


def own_part(file: Path) -> str:
    inside = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if inside == ("__init__",) else inside[0]


FILES = sorted(PACKAGE.rglob("*.py"))


def all_imports() -> list[Import]:
    return [found for file in FILES for found in imports_of(file)]


def described(found: Import) -> str:
    return f"{found.file.relative_to(ROOT)}:{found.line} imports {found.target}"


def exists(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_tables_name_existing_modules() -> None:
    names = ({*ALLOWED} | set().union(*ALLOWED.values()) | TORCHLESS) - {""} | DECIDING | DRIVERS
    names |= {f"{part}.{name}" for part, layers in ROOMS.items() for layer in layers for name in layer}
    assert sorted(name for name in names if not exists(name)) == []
    assert not exists("no_such_module")


def test_every_module_has_a_layer() -> None:
    unplaced = {own_part(file) for file in FILES} - set(ALLOWED)
    assert not unplaced, f"add these to ALLOWED: {unplaced}"


def test_imports_only_point_to_lower_layers() -> None:
    inside = [found for found in all_imports()
              if found.target.split(".")[0] == "commlayer" and not found.target.endswith("._core")]
    assert len(inside) > 20, "the graph was read"
    assert [described(i) for i in inside if part_of(i.target) not in ALLOWED[own_part(i.file)]] == []


@pytest.mark.parametrize("part", ROOMS)
def test_folders_of_a_package_import_only_lower_ones(part: str) -> None:
    place = {name: number for number, layer in enumerate(ROOMS[part]) for name in layer}
    present = {file.stem for file in (PACKAGE / part).iterdir() if file.suffix == ".py" or (file / "__init__.py").exists()}
    assert set(place) == present - {"__init__"}
    wrong = []
    for found in all_imports():
        own, target = found.file.relative_to(PACKAGE).with_suffix("").parts, found.target.split(".")[1:]
        if own[0] != part or target[:1] != [part] or len(target) < 2 or own[1] == "__init__":
            continue  # the part's __init__ names what it offers, from any room
        if place[target[1]] > place[own[1]]:
            wrong.append(described(found))
    assert wrong == []


def test_only_the_worker_imports_paths() -> None:
    paths = [i.file for i in all_imports() if i.target.startswith("commlayer.engine.paths.")]
    importing = {file.stem for file in paths if file.parent.name != "paths"}
    assert importing == KNOW_PATHS


def test_only_the_path_table_names_paths() -> None:
    """A bucket has its path; the worker and its driver are independent of it. staging.py chooses devices before paths exist."""
    words = {"service", "allreduce"}
    rooms = [file for room in ("worker", "paths") for file in sorted((PACKAGE / "engine" / room).glob("*.py"))
             if file.name != "staging.py"]
    found = [f"{file.name}:{node.lineno}" for file in rooms
             for node in nodes_of(file)
             if isinstance(node, ast.Compare) and "path" in ast.unparse(node) and words & strings_in(node)]
    assert found == []
    assert strings_in(ast.parse("x.path == 'service'")) == {"service"}, "the search works"


def strings_in(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_import_cycles() -> None:
    """Neither directly nor through other modules, for types alone or inside a function: shared code belongs into a third
    module.
    """
    trees = (PACKAGE, ROOT / "bench", ROOT / "tests" / "chaos", ROOT / "tests" / "sim")
    modules = {dotted(file): file for tree in trees for file in sorted(tree.rglob("*.py"))}
    graph = {name: {module_of(i.target, modules) for i in imports_of(file)} - {name, ""} for name, file in modules.items()}
    assert sum(map(len, graph.values())) > 200, "the graph was read"
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]], "the search works"
    assert cycles(graph) == []


def dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_of(target: str, modules: Mapping[str, Path]) -> str:
    """The module that `from a.b import c` reads: a.b.c if it exists, else a.b. Compiled modules import none of these."""
    names = (target, target.rpartition(".")[0])
    return "" if target.endswith("._core") else next((name for name in names if name in modules), "")


def reached_in(part: str, names: Set[str]) -> list[Path]:
    """These modules of the package and their imports of that part, also indirect ones."""
    modules = {dotted(file): file for file in FILES}
    found, left = set[str](), {f"commlayer.{name}" for name in names}
    while left:
        found |= left
        targets = {module_of(i.target, modules) for name in left for i in imports_of(modules[name])}
        left = {name for name in targets if name.startswith(f"commlayer.{part}.")} - found
    return [modules[name] for name in sorted(found)]


def test_decision_modules_import_no_clock_thread_or_connection() -> None:
    decisions, drivers = reached_in("autotune", DECIDING), tuple(f"commlayer.{name}." for name in DRIVERS)
    names = {f"{file.parent.name}.{file.stem}" for file in decisions}
    assert {"autotune.plan_policy", "quality.policy"} <= names, "the graph was read"
    assert [described(found) for file in decisions for found in imports_of(file)
            if found.target.split(".")[0] in IMPURE or found.target.startswith(drivers)] == []


def cycles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reached: dict[str, set[str]] = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    groups = {tuple(sorted(n for n in found if name in reached[n])) for name, found in reached.items() if name in found}
    return [list(group) for group in sorted(groups)]


def test_planner_and_balance_import_no_torch() -> None:
    assert [described(i) for i in all_imports() if own_part(i.file) in TORCHLESS and i.target.split(".")[0] == "torch"] == []


def test_planning_loads_no_torch() -> None:
    """The planning process starts during the first steps of a job, which it plans from; the import of torch would slow them
    down.
    """
    modules = ("commlayer", "commlayer.planner", "commlayer.balance", "commlayer.autotune.planning.planning_process",
               "commlayer.autotune.shares.policy")
    look = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'grpc', 'scipy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_coordinator_loads_no_numpy() -> None:
    """A rank starts one in attach() and waits for it: neither its imports nor its calls load numpy."""
    program = ("import sys; from commlayer.config import Config\n"
               "from commlayer.cluster.servers.server_process import ServeOptions, run\n"
               "try: run(Config(bind='127.0.0.1', insecure=True), ServeOptions(1, 0, sums=False))\n"
               "finally: print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None
        with contextlib.closing(CoordinatorChannel(json.loads(child.stdout.readline())["control"], "", None)) as link:
            assert link.call("Status", messages.StatusRequest(wanted=1), messages.StatusReply, 30.0).workers == 1
        child.terminate()
        assert child.communicate(timeout=60)[0].strip() == "[]"
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("module", ["pickle", "cloudpickle", "dill"])
def test_no_module_reads_pickles(module: str) -> None:
    assert [described(i) for i in all_imports() if i.target.split(".")[0] == module] == []


@pytest.mark.parametrize("package", ["cupy", "skopt"])
def test_optional_packages_have_one_user(package: str) -> None:
    assert len({i.file for i in all_imports() if i.target.split(".")[0] == package}) == 1


def reads_environment(file: Path) -> list[str]:
    names = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
    nodes = [node for node in nodes_of(file) if isinstance(node, ast.Attribute)]
    found = [f"{file.relative_to(ROOT)}:{node.lineno}" for node in nodes if ast.unparse(node) in names]
    return found + [described(i) for i in imports_of(file) if i.target in names]


def test_only_config_reads_the_environment() -> None:
    assert reads_environment(PACKAGE / "config" / "environment.py"), "the search works"
    assert [line for file in FILES if own_part(file) != "config" for line in reads_environment(file)] == []


def decoded_types(file: Path) -> list[tuple[str, ast.expr]]:
    """The types that msgspec decodes or converts to, each with its place."""
    calls = [node for node in nodes_of(file) if isinstance(node, ast.Call)]
    named = [(call, ast.unparse(call.func)) for call in calls]
    types = [(call, next((word.value for word in call.keywords if word.arg == "type"), None)) for call, name in named
             if re.fullmatch(r"msgspec\.\w+\.decode", name)]
    types += [(call, call.args[1]) for call, name in named if name == "msgspec.convert"]
    types += [(call, call.args[0]) for call, name in named if re.fullmatch(r"msgspec\.\w+\.Decoder", name)]
    return [(f"{file.relative_to(ROOT)}:{call.lineno}", kind) for call, kind in types if kind is not None]


def test_types_are_complete_before_threads_decode_them() -> None:
    """msgspec is not safe against two threads that use a type for the first time: see records.complete."""
    found = [(place, ast.unparse(kind)) for file in FILES for place, kind in decoded_types(file)]
    assert len(found) > 20, "the search works"
    free = [(place, kind) for place, kind in found if not kind.startswith(("complete(", "tuple[int", "dict[int"))]
    assert [kind for _, kind in free] == ["kind"], f"in `complete` alone: {free}"


def test_no_test_imports_another_test_file() -> None:
    """Shared code of tests is in tests/support."""
    imports = re.compile(r"^\s*(?:from|import) test_\w+", re.MULTILINE)
    assert [str(file) for file in (ROOT / "tests").rglob("*.py") if imports.search(file.read_text())] == []
