"""Orthogonalize matrices by the Newton-Schulz iteration of Muon (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon), and count what that costs.

Shapes in comments: K matrices of m rows and n columns, m <= n.
"""

import torch

# a, b and c of an iteration, from Jordan et al., as in torch.optim.Muon. The classical iteration
# has (1.5, -0.5, 0) and converges to 1. With these numbers it does not, but comes near 1 within
# five iterations, since each multiplies small singular values by 3.4.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# Iterations between two products with the whole matrix, if the shorter way is used: five in all. In
# one pass of five the rounding errors would be 60 times larger than with plain iterations.
_PASSES = (3, 2)
_ITERATIONS = sum(_PASSES)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration on a batch (K, rows, columns): singular values come out between about
    0.7 and 1.2.

    An iteration is x <- (a + b·A + c·A²)·x with A = x·xᵀ. In terms of the singular value
    decomposition x = U·S·Vᵀ it is U·(a·S + b·S³ + c·S⁵)·Vᵀ: a polynomial of each singular value,
    without computing the decomposition. Long float32 matrices take a shorter way to the same
    result: the factors of some iterations are polynomials in A, so their product comes from small
    squares alone. In bfloat16 A is not exact enough for that.
    """
    a, b, c = _COEFFICIENTS
    # With rows <= columns A is the smaller square of the two, (K, m, m).
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # No singular value is larger than the Frobenius norm, so all are at most 1 now. The polynomial
    # diverges for values far above 1.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    if x.dtype == torch.float32 and _is_long(*x.shape[-2:]):
        for iterations in _PASSES:
            x = _product_of_factors(x @ x.mT, iterations) @ x
    else:
        for _ in range(_ITERATIONS):
            gram = x @ x.mT  # A
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·A + c·A²
            x = torch.baddbmm(x, polynomial, x, beta=a)  # a·x + (b·A + c·A²)·x
    return x.mT if tall else x


def _is_long(m: int, n: int) -> bool:
    """Whether `_product_of_factors` takes fewer FLOPs for (m, n), m <= n: 8·m²·n + 28·m³ instead
    of 20·m²·n + 10·m³.
    """
    return 2 * n > 3 * m


def _product_of_factors(gram: torch.Tensor, iterations: int) -> torch.Tensor:
    """Product of the factors of some iterations, from the Gram matrix A of the first."""
    a, b, c = _COEFFICIENTS
    product = None
    for remaining in reversed(range(iterations)):
        # The factor F = a + b·A + c·A² of this iteration.
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if remaining:
            # The next x is F·x, and its Gram matrix (F·x)·(F·x)ᵀ = F·A·F, since F is symmetric.
            gram = factor @ (gram @ factor)
    assert product is not None
    return product


def orthogonalization_flops(rows: int, columns: int) -> int:
    """FLOPs of `orthogonalize` for one matrix by plain iterations; long float32 matrices take
    fewer.

    With m the smaller and n the larger dimension an iteration multiplies (m, n) by (n, m), (m,
    m) by (m, m) and (m, m) by (m, n): 2·m²·n + 2·m³ + 2·m²·n. Jordan et al. derive the bound 5·m
    / tokens per step for the share of a training step.
    """
    m, n = sorted((rows, columns))
    return _ITERATIONS * (4 * m * m * n + 2 * m**3)


def orthogonalization_buffers(rows: int, columns: int, *, float32: bool) -> int:
    """Values of the buffers of `orthogonalize` at its peak, for one matrix."""
    m, n = sorted((rows, columns))
    if float32 and _is_long(m, n):
        return max(m * n + 5 * m * m, 2 * m * n + m * m)
    return 2 * m * n + 2 * m * m
