"""Imports point one way, and heavy or foreign packages are touched where CONTRIBUTING says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ts_pippy_handler"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
BENCH = ["bench", "bench_cli", "bench_engine", "bench_http", "workload"]
LIGHT = [
    *(
        "archive",
        "config",
        "costs",
        "drain_cli",
        "errors",
        "explain",
        "fit",
        "hub",
        "identity",
        "json_files",
        "kv_cache",
        "meter",
        "network",
        "partition",
        "prefix_cache",
        "process",
        "request",
        "request_state",
        "scheduler",
        "step_time",
        "weight_files",
    ),
    *("bench", "bench_cli", "bench_http", "validation", "workload"),
]


def imported(module: str) -> set[str]:
    """Return every module that ``module`` imports, at its top or inside a function, with dots."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(root: str) -> list[str]:
    return [module for module in MODULES if any(name.split(".")[0] == root for name in imported(module))]


def test_torchserve_has_one_importer() -> None:
    assert importers("ts") == ["base_pippy_handler"]


def test_torchpippy_has_one_importer() -> None:
    assert importers("pippy") == ["splitting"]


def test_http_clients_are_the_business_of_the_bench() -> None:
    assert importers("httpx2") == ["bench_http"]


def test_serving_knows_no_bench() -> None:
    names = {f"ts_pippy_handler.{module}" for module in BENCH}
    assert [module for module in MODULES if imported(module) & names] == sorted(["cli", *set(BENCH) - {"workload"}])


def test_ranks_call_each_other_in_one_place() -> None:
    users = [module for module in MODULES if "torch.distributed.rpc" in imported(module)]
    assert users == ["ranks"]


@pytest.mark.parametrize("module", LIGHT)
def test_modules_of_plain_data_import_no_torch(module: str) -> None:
    roots = {name.split(".")[0] for name in imported(module)}
    assert not roots & {"torch", "transformers", "safetensors", "ts"}
    own = {name.split(".")[1] for name in imported(module) if name.startswith("ts_pippy_handler.")}
    assert own <= set(LIGHT)


def test_the_engine_knows_no_text_and_no_handlers() -> None:
    own = {name.split(".")[1] for name in imported("engine") if name.startswith("ts_pippy_handler.")}
    assert not own & {"text", "generator", "payload", "base_pippy_handler", "text_generation_handler", "cli", *BENCH}


def test_the_environment_is_touched_where_ranks_and_processes_start() -> None:
    readers = [module for module in MODULES if "os.environ" in (PACKAGE / f"{module}.py").read_text("utf-8")]
    assert readers == ["cli", "process", "ranks", "tracer"]


def test_importing_the_package_imports_neither_torch_nor_torchserve() -> None:
    code = "import sys, ts_pippy_handler; print(sorted({'torch', 'transformers', 'ts'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_there_is_no_cycle() -> None:
    graph = {
        module: {
            part
            for name in imported(module)
            if name.startswith("ts_pippy_handler.") and (part := name.split(".")[1]) in MODULES and part != module
        }
        for module in MODULES
        if module != "__init__"
    }
    # Imports inside functions count too, but for the two entry points that are started as processes.
    graph["tracer"] -= {"loading"}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
