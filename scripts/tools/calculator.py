"""The tool calculator: arithmetic, exact for whole numbers, without eval."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 500
MAX_BITS = 4096
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: Fraction,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", ",": ""})
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression of numbers, + - * / // % ** and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for instance (127 + 5) * 344"}},
            "required": ["expression"],
        },
    },
}


def value(node: ast.AST) -> Fraction:
    """The exact value of an expression. Raises ValueError for what is no arithmetic or exceeds MAX_BITS."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return Fraction(str(node.value))
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        case ast.BinOp() if type(node.op) in OPERATORS:
            left = value(node.left)
            right: Fraction | int = value(node.right)
            if isinstance(node.op, ast.Pow):
                if right.denominator != 1 or abs(right) * bits(left) > MAX_BITS:
                    raise ValueError("the exponent is no whole number, or the power is too large")
                right = right.numerator
            result = Fraction(OPERATORS[type(node.op)](left, right))
            if bits(result) > MAX_BITS:
                raise ValueError("the number is too large")
            return result
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:60]}")


def bits(number: Fraction) -> int:
    """Of the longer one of numerator and denominator."""
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def call(config: dict, expression: str) -> str:
    """The value: all digits of a whole number, 10 significant digits of another. Raises ValueError."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
    text = expression.translate(SIGNS).strip()
    try:
        result = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not arithmetic: {expression[:60]}") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return str(result.numerator) if result.denominator == 1 else f"{float(result):.10g}"
