"""`quire bench`: races, shown as a table and, if wanted, as one JSON object."""

import json
import platform
from collections.abc import Mapping

import torch
import transformers
from rich.table import Table

from quire.bench.race import Race, race
from quire.bench.rival import as_llama
from quire.cli.console import err, out
from quire.cli.start import start
from quire.engine.build import weights_of
from quire.llm import LLM
from quire.version import __version__


def race_transformers(model: str | None, given: Mapping[str, object]) -> None:
    built = start(model, given, report=True)
    dtype = torch.bfloat16 if given["dtype"] == "bfloat16" else torch.float32
    rival = as_llama(built.checkpoint.spec, weights_of(built.checkpoint, dtype), dtype)
    races = race(
        LLM.over(built),
        rival,
        num_requests=int(str(given["requests"])),
        batch_size=int(str(given["batch"])),
        repeats=int(str(given["repeats"])),
        say=lambda text: err.print(text, style="dim"),
    )
    out.print(f"{built.name} · {built.dtype} · quire {__version__} · transformers {transformers.__version__}")
    table = Table()
    for column in ("discipline", "quire tok/s", "transformers tok/s", "times faster (each repeat)"):
        table.add_column(column, justify="left" if column == "discipline" else "right")
    for each in races:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in each.ratios)
        table.add_row(
            f"{each.discipline} / {each.rival.name}",
            f"{each.quire.tokens_per_s:.1f}",
            f"{each.rival.tokens_per_s:.1f}",
            f"{each.ratio:.2f} ({ratios})",
        )
    out.print(table)
    if given["as_json"]:
        print(json.dumps(_summary(races, built.dtype)))


def _summary(races: list[Race], dtype: str) -> dict[str, object]:
    return {
        "quire": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "races": [
            {
                "discipline": each.discipline,
                "rival": each.rival.name,
                "tokens": each.quire.tokens,
                "quire_s": each.quire.seconds,
                "rival_s": each.rival.seconds,
                "ratio": each.ratio,
            }
            for each in races
        ],
    }
