"""The model that has a multi-token-prediction layer, MiMo, says what a Qwen2 with its weights says."""

import logging
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.open_model import open_model
from tests.llm.test_speculation import PROMPTS, said
from tests.llm.tiny import byte_ids, write_model
from tests.models.mtp_reference import ReferenceMtpLayer, tiny_qwen2

SETTINGS = {"dtype": "float32", "quantization": "none"}


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), tiny_qwen2())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ReferenceMtpLayer(tiny_qwen2()).write(tmp_path_factory.mktemp("mimo"))


@torch.inference_mode()
def test_a_mimo_says_what_a_qwen2_with_its_weights_says(
    qwen2_folder: Path, folder: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """To the bit, in chunks too, and what transformers says. The layer that drafts is skipped without a word."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    with caplog.at_level(logging.WARNING):
        mimo = LLM(str(folder), **SETTINGS, max_num_batched_tokens=16)
        outputs = mimo.generate(PROMPTS, params)
    assert not caplog.records and not recwarn.list
    assert said(outputs) == said(LLM(str(qwen2_folder), **SETTINGS).generate(PROMPTS, params))
    assert open_model(EngineConfig(str(folder))).checkpoint.spec.family == "mimo"
    peer = tiny_qwen2()
    for text, output in zip(PROMPTS, outputs, strict=True):
        known, (answer,) = byte_ids(text), output.outputs
        truth = torch.log_softmax(peer(torch.tensor([known + list(answer.token_ids)])).logits[0], dim=-1)
        for place, (token, scores) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(known) - 1):
            assert token == int(truth[place].argmax())
            assert scores[token].logprob == pytest.approx(truth[place, token].item(), abs=1e-4)
