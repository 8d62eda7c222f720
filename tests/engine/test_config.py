"""Resolution of the settings: from the user's values, the machine and the model to the engine's numbers."""

import inspect
from dataclasses import fields, replace
from typing import get_type_hints

import pytest

from quire.config import (
    _FOREIGN_VALUES,
    OVERCOMMITS,
    REGIMES,
    EngineConfig,
    SettingsDict,
    check_names,
    flags_as_keywords,
    foreign_value_hint,
    setting_of,
    shows_settings,
)
from quire.core.errors import ConfigError
from quire.core.model import ModelSpec, RopeSpec
from quire.engine import build_scheduler
from quire.engine.resolved_config import GIB, MachineInfo, resolve, resolve_dtype
from quire.sched import policy
from quire.sched.reservation import Overcommit

SPEC = ModelSpec(
    family="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    vocab_size=100, max_positions=1000, norm_eps=1e-5, rope=RopeSpec(10000.0, 16), tied_embeddings=True,
)  # fmt: skip
PER_TOKEN = SPEC.kv_bytes_per_token(4)
CPU = MachineInfo("cpu", free_bytes=8 * GIB, fast_bfloat16=True, num_cores=2)
GPU = MachineInfo("cuda", free_bytes=70 * GIB, fast_bfloat16=True, num_cores=2, total_bytes=80 * GIB)


def resolved(machine: MachineInfo = CPU, **values: object):
    return resolve(EngineConfig(**values), SPEC, PER_TOKEN, machine)


def refusal(**values: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(**values)
    assert caught.value.message.endswith(".")
    return caught.value


def test_all_settings_are_derived_with_their_reasons():
    numbers = resolved()
    assert numbers.max_model_len == 1000 and numbers.reasons["max_model_len"] == "the model"
    assert (numbers.max_num_seqs, numbers.max_num_batched_tokens, numbers.run_ahead) == (64, 512, 0)
    assert (numbers.block_size, resolved(GPU).block_size) == (32, 16)
    assert numbers.kv_bytes == 64 * 1024 * PER_TOKEN  # no more than all rows could use, in whole blocks
    assert set(numbers.reasons) == {
        "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "max_model_len", "block_size", "run_ahead",
        "regime",
    }  # fmt: skip
    gpu = resolved(GPU)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens, gpu.run_ahead) == (512, 8192, 1)
    few = resolved(GPU, max_num_batched_tokens=300)
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (300, 300), "no more rows than tokens by default"
    served = resolve(EngineConfig(), SPEC, PER_TOKEN, GPU, serving=True)
    assert (served.max_num_seqs, served.max_num_batched_tokens) == (256, 8192)


def test_a_gpu_reserves_memory_for_activations():
    """The KV cache gets the rest of quire's share of the GPU, less the 10 GiB in use and the workspace."""
    large = replace(SPEC, max_positions=10**6)
    for values, share in ((None, 0.9), (0.5, 0.5), (1, 1.0)):
        numbers = resolve(EngineConfig(gpu_memory_utilization=values), large, PER_TOKEN, GPU)
        left = int(80 * GIB * share) - 10 * GIB - numbers.workspace_bytes
        assert numbers.kv_bytes == left and numbers.workspace_bytes > GIB
    plain = resolve(EngineConfig(kv_cache_memory=GIB), large, PER_TOKEN, GPU)
    assert plain.kv_bytes == GIB, "plain bytes are not changed"
    with pytest.raises(ConfigError, match="nothing is left for the KV cache within 10%") as caught:
        resolve(EngineConfig(gpu_memory_utilization=0.1), large, PER_TOKEN, GPU)
    assert caught.value.param == "gpu_memory_utilization"
    assert resolved(CPU).workspace_bytes == 0


def test_given_settings_are_kept():
    numbers = resolved(
        max_model_len=500, block_size=8, kv_cache_memory=600 * PER_TOKEN, max_num_seqs=3, max_num_batched_tokens=9,
        run_ahead=2, regime="paged",
    )  # fmt: skip
    assert (numbers.max_model_len, numbers.block_size, numbers.num_blocks) == (500, 8, 75)
    assert (numbers.max_num_seqs, numbers.max_num_batched_tokens, numbers.run_ahead) == (3, 9, 2)
    assert numbers.regime == "paged"
    assert set(numbers.reasons.values()) == {"you"}


def test_the_regime_follows_enable_prefix_caching():
    assert (resolved().regime, resolved(enable_prefix_caching=False).regime) == ("prefix", "chunked")
    assert resolved(enable_prefix_caching=False, regime="static").regime == "static"
    assert refusal(enable_prefix_caching=False, regime="prefix").param == "regime"


