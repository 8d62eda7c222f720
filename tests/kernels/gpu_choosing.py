"""The kernels that work by row, as `select_kernels` hands them out where there is a GPU."""

from quire.kernels.choosing import Choosing
from quire.kernels.gpu.cruise import cruise_rows
from quire.kernels.gpu.finish import finish_rows
from quire.kernels.gpu.sample import choose_tokens
from quire.kernels.gpu.score import score_tokens
from quire.kernels.gpu.shape_logits import shape_logits, tally_tokens

CHOOSING = Choosing(shape_logits, choose_tokens, tally_tokens, score_tokens, finish_rows, cruise_rows)
