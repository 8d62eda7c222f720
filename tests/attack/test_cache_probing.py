"""One tenant asks whether another has sent a prompt: neither the usage nor the time may tell. Nor can it evict that."""

import random
import time
from pathlib import Path

import httpx
import pytest

from tests.attack.conftest import HOSTILE, INNOCENT
from tests.chaos.conftest import Report
from tests.server.scripted_servers import scripted
from tests.server.server_process import Running

NUM_PROBES = 500
NUM_TOKENS = 640
NUM_REPEATED = 3000


def auc(hits: list[float], misses: list[float]) -> float:
    """The chance that a hit was faster than a miss."""
    ordered = sorted([(value, True) for value in hits] + [(value, False) for value in misses])
    rank_sum = sum(rank for rank, (_, is_hit) in enumerate(ordered) if not is_hit)
    return (rank_sum - len(misses) * (len(misses) - 1) / 2) / (len(hits) * len(misses))


def prompt(chance: random.Random) -> str:
    return "".join(chance.choices("0123456789", k=NUM_TOKENS))  # a digit is a token


def ask(client: httpx.Client, text: str, **fields: object) -> tuple[float, int]:
    """Seconds, and cached tokens as the usage tells them."""
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, **fields}
    began_s = time.perf_counter()
    response = client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - began_s
    assert response.status_code == 200, response.text
    return seconds, response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.timeout(600)
def test_what_another_tenant_has_cached_cannot_be_seen(
    tmp_path: Path, default_model_path: Path, report: Report
) -> None:
    """Half of the probes are prompts of the victim. Times are reported; the usage is asserted."""
    keys = tmp_path / "keys"
    keys.write_text("sk-hostile name=hostile\nsk-innocent name=innocent\n")
    chance = random.Random(6)
    seconds: dict[tuple[str, bool], list[float]] = {}
    with (
        scripted(tmp_path, "--api-key-file", str(keys), "--max-num-batched-tokens", "64") as server,
        server.client(headers=INNOCENT) as victim,
        server.client(headers=HOSTILE) as attacker,
    ):
        for number in range(NUM_PROBES):
            sent = prompt(chance)
            is_hit = chance.random() < 0.5
            if is_hit:
                ask(victim, sent)
            salted = {"cache_salt": "innocent"} if number % 5 == 0 else {}
            taken_s, cached = ask(attacker, sent, **salted)
            assert cached < 16, "a prefix of another tenant was found; of its own prompts the first digits are equal"
            seconds.setdefault(("attacker", is_hit), []).append(taken_s)
            if number % 5 == 1:  # the cache works for the tenant itself
                taken_s, cached = ask(attacker, sent, **salted)
                assert cached > NUM_TOKENS - 64
                seconds.setdefault(("own", True), []).append(taken_s)
    hits, misses, own = seconds["attacker", True], seconds["attacker", False], seconds["own", True]
    report(
        f"{NUM_PROBES} probes of another tenant's prompts: AUC of their time (0.45 to 0.55)",
        round(auc(hits, misses), 3),
    )
    report("  of its own prompts: AUC of the time (1: the cache works)", round(auc(own, misses), 3))


def test_junk_of_one_key_does_not_evict_what_another_uses(server: Running, report: Report) -> None:
    """The prompts of one key are some times the whole cache, all new; another repeats one prompt between them."""
    repeated = {"prompt": [7] * NUM_REPEATED, "max_tokens": 1}
    dice = random.Random(3)
    with server.client(headers=INNOCENT) as innocent, server.client(headers=HOSTILE) as hostile:
        innocent.post("/v1/completions", json=repeated).raise_for_status()
        found = []
        for _ in range(4):
            for _ in range(24):
                junk = "".join(dice.choices("0123456789", k=7_500))
                hostile.post("/v1/completions", json={"prompt": junk, "max_tokens": 1}).raise_for_status()
            usage = innocent.post("/v1/completions", json=repeated).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
    report(f"4 × 180,000 tokens of junk: tokens of another key's {NUM_REPEATED} that are cached", found)
    assert min(found) == NUM_REPEATED - 1
