"""Selection of attention backends: every reason to use a library, and every reason to refuse it."""

import pytest
import torch

from quire.config import ATTENTION_BACKENDS
from quire.core.errors import ConfigError
from quire.kernels import attention_backends, select
from quire.kernels.attention_backends import (
    PARTS,
    USUAL_NEEDS,
    AttentionChoice,
    AttentionPlatform,
    FoundBackend,
    choose_attention,
)
from quire.kernels.gpu.attention import decode
from quire.kernels.interface import AttentionRule

ALL = {name: FoundBackend(f"{name} 1.2") for name in ("torch", "fa3", "flashinfer")}
NONE = {name: FoundBackend(name, f"the package {name}") for name in ALL}
HOPPER = AttentionPlatform((9, 0), ALL)
CAPPED = USUAL_NEEDS._replace(rules=(AttentionRule(0.1), AttentionRule(0.1, 512, 50.0)))


def parts(choice: AttentionChoice) -> tuple[str, str, str]:
    return choice[:3]


def refusal(name: str, here: AttentionPlatform = HOPPER, **needs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_attention(name, USUAL_NEEDS._replace(**needs), here)
    assert caught.value.param == "attention_backend"
    assert "Use --attention-backend auto" in caught.value.message and caught.value.message.endswith(".")
    return caught.value.message


def test_figures_select_quires_kernels():
    choice = choose_attention("auto", USUAL_NEEDS, HOPPER)
    assert parts(choice) == ("quire",) * 3 and choice.backends == []
    assert "fa3 not: slower where it was measured" in choice.reasons


def test_figures_select_a_library_where_it_is_faster(monkeypatch):
    measured = {part: figures._replace(microseconds=dict(figures.microseconds)) for part, figures in
                attention_backends._MEASURED.items()}  # fmt: skip
    measured["long_chunk"].microseconds["fa3"] = (75.1, 857.7)
    measured["long_chunk"].microseconds["quire"] = (88.9, 1112.8)
    monkeypatch.setattr(attention_backends, "_MEASURED", measured)
    choice = choose_attention("auto", USUAL_NEEDS, HOPPER)
    assert parts(choice) == ("quire", "quire", "fa3") and choice.backends == [("long_chunk", "fa3")]
    assert choice.reasons == (
        "decodes by quire: 254 µs at 256 × 1,024 on an H200, fa3 277, flashinfer 372",
        "one long chunk by fa3 1.2: 858 µs at 8,192 tokens on an H200, quire 1,113, torch 1,779",
        "chunks by quire",
        "torch not: slower where it was measured",
        "flashinfer not: slower where it was measured",
    )


def test_a_library_without_figures_is_not_used(monkeypatch):
    measured = {part: figures._replace(microseconds={"quire": figures.microseconds.get("quire", ())}) for part, figures
                in attention_backends._MEASURED.items()}  # fmt: skip
    monkeypatch.setattr(attention_backends, "_MEASURED", measured)
    choice = choose_attention("auto", USUAL_NEEDS, HOPPER)
    assert parts(choice) == ("quire",) * 3 and choice.reasons[0] == "all by quire"
    assert "fa3 not: not measured; request it by name" in choice.reasons


def test_a_library_that_is_slower_on_average_is_not_used(monkeypatch):
    measured = {part: figures._replace(microseconds=dict(figures.microseconds)) for part, figures in
                attention_backends._MEASURED.items()}  # fmt: skip
    measured["long_chunk"].microseconds["fa3"] = (100.0, 1000.0)  # slower here by more than faster there
    measured["long_chunk"].microseconds["quire"] = (80.0, 1050.0)
    monkeypatch.setattr(attention_backends, "_MEASURED", measured)
    choice = choose_attention("auto", USUAL_NEEDS, HOPPER)
    assert parts(choice) == ("quire",) * 3 and "fa3 not: slower where it was measured" in choice.reasons


@pytest.mark.parametrize(
    ("here", "needs", "told"),
    [
        (AttentionPlatform((9, 0), NONE), USUAL_NEEDS, "fa3 not: it needs the package fa3"),
        (
            AttentionPlatform((8, 0), ALL),
            USUAL_NEEDS,
            "fa3 not: it is not for GPUs of compute capability 8.0, but for 9.x",
        ),
        (HOPPER.after_self_test("fa3", "wrong result"), USUAL_NEEDS, "fa3 not: its self-test failed (wrong result)"),
        (HOPPER, USUAL_NEEDS._replace(dtype=torch.float32), "fa3 not: it computes in bfloat16 and float16, not in"),
    ],
)
def test_auto_never_refuses_and_gives_a_reason_for_each_unused_library(here, needs, told):
    choice = choose_attention("auto", needs, here)
    assert parts(choice) == ("quire",) * 3 and choice.backends == []
    assert any(reason.startswith(told) for reason in choice.reasons), choice.reasons


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("quire", ("quire", "quire", "quire")),
        ("torch", ("quire", "quire", "torch")),
        ("fa3", ("fa3", "fa3", "fa3")),
        ("flashinfer", ("flashinfer", "quire", "quire")),
    ],
)
def test_a_requested_library_gets_all_parts_it_supports(name, chosen):
    choice = choose_attention(name, USUAL_NEEDS, HOPPER)
    assert parts(choice) == chosen
    assert "requested by name" in choice.reasons[0]
    assert ("the rest by quire" in choice.reasons) == (chosen.count(name) < len(PARTS))
    assert any("launched kernel by kernel" in reason for reason in choice.reasons) == (name == "flashinfer")