def test_the_names_of_settings_are_those_of_the_scheduler():
    assert set(REGIMES) == set(policy.REGIMES)
    assert set(OVERCOMMITS) == {overcommit.value for overcommit in Overcommit}


def test_unheld_prefixes_fill_an_eighth_of_the_memory_of_a_cpu_at_first():
    block = 32 * PER_TOKEN
    assert resolved(kv_cache_memory=2**30).resident_limit == (2**27) // block
    assert resolved(kv_cache_memory=2**28).resident_limit == (2**26) // block
    small = resolved(kv_cache_memory=2**20)
    assert small.resident_limit == small.num_blocks
    assert resolved(GPU).resident_limit is resolved(host_kv_memory=block).resident_limit is None


def test_host_kv_memory_is_in_whole_blocks():
    block = 32 * PER_TOKEN
    assert resolved().num_host_blocks == resolved(GPU).num_host_blocks == 0
    assert resolved(host_kv_memory=3 * block + 5).num_host_blocks == 3
    error = refusal(host_kv_memory=block - 1)
    assert error.param == "host_kv_memory" and str(block) in error.message and str(block - 1) in error.message
    assert refusal(host_kv_memory=block, enable_prefix_caching=False).param == "host_kv_memory"
    assert refusal(host_kv_memory=block, regime="paged").param == "host_kv_memory"


def test_there_are_fewer_than_thirty_settings():
    """Besides the model itself."""
    assert len({each.name for each in fields(EngineConfig)} - {"model"}) < 30


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("kv_cache_memory", "1GiB", GIB),
        ("kv_cache_memory", " 500 MB ", 500 * 10**6),
        ("kv_cache_memory", "1.5gib", 3 * GIB // 2),
        ("kv_cache_memory", "1152921504606846975", 2**60 - 1),
        ("kv_cache_memory", "auto", None),
        ("host_kv_memory", "64k", 64_000),
        ("host_kv_memory", "1.5TiB", 1536 * GIB),
        ("host_kv_memory", "1tb", 10**12),
        ("max_model_len", "32k", 32 << 10),
        ("max_num_batched_tokens", "2k", 2 << 10),
        ("max_model_len", "AUTO", None),
    ],
)
def test_sizes_may_be_texts_with_a_unit(name, text, number):
    assert getattr(EngineConfig(**{name: text}), name) == number


def test_keywords_of_the_api_are_the_fields_of_the_config():
    """One name per setting, and the same type except for texts of sizes and torch's dtypes."""
    keywords = get_type_hints(SettingsDict)
    declared = {field.name: field for field in fields(EngineConfig) if field.name != "model"}
    types = get_type_hints(EngineConfig)
    assert list(keywords) == list(declared)
    for name, field in declared.items():
        setting = setting_of(field)
        expected = object if name == "dtype" else types[name] | str if setting.unit else types[name]
        assert keywords[name] == expected, name
        assert setting.help.endswith(".") and setting.optional == (field.default is None), name


def test_help_shows_every_setting():
    @shows_settings
    def load(model=None, *, watch=None, **settings):
        """Load."""

    shown = inspect.signature(load).parameters
    assert list(shown) == ["model", *SettingsDict.__annotations__, "watch"]
    assert shown["block_size"].default is None and shown["kv_cache_memory"].default is None
    assert "\n    block_size: Tokens in a KV block. Default: 16; on a CPU 32.\n" in load.__doc__


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pp_size", "use pipeline_parallel_size."),
        ("tp_size", "use tensor_parallel_size."),
        ("n_ctx", "use max_model_len."),
        ("swap_space", "use host_kv_memory, with a unit such as 4GiB."),
        ("cache_type_k", "use kv_cache_dtype, for keys and values."),
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization?"),
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("type_k", "use kv_cache_dtype, for keys and values."),
        ("torch_dtype", "use dtype."),
        ("top_k", "it is of a request: SamplingParams takes it."),
        ("max_new_tokens", "it is of a request: SamplingParams takes max_tokens."),
        ("served_model_name", "it is an option of quire serve; omit it."),
        ("chat_template_file", "chat takes chat_template, the text of a template."),
        ("xyz", "the settings are model, revision,"),
    ],
)
def test_an_unknown_keyword_is_refused_with_a_hint(name, hint):
    with pytest.raises(ConfigError) as caught:
        check_names(["device", name])
    assert isinstance(caught.value, TypeError), "as for any Python function"
    assert caught.value.param == name
    assert caught.value.message.startswith(f"There is no {name} here: {hint}")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Use --max-model-len 512 or less.", "Use max_model_len=512 or less."),
        ("use --dtype bfloat16 or --dtype float32.", 'use dtype="bfloat16" or dtype="float32".'),
        ("Omit --attention-backend, or", "Omit attention_backend, or"),
        ("--attention-backend asks for fa3", "attention_backend asks for fa3"),
        ("a larger KV cache (--kv-cache-memory).", "a larger KV cache (kv_cache_memory)."),
        ("omit --no-enable-prefix-caching and --regime.", "omit enable_prefix_caching=False and regime."),
        ("Use --enable-prefix-caching, or --host-kv-memory 0.", "Use enable_prefix_caching=True, or host_kv_memory=0."),
        ("Use --speculative draft:x, or --itl-target.", "Use speculative draft:x, or itl_target_ms."),
        ("use --replicas of quire serve", "use --replicas of quire serve"),
    ],
)
def test_flags_in_an_error_become_keywords(message, expected):
    assert flags_as_keywords(message) == expected


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("dtype", "half", "use float16, or on a CPU bfloat16."),
        ("dtype", "float", "use float32."),
        ("dtype", "FP8", "weights of 8 or 4 bits are quantization int8 or int4, on a CPU, or a GGUF file."),
        ("device", "gpu", "use cuda."),
        ("kv_cache_dtype", "fp8", "8 bits are int8, on a CPU."),
        ("dtype", "decimal", "float32, not 'decimal'."),
    ],
)
def test_a_value_of_another_engine_gets_a_hint(name, value, hint):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.message.endswith(hint)


