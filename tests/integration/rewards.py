"""Rewards of the integration tests, by dotted path."""


def even_answers_vary(answer: list[str]) -> list[float]:
    """Differs within the groups whose answer is even; all zero in the others."""
    return [float(index % 2) if int(value) % 2 == 0 else 0.0 for index, value in enumerate(answer)]