def test_a_refusal_names_what_is_missing():
    assert "it needs the package flashinfer" in refusal("flashinfer", AttentionPlatform((9, 0), NONE))
    assert "capability 10.0, but for 9.x" in refusal("fa3", AttentionPlatform((10, 0), ALL))
    assert "capability 7.5, but for 8.0 and later" in refusal("torch", AttentionPlatform((7, 5), ALL))
    assert "not in float32" in refusal("fa3", dtype=torch.float32)
    assert "up to 256 dims in steps of 8, and the model's 320" in refusal("fa3", dim=320)
    assert "the model's 100" in refusal("flashinfer", dim=100)
    assert "no soft cap" in refusal("torch", rules=CAPPED.rules)
    assert "self-test failed (wrong result)" in refusal("fa3", HOPPER.after_self_test("fa3", "wrong result"))
    assert parts(choose_attention("fa3", CAPPED, HOPPER)) == ("fa3",) * 3, (
        "windows and soft caps are no hindrance to it"
    )


def test_every_backend_of_the_settings_is_known():
    assert {"auto", "quire", *attention_backends._LIMITS} == set(ATTENTION_BACKENDS)
    assert attention_backends.find_backends().keys() == attention_backends._LIMITS.keys()


def test_a_cpu_has_no_attention_backends():
    assert select.select_kernels("cpu", USUAL_NEEDS, "quire").attention == ()
    with pytest.raises(ConfigError, match=r"fa3 needs a GPU, and the device is the CPU\. Omit") as caught:
        select.select_kernels("cpu", USUAL_NEEDS, "fa3")
    assert caught.value.param == "attention_backend"


def test_a_gpu_stores_keys_and_values_as_the_weights_are():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 is for CPUs; .* Omit --kv-cache-dtype, or") as caught:
        select.select_kernels("cuda", USUAL_NEEDS, kv_dtype=torch.int8)
    assert caught.value.param == "kv_cache_dtype"


def test_the_batch_invariant_mode_has_its_own_kernels_and_no_other_library(monkeypatch):
    from quire.kernels.gpu.batch_invariant import BatchInvariantKernels  # Triton, after its environment is set

    with pytest.raises(ConfigError, match="asks for fa3") as caught:
        select.select_kernels("cuda", USUAL_NEEDS, "fa3", batch_invariant=True)
    assert caught.value.param == "batch_invariant"
    choice = select.select_kernels("cuda", None, "auto", batch_invariant=True)
    assert isinstance(choice.kernels, BatchInvariantKernels) and "same bits in every batch" in choice.reason
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="batch_invariant needs Triton"):
        select.select_kernels("cuda", USUAL_NEEDS, batch_invariant=True)


def test_a_library_needs_triton_too(monkeypatch):
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    assert select.select_kernels("cuda", USUAL_NEEDS).kernels.name == "reference"
    with pytest.raises(ConfigError, match="fa3 needs Triton beside it"):
        select.select_kernels("cuda", USUAL_NEEDS, "fa3")


def test_libraries_are_found_without_being_imported(monkeypatch, tmp_path):
    found = attention_backends.find_backends()
    assert found["torch"] == FoundBackend(f"torch {torch.__version__}")
    for name in ("flash_attn_interface", "flashinfer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = attention_backends.find_backends()
    assert found["fa3"] == FoundBackend("flash_attn_interface") and found["flashinfer"] == FoundBackend("flashinfer")


def test_vllms_build_is_found_without_running_vllm(monkeypatch, tmp_path):
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "flash_attn_interface" in attention_backends.find_backends()["fa3"].missing
    (folder / "_vllm_fa3_C.abi3.so").touch()
    assert attention_backends.vllm_fa3_library() == folder / "_vllm_fa3_C.abi3.so"
    assert attention_backends.find_backends()["fa3"] == FoundBackend("FlashAttention-3 of vLLM")


def test_more_query_heads_than_a_tile_holds_are_refused_with_both_numbers():
    needs = USUAL_NEEDS._replace(heads=129, kv_heads=1, dim=256)
    with pytest.raises(ConfigError, match=r"has 129 query heads of 256 numbers.* holds 128 at a time"):
        select.select_kernels("cuda", needs)


def test_a_gpu_with_less_shared_memory_holds_fewer_query_heads(monkeypatch):
    monkeypatch.setattr(decode, "shared_memory_budget", lambda: 101_376)
    needs = USUAL_NEEDS._replace(heads=128, kv_heads=1, dim=256)
    with pytest.raises(ConfigError, match=r"has 128 query heads of 256 numbers.* holds 64 at a time"):
        select.select_kernels("cuda", needs)
    assert decode.max_query_heads(128, 2) == 128, "of the usual width"


def test_a_gpu_that_holds_no_query_head_is_refused(monkeypatch):
    monkeypatch.setattr(decode, "shared_memory_budget", lambda: 101_376)
    needs = USUAL_NEEDS._replace(heads=2, kv_heads=1, dim=1024, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"has 2 query heads of 1024 numbers; as torch.float32 the GPU holds 0"):
        select.select_kernels("cuda", needs)
