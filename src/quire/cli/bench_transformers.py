"""`quire bench transformers`: quire and transformers on the same weights, as a table and, on request, as JSON.

A separate file: it needs the optional package transformers.
"""

import json
import platform
from collections.abc import Mapping

import torch
import transformers
from rich.table import Table

from quire.bench.transformers_baseline import EngineComparison, as_llama, compare_with_transformers
from quire.cli.console import err, out
from quire.cli.load_model import NamedModel, start
from quire.engine.build import weights_of
from quire.kernels.cpu.usable_cores import usable_cores
from quire.llm import LLM
from quire.version import __version__


def compare_transformers(model: NamedModel, given: Mapping[str, object]) -> None:
    built = start(model, report=True)
    # quire's kernels have threads of their own and leave one to torch: the baseline gets as many as quire has.
    torch.set_num_threads(int(str(given["threads"] or usable_cores().num_threads)))
    dtype = torch.bfloat16 if given["dtype"] == "bfloat16" else torch.float32
    baseline = as_llama(built.checkpoint.spec, weights_of(built.checkpoint, dtype), dtype)
    comparisons = compare_with_transformers(
        LLM.over(built),
        baseline,
        num_requests=int(str(given["requests"])),
        batch_size=int(str(given["batch"])),
        repeats=int(str(given["repeats"])),
        say=lambda text: err.print(text, style="dim"),
    )
    out.print(f"{built.name} · {built.dtype} · quire {__version__} · transformers {transformers.__version__}")
    table = Table()
    for column in ("discipline", "quire tok/s", "transformers tok/s", "times faster (each repeat)"):
        table.add_column(column, justify="left" if column == "discipline" else "right")
    for each in comparisons:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in each.ratios)
        table.add_row(
            f"{each.workload} / {each.baseline.name}",
            f"{each.quire.tokens_per_s:.1f}",
            f"{each.baseline.tokens_per_s:.1f}",
            f"{each.ratio:.2f} ({ratios})",
        )
    out.print(table)
    if given["as_json"]:
        print(json.dumps(_summary(comparisons, built.dtype)))


def _summary(comparisons: list[EngineComparison], dtype: str) -> dict[str, object]:
    return {
        "quire": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "races": [
            {
                "discipline": each.workload,
                "rival": each.baseline.name,
                "tokens": each.quire.tokens,
                "quire_s": each.quire.seconds,
                "rival_s": each.baseline.seconds,
                "ratio": each.ratio,
            }
            for each in comparisons
        ],
    }