def test_every_hint_is_for_a_value_that_is_refused():
    declared = {field.name: setting_of(field) for field in fields(EngineConfig)}
    for name, hints in _FOREIGN_VALUES.items():
        assert not set(hints) & set(declared[name].choices), name
        assert all(foreign_value_hint(name, value, as_flags=True) for value in hints), name


def test_only_whole_blocks_count():
    assert resolved(kv_cache_memory=65 * PER_TOKEN).num_blocks == 2
    assert resolved(kv_cache_memory=33 * PER_TOKEN, block_size=16).num_blocks == 2


def test_little_memory_shortens_the_context():
    numbers = resolved(kv_cache_memory=160 * PER_TOKEN)
    assert numbers.max_model_len == 161  # the last token is never computed
    assert numbers.reasons["max_model_len"] == "what the KV cache holds"
    poor = MachineInfo("cpu", free_bytes=4 * 320 * PER_TOKEN, fast_bfloat16=False, num_cores=1)
    assert resolved(poor).kv_bytes == 320 * PER_TOKEN


def test_a_longer_context_than_the_models():
    error = refusal(max_model_len=1001)
    assert error.param == "max_model_len" and "1001" in error.message and "1000" in error.message


def test_a_longer_context_than_the_cache():
    error = refusal(max_model_len=500, kv_cache_memory=160 * PER_TOKEN)
    assert error.param == "max_model_len"
    assert all(str(number) in error.message for number in (500, 160, 512 * PER_TOKEN))
    assert resolved(max_model_len=161, kv_cache_memory=160 * PER_TOKEN).max_model_len == 161


def test_the_memory_an_error_asks_for_is_enough():
    error = refusal(max_model_len=500, kv_cache_memory=160 * PER_TOKEN)
    asked = int(error.message.rpartition("--kv-cache-memory ")[2].split()[0])
    assert resolved(max_model_len=500, kv_cache_memory=asked).max_model_len == 500
    needed = [int(word) for word in refusal(kv_cache_memory=1).message.split() if word.isdigit()]
    assert resolved(kv_cache_memory=needed[-1]).num_blocks == 2


@pytest.mark.parametrize("kv_bytes", [1, PER_TOKEN, 15 * PER_TOKEN])
def test_a_kv_cache_too_small_for_one_request(kv_bytes):
    error = refusal(kv_cache_memory=kv_bytes)
    assert error.param == "kv_cache_memory" and "0 tokens" in error.message
    assert refusal(kv_cache_memory=PER_TOKEN, block_size=1).param == "kv_cache_memory"


def test_more_rows_than_a_step_holds():
    error = refusal(max_num_seqs=100, max_num_batched_tokens=99)
    assert error.param == "max_num_batched_tokens" and "100" in error.message and "99" in error.message
    assert resolved(max_num_seqs=2000).max_num_batched_tokens == 2000


