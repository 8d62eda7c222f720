"""What a user may type, before any disk or network is asked."""

import pytest

from quire.catalog.names import DEFAULT_MODEL, HubName, hub_name, quantizations, short_name, suggest


@pytest.mark.parametrize("text", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "smollm2", "SMOLLM2"])
def test_a_short_name_is_known_in_any_case(text: str) -> None:
    assert short_name(text) is DEFAULT_MODEL


@pytest.mark.parametrize("text", ["smollm", "smollm2-135m", "", "org/smollm2"])
def test_no_other_text_is_a_short_name(text: str) -> None:
    assert short_name(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name", None)),
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", None)),
        ("org/name-GGUF:file.Q4_0.gguf", HubName("org/name-GGUF", "file.Q4_0.gguf")),
        ("org/name:sub/file.gguf", HubName("org/name", "sub/file.gguf")),
        ("org/name:Q4_K_M", HubName("org/name", None, "Q4_K_M")),
        ("hf.co/org/name:Q8_0", HubName("org/name", None, "Q8_0")),
        ("https://huggingface.co/org/name", HubName("org/name", None)),
        ("https://huggingface.co/org/name/tree/main", HubName("org/name", None)),
        ("https://example.com/org/name", None),
        ("org/name:file.bin", None),
        ("org/name.gguf", None),
        ("name", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("../b", None),
        ("/a/b", None),
        ("~/b", None),
        ("org/na me", None),
        ("org/", None),
    ],
)
def test_hub_ids(text: str, expected: HubName | None) -> None:
    assert hub_name(text) == expected


def test_a_hub_name_reads_as_it_was_typed() -> None:
    assert str(HubName("org/name", "file.gguf")) == "org/name:file.gguf"
    assert str(HubName("org/name", None)) == "org/name"
    assert str(HubName("org/name", None, "Q8_0")) == "org/name:Q8_0"


def test_files_by_quantization() -> None:
    names = ["a-q4_k_m.gguf", "b-imatrix-Q4_K_M.gguf", "a.Q8_0.gguf", "a-F16.gguf", "a-UD-IQ2_XXS.gguf", "a.gguf",
             "a-Q6_K-00001-of-00002.gguf", "Q2_K.txt", "x/a-Q2_K.gguf"]  # fmt: skip
    assert quantizations(names) == {
        "Q4_K_M": "a-q4_k_m.gguf", "Q8_0": "a.Q8_0.gguf", "F16": "a-F16.gguf", "UD-IQ2_XXS": "a-UD-IQ2_XXS.gguf",
        "Q2_K": "x/a-Q2_K.gguf",
    }  # fmt: skip


def test_a_misspelt_name_gets_the_nearest_ones_and_the_forms() -> None:
    sentence = suggest("smolm2-135m-instrukt")
    assert sentence.startswith("Did you mean smollm2-135m-instruct")
    assert "org/name:file.gguf" in sentence


def test_an_unlike_name_gets_no_guess() -> None:
    assert "Did you mean" not in suggest("zzzzzzzz")
