"""Generated sums and differences (`3+4=` -> `7`): a task that a tiny model learns in a minute."""

import random
from typing import Any

_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}


def arithmetic_rows(
    size: int | None = None, *, seed: int = 0, min_operand: int = 0, max_operand: int = 9, operators: str = "+"
) -> list[dict[str, Any]]:
    """Distinct problems in an order given by `seed`.

    Args:
        size: how many; None takes every problem there is, `(max_operand - min_operand + 1)**2` for each operator.
        seed: the same seed gives the same rows.
        min_operand, max_operand: both inclusive and not negative.
        operators: characters out of `+-`.

    Returns:
        Rows with the columns `prompt` (`"3+4="`) and `answer` (`"7"`).

    Raises:
        ValueError: unknown operator, empty range, or more rows wanted than distinct problems exist.
    """
    if not operators or set(operators) - set(_OPERATIONS):
        raise ValueError(f"arithmetic source: operators = {operators!r}, expected characters out of '+-'")
    if not 0 <= min_operand <= max_operand:
        raise ValueError(
            f"arithmetic source: needs 0 <= min_operand <= max_operand, got {min_operand} and {max_operand}"
        )
    operands = range(min_operand, max_operand + 1)
    count = len(operands) ** 2 * len(operators)
    if size is not None and not 0 < size <= count:
        raise ValueError(
            f"arithmetic source: size = {size}, but operands {min_operand}..{max_operand} and operators {operators!r} "
            f"give {count} distinct problems: choose 1 <= size <= {count} or raise max_operand"
        )
    rows = []
    for index in random.Random(seed).sample(range(count), count if size is None else size):
        pair, which = divmod(index, len(operators))
        left, right = (operands[number] for number in divmod(pair, len(operands)))
        operator = operators[which]
        rows.append({"prompt": f"{left}{operator}{right}=", "answer": str(_OPERATIONS[operator](left, right))})
    return rows
