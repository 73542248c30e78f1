"""The verifiers code and code_stdio: the model's program, run in a sandbox against the tests of the label.

What a sandbox is and what it keeps out is in scripts/parts/sandbox.py.
"""

import ast
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import rewards
from rewards import NO_ANSWER, RewardRecord, Scored, Verdict, final_text
from scripts.parts import programs, sandbox

SANDBOXES = sandbox.Pool(rewards.NUM_WORKERS)


@functools.cache
def sandbox_level() -> tuple[list[str], list[str]]:
    """(layers in force, leaks found by trying from inside); printed once. Raises ValueError if it cannot start."""
    box = sandbox.Sandbox()
    try:
        box.start()
    except sandbox.SandboxError as error:
        raise ValueError(str(error)) from None
    SANDBOXES.idle[()].append(box)
    message = f"code sandbox: {', '.join(box.layers)}"
    if box.leaks:
        message += f"; NOT kept out: {', '.join(box.leaks)}"
    print(message, file=sys.stderr)
    return box.layers, box.leaks


def require_sandbox() -> None:
    """Raises ValueError if a program in the sandbox could do something forbidden, unless allow_unsafe_code is set."""
    layers, leaks = sandbox_level()
    if leaks and not rewards.SETTINGS.flags.allow_unsafe_code:
        missing = [layer for layer in ("Landlock", "seccomp") if layer not in " ".join(layers)]
        raise ValueError(
            f"this machine's sandbox does not keep programs from {', '.join(leaks)}: it lacks {', '.join(missing)}. "
            "--allow_unsafe_code runs the model's programs anyway"
        )


def in_sandbox(call: Callable[[sandbox.Sandbox], Scored], *preload: str) -> Scored:
    """call(a sandbox), as soon as one is free; infra_error if the sandbox itself fails twice. preload: modules that the
    sandbox imports before it runs programs."""
    try:
        scored, waited = SANDBOXES.run(call, preload)
    except sandbox.SandboxError as error:
        return Scored(math.nan, "infra_error", {"problem": str(error)})
    return scored._replace(waited=waited)


def program_text(response: str) -> str:
    """The program in a response: the last ``` block tagged python (py, python3), else the last block, else all of
    final_text. A block that is never closed goes on to the end. open-instruct takes the last block whatever its tag;
    verl's sandbox_fusion takes no text without a fence."""
    text = final_text(response)
    block = None
    python_block = None
    start = text.find("```")
    while start >= 0:
        line_end = text.find("\n", start)
        if line_end < 0:
            break
        end = text.find("\n```", line_end)
        if end < 0:
            end = len(text)
        block = text[line_end + 1 : end]
        tag = text[start + 3 : line_end].split()[:1]
        if tag and tag[0].lower() in ("python", "py", "python3"):
            python_block = block
        start = text.find("```", end + len("\n```"))

    program = text
    if python_block is not None:
        program = python_block
    elif block is not None:
        program = block
    return program.strip("\n") + "\n"


def tests_of_label(ground_truth: Any, stdio: bool) -> list:
    """The tests of a label: for `code` the source of each test, for `code_stdio` (input, output) pairs.

    code takes ["assert f(1) == 2", ...] and verl's {"assert_case": [...]}; code_stdio takes [{"input", "output"}, ...]
    and verl's {"inputs": [...], "outputs": [...]}; both a list or dict, or its JSON. Raises ValueError for anything
    else, for a label without tests, and for a test that is not Python. open-instruct also unpickles labels, by which
    data could run code in the trainer.
    """
    name = "code_stdio" if stdio else "code"
    label = ground_truth
    if isinstance(ground_truth, str):
        try:
            label = json.loads(ground_truth)
        except ValueError as error:
            raise ValueError(f"{name} label is not JSON ({error}): {ground_truth[:80]!r}") from None
    if isinstance(label, dict):
        label = pair_tests(label) if stdio else label.get("assert_case")
    if not isinstance(label, (list, tuple)) or not label:
        raise ValueError(f"{name} label has no tests: {str(ground_truth)[:80]!r}")

    check_test = check_stdio_test if stdio else check_assert_test
    for number, test in enumerate(label, start=1):
        check_test(test, f"{name} label, test {number}:")
    return [(test["input"], test["output"]) for test in label] if stdio else list(label)


