"""Linear least squares for a handful of unknowns."""

from collections.abc import Sequence


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The coefficients c that minimise Σ (row · c − value)², by the normal equations.

    Raises ValueError if the rows do not determine them.
    """
    size = len(rows[0]) if rows else 0
    # Columns of equal length keep the equations well conditioned.
    scales = [sum(row[i] ** 2 for row in rows) ** 0.5 or 1.0 for i in range(size)]
    scaled = [[x / scale for x, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(scaled, values, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(matrix[row][i]))
        if abs(matrix[pivot][i]) < 1e-10:
            raise ValueError("the measurements do not determine the coefficients")
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for row in range(size):
            if row != i:
                factor = matrix[row][i] / matrix[i][i]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scales[i] for i in range(size)]
