"""Sizes of grids and tiles, reckoned on the host. Triton's own are made for kernels: they take it ten times as long."""


def cdiv(number: int, divisor: int) -> int:
    """How many of the divisor hold the number."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least that is not less; 1 for 0."""
    return 1 << (number - 1).bit_length() if number > 0 else 1
