"""The columns of a `ChoiceTable`, for the kernels that read a row's line of it."""

import triton.language as tl

# Of the integers.
SEED, INDEX, TOP_K, IS_RANDOM, MIN_TOKENS, NUM_PROMPT = (tl.constexpr(column) for column in range(6))
# Of the floats.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(column) for column in range(6))
