"""What a profiler sees of an engine: NVTX ranges around the parts of its turns, heard by a listener of our own."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests import children

LISTENER = Path(__file__).with_name("nvtx_listener.c")
NUM_TOKENS = 12
PROGRAM = f"""
from quire import LLM, SamplingParams
llm = LLM("qwen3-0.6b", load_format="dummy", device="cuda", max_model_len=512, kv_cache_memory=1 << 28)
llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ranges of a process that answers one prompt, in order: +name where one begins, - where the last one ends."""
    folder = tmp_path_factory.mktemp("nvtx")
    library, told = folder / "listener.so", folder / "ranges.txt"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "Triton needs a C compiler, too: quire doctor says so"
    children.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, LISTENER], check=True)
    listening = {"NVTX_INJECTION64_PATH": str(library), "NVTX_LISTENER_OUT": str(told)}
    children.run([sys.executable, "-c", PROGRAM], env=os.environ | listening, check=True)
    return told.read_text().split()


def test_every_part_of_a_step_has_a_range(heard: list[str]) -> None:
    for part in ("plan", "launch", "wait", "absorb"):
        assert heard.count(f"+{part}") >= NUM_TOKENS, part
    assert heard.count("+launch") == heard.count("+wait") == heard.count("+absorb"), "a step has each of them once"


def test_every_range_that_starts_ends(heard: list[str]) -> None:
    depth = 0
    for range_ in heard:
        depth += 1 if range_.startswith("+") else -1
        assert depth >= 0
    assert depth == 0
