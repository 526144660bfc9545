"""Coefficients that are at least 0, through observations some of which lie far off.

Owns: the regression. Refuses to know: what is fitted.

Errors are relative: a decode step of 5 ms counts as much as a prompt of 500. The fit is iterated. Each time an
observation weighs less the further it lies off (Huber), so a step during which the core was taken away does not bend
the curve. Non-negative least squares is Lawson and Hanson's active set, on the triangle of a QR decomposition.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12
_HUBER = 1.345

Vector = NDArray[np.float64]


def robust_nonnegative(matrix: Vector, target: Vector, rounds: int = ROUNDS) -> Vector:
    """Coefficients of at least 0 whose relative errors are small, outliers set aside; in fewer rounds less exact."""
    scales = np.abs(matrix).max(axis=0)
    scales[scales == 0] = 1.0
    scaled = matrix / scales
    predicted = np.asarray(target, dtype=float)
    trust = np.ones(len(target))
    found = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        weights = np.sqrt(trust) / np.maximum(predicted, 1e-9)
        found = nonnegative(scaled * weights[:, None], target * weights)
        predicted = np.maximum(scaled @ found, 0.05 * target)
        errors = target / predicted - 1
        spread = max(1.4826 * float(np.median(np.abs(errors - np.median(errors)))), 1e-6)
        trust = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(errors), 1e-12))
    return np.asarray(found / scales)


def nonnegative(matrix: Vector, target: Vector) -> Vector:
    """min |matrix x - target| for x >= 0."""
    triangle: Vector = np.linalg.qr(np.column_stack([matrix, target]), mode="r")  # type: ignore[assignment]
    matrix, target = triangle[:, :-1], triangle[:, -1]
    size = matrix.shape[1]
    chosen = np.zeros(size, dtype=bool)
    x = np.zeros(size)
    tolerance = 1e-10 * float(np.abs(matrix.T @ target).max(initial=1e-300))
    for _ in range(6 * size):
        gradient = matrix.T @ (target - matrix @ x)
        if not (~chosen & (gradient > tolerance)).any():
            break
        chosen[np.argmax(np.where(chosen, -np.inf, gradient))] = True
        while True:
            trial = np.zeros(size)
            trial[chosen] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            negative = chosen & (trial <= 0)
            if not negative.any():
                break
            # As far towards the trial as no coefficient falls below 0; the one that reaches it leaves.
            step = np.min(x[negative] / np.maximum(x[negative] - trial[negative], 1e-300))
            x += step * (trial - x)
            chosen &= ~(negative & (x <= 1e-14))
            x[~chosen] = 0.0
        x = trial
    return x
