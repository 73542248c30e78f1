"""The tool python: a program in the sandbox of scripts/parts/sandbox.py, without network, files or other programs.

The answer is the output of the program, and the value of its last line where that is an expression. Config:

timeout             seconds of processor time (6)
allow_unsafe_code   run programs on a machine whose sandbox leaks too (false)
"""

from scripts.parts import run_code, sandbox

PROGRAM_S = 6.0  # of processor time

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints. Only the standard library and numpy.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    },
}
# The program has a name of its own, so that a traceback shows its lines alone. "single" prints the value.
RUN = """
import ast, sys, traceback
names = {"__name__": "__main__"}
try:
    tree = ast.parse(sys.stdin.read(), "program.py")
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, "program.py", "exec"), names)
    exec(compile(ast.Interactive(last), "program.py", "single"), names)
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next), limit=-3)
    sys.exit(1)
"""


def check(config: dict) -> None:
    """Raises ValueError, at start, on a machine whose sandbox cannot start or leaks."""
    _, leaks = run_code.sandbox_level()
    if leaks and not config.get("allow_unsafe_code"):
        raise ValueError(
            f"this machine's sandbox does not keep programs from {', '.join(leaks)} (python parts/sandbox.py); "
            '{"allow_unsafe_code": true} in --tool_configs runs them anyway'
        )


def call(config: dict, code: str) -> str:
    """What the program writes; of a text with ``` blocks, the last is the program. Raises ValueError for one that
    fails, ConnectionError where the sandbox does."""
    code = run_code.program_text(code) if "```" in code else code
    seconds = float(config.get("timeout", PROGRAM_S))
    try:
        run, _ = run_code.SANDBOXES.run(lambda box: box.run("program", [code, None, None, RUN], seconds), ())
    except sandbox.SandboxError as error:
        raise ConnectionError(str(error)) from None
    output = f"{run.output.strip()}\n{run.error.strip()}".strip()
    if run.problem or run.exit:
        raise ValueError(f"{output}\n{run.problem or ''}".strip() or f"exit status {run.exit}")
    return output or "(no output)"
