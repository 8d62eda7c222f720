"""The kernels that work by row, as `select_kernels` hands them out where there is a GPU."""

from quire.kernels.gpu.decode_inputs import decode_inputs
from quire.kernels.gpu.sampling.finish import finish_rows
from quire.kernels.gpu.sampling.logit_processors import shape_logits, tally_tokens
from quire.kernels.gpu.sampling.logprobs import score_tokens
from quire.kernels.gpu.sampling.sample import choose_tokens
from quire.kernels.row_interface import RowKernels

CHOOSING = RowKernels(shape_logits, choose_tokens, tally_tokens, score_tokens, finish_rows, decode_inputs)
