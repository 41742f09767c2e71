"""Bytes that a device sends in collectives."""


def all_reduce_bytes(whole: float, size: int) -> float:
    """Bytes that each of `size` devices sends to sum `whole` bytes in a ring: 2 (size - 1) / size of them.

    A reduce-scatter and an all-gather; no algorithm needs fewer (Patarasuk and Yuan 2009; nccl-tests' PERFORMANCE.md).
    """
    return 2 * all_gather_bytes(whole, size)


def all_gather_bytes(whole: float, size: int) -> float:
    """Bytes that each of `size` devices sends to gather `whole` bytes, to reduce-scatter or to exchange them."""
    return (size - 1) / size * whole
