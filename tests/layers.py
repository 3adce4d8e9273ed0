"""Checks what the compiler does not: layers, foreign headers, how threads start, sizes, and that
every suite is built.
Prints every breach.

bindings → engine → {offload, optimizers} → memory        (an arrow means "may include")

The rooms of the Python package are in PACKAGE_ORDER: each may import those before it. What is
imported for type checkers alone does not count.
"""

import ast
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

MAY_INCLUDE = {
    "memory": {"memory"},
    "offload": {"offload", "memory"},
    "optimizers": {"optimizers", "memory"},
    "engine": {"engine", "offload", "optimizers", "memory"},
    "bindings": {"bindings", "engine", "offload", "optimizers", "memory"},
}
# What each match names is known to one file only, which stands between it and everything else.
FOREIGN = re.compile(
    r"cuda\w*\.h|nccl\.h|liburing\.h|libaio\.h|jemalloc/jemalloc\.h|xxh\w*\.h|pybind11/"
)
NEVER = re.compile(r"torch/|ATen/|c10/")  # tensors cross as DLPack and pointers
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
PACKAGE = "bindings/strata"
# __init__ finds public names when they are asked for, and stands outside.
PACKAGE_ORDER = (
    *("_core", "_torch_compat", "_errors", "_schema"),
    *("nn", "_optim", "_config", "_profiling", "_runtime"),
    *("_storage", "_activations", "_hooks", "_report", "_planning", "_opening", "_api"),
    *("optim", "checkpoint"),
    *("integrations", "_cli", "__main__"),
)
# Threads take no signals: see memory/thread.hpp, which has its twin in Python.
STARTS_THREADS = re.compile(
    r"std::j?thread\b(?!::)|std::async\b|pthread_create|threading\.Thread\(|ThreadPoolExecutor\("
)
MAY_START_THREADS = {"memory/thread.hpp", "memory/thread.cpp", f"{PACKAGE}/_config/threads.py"}
CPP = {".cpp", ".hpp", ".h", ".cu"}
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70  # of C++ functions, clang-tidy says so


def sources(root: Path) -> Iterator[Path]:
    """Every C++ and Python file of the project."""
    for folder in (*MAY_INCLUDE, "benchmarks", "docs", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in CPP | {".py", ".pyi"}:
                yield path


def include_breaches(root: Path) -> Iterator[str]:
    """Includes against the layer order, relative ones, and foreign headers seen by two files."""
    seen_by: dict[str, set[str]] = defaultdict(set)
    for path in sources(root):
        if path.suffix not in CPP:
            continue
        name = path.relative_to(root).as_posix()
        layer = name.split("/")[0]
        for quote, header in INCLUDE.findall(path.read_text()):
            if foreign := FOREIGN.match(header):
                seen_by[foreign.group()].add(name)
            if NEVER.match(header):
                yield f"{name}: {header}: the core knows no libtorch"
            bare = layer in MAY_INCLUDE and quote == '"' and "/" not in header
            if bare or ".." in header.split("/"):
                yield f"{name}: {header}: write it as <layer>/<file>"
            target = header.split("/")[0]
            if layer in MAY_INCLUDE and target in MAY_INCLUDE.keys() - MAY_INCLUDE[layer]:
                yield f"{name}: {header}: {layer} may not know {target}"
    for header, names in seen_by.items():
        if len(names) > 1:
            yield f"{header} belongs in one file, not in {', '.join(sorted(names))}"


def thread_breaches(root: Path) -> Iterator[str]:
    """Threads of strata's that would take signals."""
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] not in MAY_INCLUDE or name in MAY_START_THREADS:
            continue
        for found in STARTS_THREADS.findall(path.read_text()):
            yield f"{name}: {found}: a thread of ours is a Thread or a Pool, which take no signals"


def package_breaches(root: Path) -> Iterator[str]:
    """Imports of the package against the order of its rooms, and cycles among its modules."""
    package = root / PACKAGE
    paths = {_dotted(package, p): p for p in sorted(package.rglob("*.py"))}
    imports = {name: _imports(name, path, paths) for name, path in paths.items() if name}
    for name, targets in imports.items():
        for target in sorted(targets):
            room, other = name.split(".")[0], target.split(".")[0]
            for unknown in {room, other} - set(PACKAGE_ORDER):
                yield f"{PACKAGE}: {unknown} has no place in PACKAGE_ORDER"
                return
            if PACKAGE_ORDER.index(other) > PACKAGE_ORDER.index(room):
                yield f"{PACKAGE}: {name} may not import {target}"
    sorter = graphlib.TopologicalSorter(imports)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        yield f"{PACKAGE}: a cycle of imports: {' → '.join(error.args[1])}"


def _dotted(package: Path, path: Path) -> str:
    """A module's name within the package; "" of the package itself."""
    return (
        ".".join(path.relative_to(package).with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


def _imports(name: str, path: Path, modules: Collection[str]) -> set[str]:
    """The modules of the package that one imports when it runs, wherever in it that stands."""
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in _running(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
        for alias in node.names:
            target = ".".join(part for part in [*base, alias.name] if part)
            found.add(target if target in modules else target.rpartition(".")[0] or target)
    return found - {name}


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what type checkers alone see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _running(child)


def size_breaches(root: Path) -> Iterator[str]:
    """Files and Python functions that are too long to hold in mind. Docstrings of functions and
    classes do not count: those of public ones are pages of the reference."""
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        lines = len(text.splitlines())
        nodes = [*ast.walk(ast.parse(text))] if path.suffix == ".py" else []
        lines -= sum(_docstring_lines(node) for node in nodes)
        if lines > FILE_LINES_MAX:
            yield f"{name}: {lines} lines, at most {FILE_LINES_MAX}"
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _length(node) - _docstring_lines(node)
                if lines > FUNCTION_LINES_MAX:
                    yield f"{name}: {node.name}: {lines} lines, at most {FUNCTION_LINES_MAX}"


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _docstring_lines(node: ast.AST) -> int:
    """Of a function or a class; 0 of anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    return _length(node.body[0]) if ast.get_docstring(node) is not None else 0


def suite_breaches(root: Path) -> Iterator[str]:
    """C++ suites that no program has, and tests in headers, which no suite is."""
    built = "".join((root / of / "meson.build").read_text() for of in ("tests", "benchmarks"))
    for path in sorted((root / "tests" / "cpp").rglob("*.?pp")):
        name, suite = path.name, path.stem.removesuffix("_test")
        is_suite = path.stem != suite
        if is_suite and f"'{suite}'" not in built and f"{name}'" not in built:
            yield f"{name}: no program in tests/meson.build has this suite"
        if not is_suite and re.search(r"^(TYPED_)?TEST(_[FP])?\(", path.read_text(), re.MULTILINE):
            yield f"{name}: a test outside of a suite, which is a file *_test.cpp, is never run"


def main() -> int:
    """Exits with 1 where anything is wrong."""
    root = Path(__file__).resolve().parent.parent
    checks = (
        *(include_breaches, thread_breaches, package_breaches),
        *(size_breaches, suite_breaches),
    )
    breaches = [breach for check in checks for breach in check(root)]
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
