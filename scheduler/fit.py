"""Fitting a few coefficients to many noisy times, without any library."""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDS = 6
_HUBER = 1.5
_RIDGE = 1e-6


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def robust_fit(rows: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of at least 0 with ``sum(c * x) ~ time``, in relative error, outliers aside.

    Iteratively reweighted least squares with Huber's weights (Huber, 1964) on relative residuals,
    whose scale is their median; a coefficient that would be negative is left out.
    """
    width = len(rows[0])
    floor = 0.1 * median(times)
    relative = [1.0 / max(time, floor, 1e-12) for time in times]
    scaled = [[x * r for x in row] for row, r in zip(rows, relative, strict=True)]
    goal = [time * r for time, r in zip(times, relative, strict=True)]
    size = [max(abs(row[k]) for row in scaled) or 1.0 for k in range(width)]
    unit = [[x / s for x, s in zip(row, size, strict=True)] for row in scaled]
    weights = [1.0] * len(unit)
    found = [0.0] * width
    for _ in range(_ROUNDS):
        found = _non_negative(unit, goal, weights)
        off = [
            abs(sum(c * x for c, x in zip(found, row, strict=True)) - y)
            for row, y in zip(unit, goal, strict=True)
        ]
        limit = max(_HUBER * 1.4826 * median(off), 1e-9)
        weights = [1.0 if r <= limit else limit / r for r in off]
    return tuple(c / s for c, s in zip(found, size, strict=True))


def _non_negative(
    rows: Sequence[Sequence[float]], goal: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Weighted least squares; coefficients that come out negative are set to 0, worst first."""
    width = len(rows[0])
    gram = [[0.0] * width for _ in range(width)]
    right = [0.0] * width
    for row, y, weight in zip(rows, goal, weights, strict=True):
        for i in range(width):
            scaled = weight * row[i]
            right[i] += scaled * y
            for j in range(i, width):
                gram[i][j] += scaled * row[j]
    ridge = _RIDGE * sum(gram[i][i] for i in range(width)) / width
    active = list(range(width))
    while active:
        matrix = [
            [gram[min(i, j)][max(i, j)] + (ridge if i == j else 0.0) for j in active]
            for i in active
        ]
        solution = _solve(matrix, [right[i] for i in active])
        worst = min(range(len(active)), key=lambda k: solution[k])
        if solution[worst] >= 0.0:
            found = [0.0] * width
            for i, value in zip(active, solution, strict=True):
                found[i] = value
            return found
        del active[worst]
    return [0.0] * width


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting of a positive definite system."""
    n = len(right)
    rows = [[*row, y] for row, y in zip(matrix, right, strict=True)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, n + 1):
                rows[i][j] -= factor * rows[k][j]
    out = [0.0] * n
    for k in reversed(range(n)):
        out[k] = (rows[k][n] - sum(rows[k][j] * out[j] for j in range(k + 1, n))) / rows[k][k]
    return out
