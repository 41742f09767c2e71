"""Calculator: a tool for models, which computes arithmetic expressions exactly."""

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

# Limits for the time and memory of one expression.
_LONGEST = 200  # characters
# The bits of a power: about 3,000 digits.
_LARGEST_BITS = 10_000
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    text = expression.translate(_SIGNS).replace("^", "**").strip()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"this is no expression: {expression!r:.60}") from None
    return _text(_value(tree.body))


def _value(node: ast.expr) -> Fraction:
    match node:
        # Truth values are ints to Python, and complex numbers are constants, too.
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if value in (float("inf"), float("-inf")):
                raise ValueError("a number is too large")
            # As it is written: 0.1 is a tenth, not the nearest float.
            return Fraction(repr(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp(op=op) if type(op) in _OPERATIONS:
            return Fraction(_OPERATIONS[type(op)](_value(node.left), _value(node.right)))
    raise ValueError("only numbers, + - * / // % ** and parentheses are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent has to be a whole number")
    power = int(exponent)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(power) * bits > _LARGEST_BITS:
        raise ValueError("a power is too large")
    return base**power


def _text(value: Fraction) -> str:
    """A whole number with all its digits, any other with 15."""
    if value.denominator == 1:
        return str(value.numerator)
    exact = Context(prec=15)
    return str(exact.divide(Decimal(value.numerator), Decimal(value.denominator)))