def pair_tests(label: dict) -> list[dict]:
    """[{"input", "output"}, ...] of verl's {"inputs": [...], "outputs": [...]}. Raises ValueError."""
    inputs = label.get("inputs")
    outputs = label.get("outputs")
    are_lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not are_lists or len(inputs) != len(outputs):
        raise ValueError(f"code_stdio label needs as many inputs as outputs, got the keys {sorted(label)}")
    return [{"input": given, "output": output} for given, output in zip(inputs, outputs, strict=True)]


def check_assert_test(test: Any, where: str) -> None:
    """Raises ValueError for a test that is not Python source."""
    if not isinstance(test, str) or not test.strip():
        raise ValueError(f"{where} not a text: {str(test)[:80]!r}")
    try:
        ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} not Python ({error}): {test[:80]!r}") from None


def check_stdio_test(test: Any, where: str) -> None:
    """Raises ValueError for a test without an input and an output, or with an output that no program may write."""
    if not isinstance(test, dict) or not all(isinstance(test.get(key), str) for key in ("input", "output")):
        raise ValueError(f'{where} not {{"input": text, "output": text}}: {str(test)[:80]!r}')
    if len(test["output"].encode()) > sandbox.OUTPUT_BYTES:
        raise ValueError(f"{where} the output exceeds {sandbox.OUTPUT_BYTES} bytes")


def pass_rate(runs: Sequence[sandbox.Run]) -> Scored:
    """The share of tests that passed; see code_pass_rate_reward_threshold. Missing if no program can pass one of them.
    unsupported: how many tests failed because a result was no plain data."""
    for run in runs:
        if run.is_tests_fault:
            return Scored(math.nan, "infra_error", {"problem": run.problem})

    passed = [int(run.problem is None) for run in runs]
    score = sum(passed) / len(runs)
    if score < rewards.SETTINGS.flags.code_pass_rate_reward_threshold:
        score = 0.0

    details: dict[str, Any] = {}
    details["passed"] = passed
    details["seconds"] = [run.seconds for run in runs]
    details["unsupported"] = sum(run.not_plain for run in runs)
    problems = [run.problem for run in runs if run.problem]
    if problems:
        details["problem"] = problems[0]
    return Scored(score, "ok", details)


def check(record: RewardRecord, stdio: bool) -> None:
    """Raises ValueError for a label without proper tests, or if no safe sandbox starts here."""
    tests = tests_of_label(record.ground_truth, stdio)
    if not stdio and not programs.names_wanted(tests):
        raise ValueError(f"code label's tests name nothing that a program defines: {str(tests)[:80]}")
    require_sandbox()


def verify(record: RewardRecord, stdio: bool) -> Verdict:
    """The pass rate of program_text in the sandbox; see pass_rate, tests_of_label.

    stdio: the program reads the input of a test, and sandbox.same_output compares its output; its exit status does not
    matter. Otherwise the tests call the program's functions from a process of their own, and compare there what comes
    back as plain data: see sandbox.Program. A test that takes too long or too much memory, crashes or exits has failed.
    After sandbox.MAX_TIME_LIMITS tests that exceed the time limit, the other tests count as failed without being run.
    open-instruct refuses programs with `import os` and the like.
    """
    tests = tests_of_label(record.ground_truth, stdio)
    program = program_text(record.response)
    if not program.strip():
        return NO_ANSWER
    require_sandbox()
    return Verdict(program, partial(in_sandbox, partial(run_program, program, tests, stdio)))


def run_program(program: str, tests: list, stdio: bool, box: sandbox.Sandbox) -> Scored:
    run_tests = sandbox.run_stdio if stdio else sandbox.run_tests
    return pass_rate(run_tests(box, program, tests, rewards.SETTINGS.flags.code_max_execution_time))
