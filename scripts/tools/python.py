"""The tool python: a program in the sandbox of scripts/parts/sandbox.py, without network, files or other programs.

The answer is the output of the program, and the value of its last line where that is an expression. Config:

timeout             seconds of processor time (6)
state               names last for the episode (false). The episode's earlier programs run again before each program, so
                    they count for the timeout, and a program that draws random numbers has to seed them
allow_unsafe_code   run programs on a machine whose sandbox leaks too (false)
"""

import json

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
# Each cell is run as a module of its own text, in one namespace; those before the last are silent.
RUN_CELLS = """
import ast, contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
def show(value):
    if value is not None:
        print(repr(value))
def run(cell):
    tree = ast.parse(cell, "cell.py")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        value = ast.Call(ast.Name("__show__", ast.Load()), [last.value], [])
        tree.body[-1] = ast.copy_location(ast.Expr(value), last)
    exec(compile(ast.fix_missing_locations(tree), "cell.py", "exec"), names)
*earlier, cell = json.loads(sys.stdin.read())
names["__show__"] = lambda value: None
for text in earlier:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            run(text)
        except BaseException:
            pass
names["__show__"] = show
try:
    run(cell)
except SystemExit:
    raise
except BaseException as error:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != "cell.py":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace, limit=-3)
    sys.exit(1)
"""


def check(config: dict) -> None:
    """Raises ValueError, at start, for a time limit above the call's, and on a machine whose sandbox cannot start or
    leaks."""
    from scripts.tools import calls

    seconds = float(config.get("timeout", PROGRAM_S))
    most = float(config.get("deadline", calls.TIMEOUT_S))
    if seconds >= most:
        raise ValueError(f'"timeout": {seconds:g} of a program is not below "deadline": {most:g} of the call (seconds)')
    _, leaks = run_code.sandbox_level()
    if leaks and not config.get("allow_unsafe_code"):
        raise ValueError(
            f"this machine's sandbox does not keep programs from {', '.join(leaks)} (python parts/sandbox.py); "
            '{"allow_unsafe_code": true} in --tool_configs runs them anyway'
        )


class Tool:
    def __init__(self, config: dict) -> None:
        self.timeout = float(config.get("timeout", PROGRAM_S))
        self.keeps_state = bool(config.get("state"))
        self.cells: list[str] = []  # the episode's, where they are kept

    def call(self, code: str) -> str:
        """What the program writes; of a text with ``` blocks, the last is the program. Raises ValueError for one that
        fails, ConnectionError where the sandbox does."""
        code = run_code.program_text(code) if "```" in code else code
        files = [json.dumps([*self.cells, code]), None, None, RUN_CELLS]
        try:
            run, _ = run_code.SANDBOXES.run(lambda box: box.run("program", files, self.timeout), ())
        except sandbox.SandboxError as error:
            raise ConnectionError(str(error)) from None
        if self.keeps_state and not run.late:
            self.cells.append(code)
        output = f"{run.output.strip()}\n{run.error.strip()}".strip()
        if run.problem or run.exit:
            raise ValueError(f"{output}\n{run.problem or ''}".strip() or f"exit status {run.exit}")
        return output or "(no output)"
