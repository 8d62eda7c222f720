"""`quire bench race`: our command and a rival's in turns, in one table."""

import json
from collections.abc import Sequence as Many
from dataclasses import asdict

from rich.table import Table

from quire.bench.duel import Heat, duel
from quire.cli.console import err, out


def race(ours: Many[str], theirs: Many[str], rounds: int, as_json: bool) -> None:
    heats = duel(ours, theirs, rounds=rounds, say=lambda text: err.print(text, style="dim"))
    if as_json:
        print(json.dumps([_plain(heat) for heat in heats]))
        return
    columns = ("workload", "tokens out", "quire s", "rival s", "times faster", "drift")
    table = Table(*columns)
    for heat in heats:
        table.add_row(
            heat.workload,
            " ≠ ".join(f"{count:,}" for count in sorted(heat.num_output)),
            _each(heat.ours_s),
            _each(heat.theirs_s),
            f"{heat.ratio:.3f}" if heat.same_work else "not the same work",
            f"{heat.drift:.3f}",
        )
    out.print(table)
    out.print("Each of the rival's turns is compared with the mean of our turns before and after it; drift is our")
    out.print("slowest turn by our fastest.")


def _plain(heat: Heat) -> dict[str, object]:
    plain = {**asdict(heat), "num_output": sorted(heat.num_output), "same_work": heat.same_work, "drift": heat.drift}
    return {**plain, "ratios": heat.ratios, "ratio": heat.ratio} if heat.same_work else plain


def _each(seconds: Many[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in seconds)
