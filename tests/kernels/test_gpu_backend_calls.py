"""What other libraries are handed: mixed steps through each of them, their own arithmetic replaced by plain loops."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from quire.core.errors import ConfigError
from quire.kernels import attention_backends, select
from quire.kernels.attention_backends import PARTS, AttentionNeeds, AttentionPlatform, FoundBackend
from quire.kernels.gpu.attention import dispatch as attention
from quire.kernels.gpu.attention import prefill_contiguous
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.backends.fa3 import Fa3, by_operator, by_wheel
from quire.kernels.gpu.backends.flashinfer import FlashInfer, pages_of
from quire.kernels.gpu.backends.interface import OWN, AttentionBackends
from quire.kernels.gpu.backends.self_test import self_test
from quire.kernels.gpu.backends.torch_varlen import TorchVarlen
from quire.kernels.interface import AttentionRule
from tests.kernels import fake_backends as strangers
from tests.kernels.layouts import Part
from tests.kernels.test_gpu_attention import DEVICE, Step

RULES = [AttentionRule(0.3), AttentionRule(0.2, 7), AttentionRule(0.3, 20, 5.0)]
MIXED = [Part(0, 1), Part(15, 1), Part(16, 1), Part(40, 1), Part(3, 9), Part(0, 20), Part(17, 2)]
LONG = [Part(8, 1), Part(30, 1), Part(21, 33)]


def fa3(call=by_wheel, stranger=strangers.flash_attn_with_kvcache) -> Fa3:
    return Fa3(call(stranger))


def answer(step: Step, backends: AttentionBackends) -> torch.Tensor:
    return GpuAttention(step.layout, step.num_decodes, backends).attend(step.query, step.kv_layer, step.rule)


@pytest.mark.parametrize(
    ("parts", "rule"),
    [(MIXED, RULES[2]), (MIXED[:4], RULES[1]), (MIXED[4:], RULES[0])],
    ids=["mixed", "decodes", "chunks"],
)
@pytest.mark.parametrize(
    ("call", "stranger"),
    [(by_wheel, strangers.flash_attn_with_kvcache), (by_operator, strangers.vllm_forward)],
    ids=["wheel", "vllm"],
)
def test_fa3_gets_pages_and_lengths(call, stranger, parts, rule):
    backend = fa3(call, stranger)
    step = Step(parts, rule=rule)
    step.check(answer(step, AttentionBackends(backend, backend, backend)))


@pytest.mark.parametrize("decodes", [fa3(), FlashInfer(strangers.FlashInferWrapper)], ids=["fa3", "flashinfer"])
def test_padding_is_passed_on_as_rows_without_keys_and_tokens_of_no_sequence(decodes):
    """A decode of nobody, a chunk of nobody behind the others, and tokens behind all."""
    step = Step(MIXED)
    layout, query = step.layout, torch.cat([step.query, step.query[:3]])
    lengths = torch.cat([layout.context_lengths, layout.context_lengths[:1]])
    lengths[[1, -1]] = 0
    padded = replace(
        layout,
        positions=torch.arange(len(query), device=DEVICE),
        tables=torch.cat([layout.tables, layout.tables[:1]]),
        query_starts=torch.cat([layout.query_starts, layout.query_starts[-1:]]),
        context_lengths=lengths,
    )
    output = GpuAttention(padded, 4, AttentionBackends(decodes, fa3())).attend(query, step.kv_layer, step.rule)
    step.truth[1] = output[1]
    output, truth = output[:-3].nan_to_num(), step.truth.nan_to_num()
    torch.testing.assert_close(output.cpu(), truth.cpu(), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("stranger", "rule"), [(strangers.varlen_attn, RULES[0]), (strangers.earlier_varlen_attn, RULES[1])]
)
def test_torch_gets_one_long_chunk_with_its_keys_gathered(stranger, rule, monkeypatch):
    monkeypatch.setattr(attention, "_MIN_GATHERED", 16)
    calls = []

    def counted(*given, **named):
        calls.append(given)
        return stranger(*given, **named)

    counted.__signature__ = inspect.signature(stranger)
    step = Step(LONG, rule=rule)
    step.check(answer(step, AttentionBackends(long_chunk=TorchVarlen(counted))))
    assert len(calls) == 1 and len(calls[0][0]) == 33, "the decodes are not its affair"
    monkeypatch.setattr(prefill_contiguous, "_MAX_BYTES", 100)
    step.check(answer(step, AttentionBackends(long_chunk=TorchVarlen(counted))))
    assert len(calls) == 1, "more keys than are worth gathering are not its affair either"


def test_torchs_own_function_accepts_the_arguments(monkeypatch):
    bound = []

    def binding(*given, **named):
        bound.append(inspect.signature(varlen_attn).bind(*given, **named))
        return given[0]

    binding.__signature__ = inspect.signature(varlen_attn)
    monkeypatch.setattr(attention, "_MIN_GATHERED", 16)
    step = Step(LONG)
    answer(step, AttentionBackends(long_chunk=TorchVarlen(binding)))
    assert bound[0].arguments["max_q"] == 33 and bound[0].arguments["window_size"] == (-1, 0)


def test_several_chunks_and_short_ones_are_not_long(monkeypatch):
    monkeypatch.setattr(attention, "_MIN_GATHERED", 34)
    calls = []
    backend = fa3(
        stranger=lambda *given, **named: calls.append(1) or strangers.flash_attn_with_kvcache(*given, **named)
    )
    step = Step(LONG)
    step.check(answer(step, AttentionBackends(long_chunk=backend)))
    assert not calls
    monkeypatch.setattr(attention, "_MIN_GATHERED", 16)
    several = Step(MIXED[3:])
    several.check(answer(several, AttentionBackends(long_chunk=backend)))
    assert not calls
    step.check(answer(step, AttentionBackends(long_chunk=backend)))
    assert calls


def test_flashinfer_plans_a_step_once_for_each_rule_and_keeps_its_wrappers():
    made = []
    backend = FlashInfer(lambda: made.append(strangers.FlashInferWrapper()) or made[-1])
    for num_steps in (1, 2):
        steps = [
            Step(MIXED[:4], block_size=3, rule=rule, seed=num_steps) for rule in RULES
        ]  # the same but for the rule
        planned = GpuAttention(steps[0].layout, 4, AttentionBackends(decodes=backend))
        for step in steps + steps:
            step.check(planned.attend(step.query, step.kv_layer, step.rule))
        assert [wrapper.num_plans for wrapper in made] == [num_steps] * len(RULES)
    assert (
        not AttentionBackends(decodes=backend).capturable
        and AttentionBackends(fa3(), fa3()).capturable
        and OWN.capturable
    )


def test_pages_of_rows_end_to_end():
    starts, places, last = pages_of(torch.tensor([5, 0, 4, 1]).numpy(), block_size=4, width=10)
    assert starts.tolist() == [0, 2, 2, 3, 4] and places.tolist() == [0, 1, 20, 30] and last.tolist()[0::2] == [1, 4]
    assert all(1 <= length <= 4 for length in last.tolist()), (
        "a row without pages has no last one, and says no nonsense"
    )


NEEDS = AttentionNeeds(4, 2, 16, torch.float16, 16, (AttentionRule(0.3), AttentionRule(0.3, 5)))
HERE = AttentionPlatform((9, 0), {name: FoundBackend(name) for name in ("torch", "fa3", "flashinfer")})
HERE_DEVICE = torch.device(DEVICE)


def test_a_library_that_agrees_passes_the_self_test():
    backend = fa3()
    for part in PARTS:
        assert self_test(lambda: backend, part, NEEDS, HERE_DEVICE) == "", part
    flashinfer = FlashInfer(strangers.FlashInferWrapper)
    assert self_test(lambda: flashinfer, "decodes", NEEDS, HERE_DEVICE) == ""
    assert self_test(lambda: TorchVarlen(strangers.varlen_attn), "long_chunk", NEEDS, HERE_DEVICE) == ""


def test_a_library_that_ignores_the_window_fails_the_self_test():
    def forgetful(*given, window_size, **named):
        return strangers.flash_attn_with_kvcache(*given, window_size=(-1, 0), **named)

    wide = NEEDS._replace(rules=(AttentionRule(0.3), AttentionRule(0.3, 4_096)))
    assert self_test(lambda: fa3(stranger=forgetful), "decodes", wide, HERE_DEVICE).startswith("decodes differ by ")
    unwindowed = NEEDS._replace(rules=NEEDS.rules[:1])
    assert self_test(lambda: fa3(stranger=forgetful), "decodes", unwindowed, HERE_DEVICE) == ""


def test_nan_fails_the_self_test():
    nonsense = fa3(stranger=lambda q, *rest, **named: q * torch.nan)
    assert "differ by nan" in self_test(lambda: nonsense, "chunks", NEEDS, HERE_DEVICE)


def broken(*given, **named):
    raise RuntimeError("no kernel image\nfor this device")


@pytest.fixture
def fa3_is_faster(monkeypatch):
    """At one long chunk, and at nothing else."""
    long_chunk = attention_backends._BackendFigures(("a shape",), {"quire": (2.0,), "fa3": (1.0,)})
    monkeypatch.setattr(attention_backends, "_MEASURED", {**attention_backends._MEASURED, "long_chunk": long_chunk})


@pytest.mark.usefixtures("fa3_is_faster")
def test_auto_skips_a_failing_library_and_a_requested_one_is_refused(monkeypatch):
    monkeypatch.setattr(select, "_load", lambda name, device: fa3(stranger=broken))
    backends, reasons = select.select_attention("auto", NEEDS, HERE, HERE_DEVICE)
    assert backends == OWN and "fa3 not: its self-test failed (RuntimeError: no kernel image)" in reasons
    with pytest.raises(ConfigError, match=r"fa3 cannot be used: its self-test failed .*no kernel image"):
        select.select_attention("fa3", NEEDS, HERE, HERE_DEVICE)


@pytest.mark.long(gpu=True)  # the self-test in the interpreter once more
def test_the_next_best_library_is_self_tested_too(monkeypatch):
    """fa3 is the best at one long chunk, and the second at decodes: there flashinfer is the best, and fails."""
    figures = {
        "decodes": {"quire": (3.0,), "fa3": (2.0,), "flashinfer": (1.0,)},
        "chunks": {},
        "long_chunk": {"quire": (2.0,), "fa3": (1.0,)},
    }
    measured = {part: attention_backends._BackendFigures(("a shape",), micros) for part, micros in figures.items()}
    monkeypatch.setattr(attention_backends, "_MEASURED", measured)

    def good_for_chunks_alone(*given, max_seqlen_q, **named):
        return strangers.flash_attn_with_kvcache(*given, max_seqlen_q=max_seqlen_q, **named) * (max_seqlen_q > 1)

    others = {"fa3": fa3(stranger=good_for_chunks_alone), "flashinfer": fa3(stranger=broken)}
    monkeypatch.setattr(select, "_load", lambda name, device: others[name])
    backends, reasons = select.select_attention("auto", NEEDS, HERE, HERE_DEVICE)
    assert backends == OWN, "a library that fails at one part is trusted with none"
    assert any(reason.startswith("fa3 not: its self-test failed (decodes differ by") for reason in reasons), reasons


def test_a_library_that_does_not_load_is_not_used(monkeypatch):
    def absent(name, device):
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(select, "_load", absent)
    assert select.select_attention("auto", NEEDS, HERE, HERE_DEVICE)[0] == OWN
    with pytest.raises(ConfigError, match=r"libcudart\.so\.13"):
        select.select_attention("flashinfer", NEEDS, HERE, HERE_DEVICE)


@pytest.mark.usefixtures("fa3_is_faster")
@pytest.mark.long(gpu=True)  # the self-test in the interpreter once more
def test_a_library_that_passes_gets_its_parts(monkeypatch):
    backend = fa3()
    monkeypatch.setattr(select, "_load", lambda name, device: backend)
    assert select.select_attention("auto", NEEDS, HERE, HERE_DEVICE)[0] == AttentionBackends(long_chunk=backend)
    assert select.select_attention("fa3", NEEDS, HERE, HERE_DEVICE)[0] == AttentionBackends(backend, backend, backend)
