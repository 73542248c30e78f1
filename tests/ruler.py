"""Size and density of the code, counted by the statement, so that breaking or joining lines changes nothing.

    python -m tests.ruler            the table: a row for each file of the four, minimal.py and each part, and sums
    python -m tests.ruler --lower    write the ratchet (tests/ruler.json): each number falls to today's, none rises

tokens      names, numbers, strings and operators of the code: without docstrings, comments, imports and flags
t/statement tokens of a simple statement, or of the head of a compound one
nodes       median, over functions of 5 and more statements, of the syntax nodes of a statement
dense       how many of these functions have more than 20 nodes a statement
parallel    assignments `a, b = x, y` in 1,000 statements
walrus      `:=` in 1,000 statements
lines       are printed and not limited
"""

import ast
import collections
import io
import json
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATCHET = ROOT / "tests" / "ruler.json"
FOUR = ("grpo.py", "grpo_fast.py", "rewards.py", "utils.py")
MOST_NODES = 20
LEAST_STATEMENTS = 5
CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
FSTRING = tuple(getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))  # from Python 3.12 on
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
LIMITED = ("tokens", "t/statement", "nodes", "dense", "parallel", "walrus")
DENSITIES = LIMITED[1:]


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring or the documentation of a flag."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and isinstance(statement, ast.Expr)


def uncounted_lines(tree: ast.Module) -> set[int]:
    """The lines of docstrings, imports and flags."""
    statements: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            statements.append(node)
        if isinstance(node, DOCUMENTED):
            statements += [s for s in node.body if is_text(s)]
        if isinstance(node, ast.ClassDef) and (node.name.endswith("Flags") or node.name == "Args"):
            statements += [s for s in node.body if isinstance(s, ast.AnnAssign)]
    return {line for s in statements for line in range(s.lineno, (s.end_lineno or s.lineno) + 1)}


def statement_sizes(source: str, uncounted: set[int]) -> list[int]:
    """The tokens of each statement that has any."""
    sizes = []
    size = 0
    depth = 0  # of f-strings, each of which is one token, as it is for Python 3.11
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        ends = token.type == FSTRING[1]
        depth -= ends
        if token.type == tokenize.NEWLINE:
            sizes.append(size)
            size = 0
        elif (token.type in CODE or ends) and depth == 0 and token.start[0] not in uncounted:
            size += 1
        depth += token.type == FSTRING[0]
    return [size for size in sizes if size]


def nodes_per_statement(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[float, int]:
    """Syntax nodes a statement of a function without its docstring, and its number of statements."""
    nodes = sum(1 for _ in ast.walk(function)) - 1
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
    if ast.get_docstring(function) is not None:
        nodes -= 2
        statements -= 1
    return nodes / max(statements, 1), statements


def is_parallel(node: ast.AST) -> bool:
    """Whether a node is an assignment `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def measure(path: Path) -> tuple[collections.Counter, list[float]]:
    """Counts of a file, and the nodes a statement of its functions of some size."""
    source = path.read_text()
    tree = ast.parse(source)
    sizes = statement_sizes(source, uncounted_lines(tree))
    counts: collections.Counter = collections.Counter()
    counts["lines"] = len(source.splitlines())
    counts["tokens"] = sum(sizes)
    counts["statements"] = len(sizes)
    functions = []
    for node in ast.walk(tree):
        counts["parallel"] += is_parallel(node)
        counts["walrus"] += isinstance(node, ast.NamedExpr)
        if isinstance(node, FUNCTIONS):
            density, statements = nodes_per_statement(node)
            if statements >= LEAST_STATEMENTS:
                functions.append(density)
    return counts, functions


def row_of(paths: list[Path]) -> dict[str, float]:
    """The table's row of some files together."""
    counts: collections.Counter = collections.Counter()
    functions: list[float] = []
    for path in paths:
        more_counts, more_functions = measure(path)
        counts += more_counts
        functions += more_functions
    nodes = functions or [0.0]
    statements = max(counts["statements"], 1)
    return {
        "lines": counts["lines"],
        "tokens": counts["tokens"],
        "t/statement": round(counts["tokens"] / statements, 1),
        "nodes": round(statistics.median(nodes), 1),
        "dense": sum(density > MOST_NODES for density in nodes),
        "functions": len(functions),
        "parallel": round(1000 * counts["parallel"] / statements, 1),
        "walrus": round(1000 * counts["walrus"] / statements, 1),
    }


def table() -> dict[str, dict[str, float]]:
    """Name -> row. Programs in scripts/ beside the parts may be added, so their density alone is limited."""
    four = [ROOT / name for name in FOUR]
    parts = sorted(ROOT.glob("scripts/parts/*.py"))
    everything = sorted(ROOT.glob("scripts/**/*.py"))
    programs = [path for path in everything if path not in parts]
    rows = {str(path.relative_to(ROOT)): row_of([path]) for path in [*four, ROOT / "scripts" / "minimal.py", *parts]}
    return rows | {"the four": row_of(four), "programs in scripts/": row_of(programs), "all": row_of(four + everything)}


def limited(name: str) -> tuple[str, ...]:
    """The columns of a row that may only fall."""
    return DENSITIES if name in ("programs in scripts/", "all") else LIMITED


def show(rows: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    for name, row in rows.items():
        print(f"{name:32}", *(f"{column} {value:<6}" for column, value in row.items()))


def lower(rows: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The ratchet after today: each number is the lower one of the two. A new file gets today's."""
    ratchet = {}
    for name, row in rows.items():
        old = before.get(name, row)
        ratchet[name] = {column: min(row[column], old.get(column, row[column])) for column in limited(name)}
    return ratchet


def main() -> None:
    rows = table()
    show(rows)
    if "--lower" in sys.argv:
        before = json.loads(RATCHET.read_text()) if RATCHET.exists() else {}
        RATCHET.write_text(json.dumps(lower(rows, before), indent=1) + "\n")


if __name__ == "__main__":
    main()
