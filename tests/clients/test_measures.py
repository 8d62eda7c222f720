"""Programs that measure: lm-eval's score is the offline engine's, guidellm's token counts are the server's."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from quire import LLM, SamplingParams
from tests import children
from tests.clients.client_server import SMALL, serving
from tests.clients.client_world import KEY, MODEL
from tests.clients.environments import environment

TASK = Path(__file__).parent / "task"
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}


class Question(NamedTuple):
    """One line of the task's file."""

    question: str
    choices: list[str]
    answer: int


def run(*command: str, caches: Path) -> None:
    done = children.run(
        command,
        env=OFFLINE | {"HF_DATASETS_CACHE": str(caches)},
        cwd=TASK,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def offline_scores(questions: list[Question]) -> list[list[float]]:
    """For each question the log-probability of each choice after it."""
    llm = LLM(dtype="float32", max_model_len=4096, kv_cache_memory=512 << 20, threads=1)
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scores = []
    for each in questions:
        start = len(tokenizer.encode(each.question))
        outputs = llm.generate([f"{each.question} {choice}" for choice in each.choices], params)
        scores.append([
            sum(entry[token].logprob for token, entry in
                zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True))
            for output in outputs
        ])  # fmt: skip
    return scores


@pytest.mark.timeout(900)
def test_lm_eval_scores_as_the_offline_engine_does(tmp_path: Path, default_model_path: Path) -> None:
    lm_eval = str(environment("lm-eval") / "bin" / "lm_eval")
    with serving(*SMALL, "--dtype", "float32") as url:
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        model = f"model={name},base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=2,max_retries=1"
        run(lm_eval, "--model", "local-completions", "--model_args", model, "--tasks", "capitals", "--include_path",
            str(TASK), "--output_path", str(tmp_path), "--log_samples", caches=tmp_path / "caches")  # fmt: skip
    samples = [json.loads(line) for line in next(tmp_path.rglob("samples_*.jsonl")).read_text().splitlines()]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    questions = [Question(**json.loads(line)) for line in (TASK / "capitals.jsonl").read_text().splitlines()]
    scores = offline_scores(questions)
    for sample, ours in zip(samples, scores, strict=True):
        assert [float(choice[0][0]) for choice in sample["resps"]] == pytest.approx(ours, abs=1e-3)
    right = [scored.index(max(scored)) == each.answer for scored, each in zip(scores, questions, strict=True)]
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())["results"]["capitals"]
    assert results["acc,none"] == pytest.approx(sum(right) / len(right))


@pytest.mark.timeout(900)
def test_guidellm_ends_without_errors_and_counts_the_same_tokens(tmp_path: Path, scripted_url: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say hello, {number}."}) + "\n" for number in range(16)))
    guidellm = str(environment("guidellm") / "bin" / "guidellm")
    before = counted(scripted_url)
    backend = f"kind=openai_http,target={scripted_url},model={MODEL},api_key={KEY}"
    run(guidellm, "run", "--backend", backend, "--profile", "kind=concurrent,streams=4",
        "--data", f"kind=json_file,path={prompts}", "--constraint", "kind=max_requests,count=16",
        "--output", f"kind=json,path={tmp_path}/report.json", "--disable-console", caches=tmp_path)  # fmt: skip
    after = counted(scripted_url)
    found = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["metrics"]
    assert found["request_totals"] == {"successful": 16, "errored": 0, "incomplete": 0, "total": 16}
    told = [found[name]["successful"]["total_sum"] for name in ("prompt_token_count", "output_token_count")]
    assert told == [now - then for now, then in zip(after, before, strict=True)]


def counted(url: str) -> list[float]:
    """The server's own counts of prompt and generated tokens."""
    page = httpx.get(f"{url}/metrics", headers={"x-api-key": KEY}).text
    totals = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return [float(totals[f"quire_{name}_tokens_total"]) for name in ("prompt", "generation")]