def test_dtypes_follow_the_machine():
    slow = MachineInfo("cpu", GIB, fast_bfloat16=False, num_cores=2)
    assert resolve_dtype(EngineConfig(), CPU) == "bfloat16"
    assert resolve_dtype(EngineConfig(), slow) == "float32"
    assert resolve_dtype(EngineConfig(dtype="bfloat16"), slow) == "bfloat16"
    assert resolve_dtype(EngineConfig(dtype="float16"), GPU) == "float16"
    with pytest.raises(ConfigError, match="bfloat16"):
        resolve_dtype(EngineConfig(dtype="float16"), CPU)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("revision", [5, ["main"]]),
        ("load_format", ["pickle", "", None, 5, []]),
        ("device", ["tpu", None, 0, ["cpu"]]),
        ("dtype", ["int8", None, 16]),
        ("attention_backend", ["xformers", "", None, 3]),
        ("max_model_len", [0, 1, -5, 2**24, 1.0, "1e3", True]),
        ("block_size", [0, -1, 257, 1.0, "16", True]),
        ("kv_cache_memory", [0, -1, 2**61, 1e9, "much", "1PB", "-1", ""]),
        ("gpu_memory_utilization", [0, -0.1, 1.01, float("nan"), "0.9", True]),
        ("kv_cache_dtype", ["fp8", "int4", "", None, 8]),
        ("max_num_seqs", [0, 65537, 1.0, True]),
        ("max_num_batched_tokens", [0, 2**20 + 1, "x"]),
        ("run_ahead", [-1, 3, 1.0, True, "1"]),
        ("threads", [0, 1024, "2"]),
        ("enable_prefix_caching", [None, 0, 1, "yes"]),
        ("host_kv_memory", [-1, None, 1.5, "auto", True]),
        ("overcommit", ["always", None, 1, ["never"]]),
        ("itl_target_ms", [0, -1.0, float("nan"), float("inf"), "20", True, 10**7]),
        ("max_waiting", [0, -1, 1.5, True, "9"]),
        ("regime", ["orca", "", 5]),
        ("tenant_weights", [None, 5, {"a": 0}, {"a": float("nan")}, {"a": "1"}]),
        ("seed", [None, "x", 1.5, True, 2**63, -(2**63)]),
    ],
)
def test_settings_outside_what_they_may_be(name, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{name: value})
        assert caught.value.param == name and repr(value) in caught.value.message


@pytest.mark.parametrize(("positions", "block_size"), [(100, 16), (512, 100), (100, 256), (7, 8)])
def test_a_single_row_gets_the_whole_context_whatever_the_block_size(positions: int, block_size: int) -> None:
    spec = replace(SPEC, max_positions=positions)
    numbers = resolve(EngineConfig(max_num_seqs=1, block_size=block_size), spec, PER_TOKEN, CPU)
    assert numbers.max_model_len == positions
    assert numbers.reasons["max_model_len"] == "the model"


def test_drafters_are_those_asked_for() -> None:
    assert resolved().drafters == resolved(speculative="off").drafters == ()
    assert resolved(speculative="ngram").drafters == ("ngram",)
    assert resolved(speculative="auto").drafters == resolved(speculative="ngram+tree").drafters == ("ngram", "tree")
    assert resolved(GPU, speculative="auto").drafters == ("ngram", "tree")


def test_drafts_of_a_model_on_a_gpu_are_not_judged_by_what_the_text_says() -> None:
    """No token tells what the draft model, or the head, would have drafted."""
    of_models = [("draft",), ("ngram", "draft"), ("eagle",), ("tree", "mtp")]
    for drafters, in_hindsight in ((("ngram", "tree"), True), *((each, False) for each in of_models)):
        policy = build_scheduler._speculation(drafters, captured=True)
        assert (policy.hindsight, policy.max_drafts, policy.max_verified) == (in_hindsight, 7, 512)


def test_on_a_cpu_rows_draft_from_text_behind_hits_and_models_and_scripts_anywhere() -> None:
    for drafters, behind_hits in ((("ngram", "tree"), True), (("grammar",), False), (("ngram", "draft"), False)):
        policy = build_scheduler._speculation(drafters, captured=False)
        assert (policy.hindsight, policy.after_hits) == (behind_hits, behind_hits)
        assert (policy.max_drafts, policy.max_verified) == (11, 0)
    assert not build_scheduler._speculation(("ngram",), captured=False, scripted=True).after_hits


def test_a_draft_model_on_a_gpu_takes_workspace() -> None:
    """Logits of its passes, and all tokens of every row."""
    plain, drafting = (resolved(GPU, speculative=each) for each in ("ngram", "ngram+draft:x"))
    each = SPEC.vocab_size + min(SPEC.max_positions, plain.max_model_len)
    assert drafting.workspace_bytes - plain.workspace_bytes == 4 * plain.max_num_seqs * each
    for name in ("mtp", "ngram+eagle:x"):
        states = 4 * plain.max_num_batched_tokens * 5 * SPEC.hidden_size  # of four layers, and fused
        assert resolved(GPU, speculative=name).workspace_bytes == drafting.workspace_bytes + states
