"""Checks what comments and docstrings say of the code: that the files and functions that they name
are there. Prints every breach.

Files: what looks like one in comments, docstrings and READMEs, by the end of its path.
Examples: what the docstring at the top of a Python module calls. A function is the module's own, or
bound in the example, or stands behind the name of its module; a class may be any that the project
knows.
"""

import ast
import builtins
import functools
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (
    *("memory", "offload", "optimizers", "engine", "bindings", "benchmarks", "tests", "docs"),
    "examples",
)
SUFFIXES = {".cpp", ".hpp", ".cu", ".py", ".pyi", ".md"}
FILE = re.compile(r"(?<![\w./*<{}-])((?:[\w-]+/)*\w[\w-]*\.(?:cpp|hpp|cu|pyi?|md))(?![\w/])")


def sources(root: Path) -> Iterator[Path]:
    """Every file that people read."""
    for folder in FOLDERS:
        yield from (p for p in sorted((root / folder).rglob("*")) if p.suffix in SUFFIXES)
    yield from sorted(root.glob("*.md"))


def file_breaches(root: Path) -> Iterator[str]:
    """Names of files that are not there."""
    files = list(sources(root))
    ends = {"/".join(p.parts[i:]) for f in files for p in [f.relative_to(root)] for i in range(9)}
    for path in files:
        for name in sorted(set(FILE.findall(_said(path))) - ends):
            yield f"{path.relative_to(root)}: there is no {name}"


def _said(path: Path) -> str:
    """What a file says to its reader: all of a README, comments, and docstrings."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix not in (".py", ".pyi"):
        return "\n".join(re.findall("//.*", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    said = [token.string for token in tokens if token.type == tokenize.COMMENT]
    said += [ast.get_docstring(n) or "" for n in ast.walk(_parsed(text)) if _documented(n)]
    return "\n".join(said)


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


def example_breaches(root: Path) -> Iterator[str]:
    """What the examples of modules call, and nobody defines."""
    trees = {p: _parsed(p.read_text()) for p in sources(root) if p.suffix == ".py"}
    names = {path: _names(tree) for path, tree in trees.items()}
    known = set().union(*names.values())
    folders: dict[Path, dict[str, set[str]]] = defaultdict(dict)
    for path in trees:
        folders[path.parent][path.stem] = names[path]
    for path, tree in trees.items():
        own = {*names[path], *dir(builtins)}
        beside = folders[path.parent]
        example = [*_examples(ast.get_docstring(tree) or "")]
        own |= {n.id for n in example if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for call in (n.func for n in example if isinstance(n, ast.Call)):
            if isinstance(call, ast.Name):
                there = call.id in own or (call.id[0].isupper() and call.id in known)
            elif isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
                module = call.value.id
                there = module in own or module not in beside or call.attr in beside[module]
            else:
                continue
            if not there:
                yield f"{path.relative_to(root)}: no {ast.unparse(call)}, as its example calls it"


def _names(tree: ast.AST) -> set[str]:
    """What a file defines, assigns, imports or takes, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.split(".")[0])
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
    return found


def _examples(doc: str) -> Iterator[ast.AST]:
    """The paragraphs of a docstring that are Python; prose is not."""
    for paragraph in re.split(r"\n\s*\n", doc)[1:]:
        lines = paragraph.splitlines()
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        try:
            yield from ast.walk(ast.parse("\n".join(line[indent:] for line in lines)))
        except SyntaxError:
            continue


def main() -> int:
    """Exits with 1 where anything is wrong."""
    root = Path(__file__).resolve().parent.parent
    breaches = [*file_breaches(root), *example_breaches(root)]
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
