"""Opening a Hugging Face folder: what is read besides the config, and what is refused."""

import json
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.core.errors import BrokenModelFile, ModelNotFound, QuireError, UnsupportedModel
from quire.engine.open_model import open_model
from quire.formats.checkpoint import CheckpointSource, GenerationDefaults
from quire.formats.hf_folder import open_folder
from quire.formats.open_checkpoint import open_checkpoint
from tests.formats.tiny import save_folder, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tiny_model("llama"), tmp_path / "model")


def edit(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def test_single_file_and_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    single = open_checkpoint(save_folder(model, tmp_path / "single"))
    sharded = open_checkpoint(save_folder(model, tmp_path / "sharded", shard_size="60KB"))
    assert len({tensor.path for tensor in sharded.tensors.values()}) > 2
    assert {name: t.shape for name, t in single.tensors.items()} == {n: t.shape for n, t in sharded.tensors.items()}
    assert single.source is CheckpointSource.FOLDER and single.num_bytes == sharded.num_bytes


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"),
    [([7, 8, 7], 5, (7, 8)), (6, 5, (6,)), (None, [5, 4], (5, 4)), (None, None, ())],
)
def test_end_tokens(folder: Path, in_generation: object, in_config: object, expected: tuple[int, ...]) -> None:
    edit(folder / "generation_config.json", eos_token_id=in_generation)
    edit(folder / "config.json", eos_token_id=in_config)
    assert open_folder(folder).end_ids == expected


def test_an_end_token_outside_the_vocabulary_is_left_out(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[79, 80, 32_000])
    assert open_folder(folder).end_ids == (79,)


def test_generation_defaults_count_when_the_model_should_sample(folder: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    edit(folder / "generation_config.json", do_sample=True, **values)
    assert open_folder(folder).defaults == GenerationDefaults(0.6, 0.9, 20, None, 1.1)
    edit(folder / "generation_config.json", do_sample=False)
    assert open_folder(folder).defaults == GenerationDefaults(repetition_penalty=1.1)


def test_a_recommended_top_k_may_be_minus_one_as_it_may_in_a_request(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample=True, top_k=-1)
    assert open_model(EngineConfig(model=str(folder))).default_params.top_k == -1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100, not 0.0."),
        ({"do_sample": True, "top_p": 0}, "top_p must be a number above 0 and at most 1, not 0.0."),
        ({"do_sample": True, "temperature": 1e9}, "temperature must be a number from 0 to 2, not 1000000000.0."),
    ],
)
def test_a_recommendation_that_no_request_could_follow_is_refused_when_the_model_is_opened(
    folder: Path, values: dict[str, object], words: str
) -> None:
    edit(folder / "generation_config.json", **values)
    with pytest.raises(BrokenModelFile) as refused:
        open_model(EngineConfig(model=str(folder)))
    path = folder / "generation_config.json"
    assert refused.value.message == (f"{path} contains an invalid value: {words} Correct or remove it.")
    edit(path, do_sample=False, repetition_penalty=1.1)
    assert open_model(EngineConfig(model=str(folder))).default_params.repetition_penalty == 1.1


def test_a_folder_without_generation_config_has_no_defaults(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert open_folder(folder).defaults == GenerationDefaults()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantized_checkpoints_are_refused_by_name(folder: Path, method: str) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedModel, match=method):
        open_checkpoint(folder)


@pytest.mark.parametrize("with_config", [True, False])
def test_adapters_are_refused_with_their_base(folder: Path, with_config: bool) -> None:
    edit(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="some/base")
    if not with_config:
        (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"LORA.*some/base"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unopened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UnsupportedModel, match=rf"{name}.*safetensors"):
        open_checkpoint(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_folder(tiny_model("llama"), tmp_path, shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BrokenModelFile, match=shard.name):
        open_checkpoint(folder)


def test_an_index_with_missing_tensors(tmp_path: Path) -> None:
    folder = save_folder(tiny_model("llama"), tmp_path, shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.odd.weight"] = sorted(folder.glob("*.safetensors"))[0].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModelFile, match=r"model\.layers\.9\.odd\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/hostname", "", "."])
def test_an_index_cannot_point_outside_its_folder(tmp_path: Path, shard: str) -> None:
    folder = save_folder(tiny_model("llama"), tmp_path / "model", shard_size="60KB")
    (tmp_path / "outside.safetensors").write_bytes((sorted(folder.glob("*.safetensors"))[0]).read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(BrokenModelFile):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\xff\xfe", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(BrokenModelFile, match=name):
        open_checkpoint(folder)


def test_paths_that_are_no_model(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "nothing", tmp_path / "notes.txt", empty, folder / "model.safetensors"):
        with pytest.raises(QuireError) as raised:
            open_checkpoint(path)
        assert str(path) in raised.value.message
