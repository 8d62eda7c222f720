"""The row kernels as `select_kernels` provides them on a GPU."""

from quire.kernels.gpu.decode_inputs import decode_inputs
from quire.kernels.gpu.sampling.finish import finish_rows
from quire.kernels.gpu.sampling.logit_processors import count_tokens, mask_logits, process_logits
from quire.kernels.gpu.sampling.logprobs import token_logprobs
from quire.kernels.gpu.sampling.sample import sample_tokens
from quire.kernels.row_interface import RowKernels

GPU_ROW_KERNELS = RowKernels(
    process_logits, mask_logits, sample_tokens, count_tokens, token_logprobs, finish_rows, decode_inputs
)
