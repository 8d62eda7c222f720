"""The offline API: all forms of prompts, the shape of outputs, chat, and when requests return."""

import os
import shutil
import sys

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.errors import ChatTemplateError, InvalidParameter, InvalidPrompt, NoTokenizer, QuireError
from quire.sched.audit import audit, audit_rest
from tests.llm.tiny import VOCAB, byte_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(autouse=True)
def _at_rest(llm: LLM):
    """Every test releases all blocks and rows."""
    yield
    while not llm.client.idle:
        llm.client.step()
    audit(llm.built.engine.scheduler)
    audit_rest(llm.built.engine.scheduler)


def test_a_prompt_is_the_same_in_every_form(llm):
    ids = byte_ids("Hello")
    forms = ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}, ids, tuple(ids)]
    alone = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(outputs) == 1 for outputs in alone)
    together = llm.generate(forms, GREEDY)
    expected = alone[0][0].outputs[0].token_ids
    for output in [outputs[0] for outputs in alone] + together:
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == expected
    assert [output.prompt for output in together] == ["Hello", "Hello", None, None, None]


def test_errors_name_settings_as_keywords(llm, tiny_folder):
    """What the command line names as flags; of the constructor and of requests."""
    with pytest.raises(QuireError, match=r"Use max_model_len=\d+ or less\.$") as caught:
        LLM(str(tiny_folder), max_model_len="8m")
    assert "--" not in caught.value.message and str(caught.value) == caught.value.message
    with pytest.raises(InvalidParameter, match=r"start it with max_num_seqs=100\.$"):
        llm.generate("a", SamplingParams(n=100))
    over = LLM.over(llm.built)  # as the command line does
    with pytest.raises(InvalidParameter, match=r"start it with --max-num-seqs 100\.$"):
        over.generate("a", SamplingParams(n=100))


def test_a_process_without_stderr_can_generate(llm, monkeypatch):
    """As daemons and windowed programs are."""
    monkeypatch.setattr(sys, "stderr", None)
    assert len(llm.generate(["a", "b"], GREEDY)) == 2


def test_outputs_come_in_the_order_of_the_prompts(llm):
    lengths = [9, 1, 30, 4, 17]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate([f"prompt {length}" for length in lengths], params)
    assert [output.prompt for output in outputs] == [f"prompt {length}" for length in lengths]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert len({output.request_id for output in outputs}) == len(lengths)


@pytest.mark.parametrize("prompt", [[1, "a"], [1, None], [1, 2.5], [1, [2]], {"prompt_token_ids": [1, "a"]}])
def test_a_value_that_is_no_token_id_is_named(llm, prompt):
    with pytest.raises(InvalidPrompt, match="which is not a token id"):
        llm.generate(prompt, GREEDY)


def test_a_stream_of_several_prompts_is_refused(llm):
    with pytest.raises(InvalidPrompt, match=r"has .a., which is not a token id"):
        llm.stream(["a", "b"], GREEDY)


@pytest.mark.parametrize("prompt", [b"Hello", bytearray(b"Hello"), [bytearray(b"Hello")]])
def test_bytes_are_no_token_ids(llm, prompt):
    with pytest.raises(InvalidPrompt, match="A prompt is a text or token ids, not byte"):
        llm.generate(prompt, GREEDY)


def test_a_refusal_among_several_says_which(llm):
    """As for a column of a table in which a value is missing."""
    with pytest.raises(InvalidPrompt, match=r"^Prompt 2 of 3, counted from 0: .* not float\."):
        llm.generate(["a", "b", float("nan")], GREEDY)
    with pytest.raises(InvalidPrompt, match=r"^Prompt 0 of 2, counted from 0: The prompt is empty"):
        llm.generate(["", "b"], GREEDY)
    chats = [[{"role": "user", "content": content}] for content in ("a", float("nan"))]
    with pytest.raises(InvalidPrompt, match=r"^Conversation 1 of 2, counted from 0: messages\[0\] holds nan"):
        llm.chat(chats, GREEDY)
    with pytest.raises(InvalidPrompt, match=r"^The prompt is empty"):
        llm.generate([""], GREEDY)
    assert llm.client.idle


@pytest.mark.parametrize("pictures", [{"image": object()}, np.zeros((2, 2))])
def test_images_with_a_prompt_are_refused_not_dropped(llm, pictures):
    with pytest.raises(InvalidPrompt, match="omit multi_modal_data"):
        llm.generate({"prompt": "Hello", "multi_modal_data": pictures}, GREEDY)
    assert llm.generate({"prompt": "Hello", "multi_modal_data": {}}, GREEDY)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_the_numbers_of_prompts_and_parameters_must_agree(llm):
    with pytest.raises(InvalidParameter, match=r"3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "greedy", [{"temperature": 0}], [None]])
def test_parameters_of_another_type_are_refused(llm, params):
    with pytest.raises(InvalidParameter, match="sampling_params") as caught:
        llm.generate("a", params)
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"bytes", object(), [1.5], [None], [b"x"], {"text": "x"}, {}])
def test_prompts_of_another_type_are_refused(llm, prompt):
    with pytest.raises(InvalidPrompt):
        llm.generate(prompt, GREEDY)


def test_the_shape_of_an_output(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = llm.generate("shape", params)[0]
    completion = output.outputs[0]
    assert output.finished and output.prompt == "shape"
    assert completion.index == 0
    assert completion.finish_reason == "length" and completion.stop_reason is None
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert len(completion.token_ids) == len(completion.logprobs) == 6
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1  # greedy
        assert len(entry) == 2
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
        assert all(scored.logprob <= 0.0 for scored in entry.values())
    chosen = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token in entry and 1 <= len(entry) <= 2


def test_prompt_logprobs_with_a_single_token(llm):
    """The prompt, its scores, the token and the end come in one step."""
    scored = llm.generate("shape", SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    assert scored[0] is None and all(entry is not None for entry in scored[1:])


def test_fields_that_were_not_requested_are_absent(llm):
    output = llm.generate("shape", GREEDY)[0]
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


def test_metrics_are_in_order(llm):
    metrics = llm.generate("times", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0].metrics
    assert metrics.arrival_s <= metrics.first_token_s <= metrics.finished_s
    assert 0.0 <= metrics.time_to_first_token_s <= metrics.total_s
    assert metrics.finished_step - metrics.arrival_step == 4  # five steps, the first and the last counted
    assert metrics.num_preemptions == 0


def test_one_refused_request_among_many_leaves_nothing_behind(llm):
    scheduler = llm.built.engine.scheduler
    with pytest.raises(InvalidPrompt, match=str(VOCAB)):
        llm.generate([[5, 6], "fine", [5, VOCAB], "also fine"], GREEDY)
    assert scheduler.idle and not scheduler.groups()
    assert len(llm.generate(["fine", "also fine"], GREEDY)) == 2


def test_chat_renders_the_models_template(llm):
    messages = [{"role": "u", "content": "hi"}]
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt_token_ids == byte_ids("u:hi|a:")
    assert output.outputs[0].token_ids == llm.generate("u:hi|a:", GREEDY)[0].outputs[0].token_ids
    open_ended = llm.chat(messages, GREEDY, add_generation_prompt=False)[0]
    assert open_ended.prompt_token_ids == byte_ids("u:hi|")


@pytest.mark.parametrize("length", [2, 20, 33])
def test_a_context_may_be_shorter_than_a_block(tiny_folder, length):
    with LLM(str(tiny_folder), dtype="float32", max_model_len=length) as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": [5]}, SamplingParams(temperature=0, ignore_eos=True, max_tokens=length - 1)
        )
        assert len(output.outputs[0].token_ids) == length - 1


def test_by_default_chat_may_use_the_rest_of_the_context(tiny_folder):
    llm = LLM(str(tiny_folder), dtype="float32", max_model_len=64)
    messages = [{"role": "user", "content": "hi"}]
    stream = llm.stream_chat(messages)
    assert stream._request_state.params.max_tokens is None
    stream.close()
    output = llm.chat(messages)[0]
    room = llm.built.resolved.max_model_len - len(output.prompt_token_ids)
    assert output.outputs[0].finish_reason == "stop" or len(output.outputs[0].token_ids) == room


def test_chat_can_continue_the_last_message(llm):
    messages = [{"role": "u", "content": "hi"}, {"role": "a", "content": "Well"}]
    output = llm.chat(messages, GREEDY, continue_final_message=True)[0]
    assert output.prompt_token_ids == byte_ids("u:hi|a:Well")


def test_chat_takes_many_conversations_and_another_template(llm):
    conversations = [[{"role": "u", "content": text}] for text in ("one", "two")]
    outputs = llm.chat(conversations, GREEDY, chat_template="{{ messages[0].content }}!")
    assert [output.prompt_token_ids for output in outputs] == [byte_ids("one!"), byte_ids("two!")]


@pytest.mark.parametrize("messages", ["hi", 5, {"role": "u", "content": "x"}, [], [[]], ["hi"], [{"role": "u"}]])
def test_invalid_messages_are_refused(llm, messages):
    if messages == []:
        assert llm.chat(messages, GREEDY) == []
        return
    with pytest.raises(InvalidPrompt):
        llm.chat(messages, GREEDY)


def test_a_template_that_fails_is_the_users_error(llm):
    with pytest.raises(ChatTemplateError):
        llm.chat([{"role": "u", "content": "x"}], GREEDY, chat_template="{{ 1 / 0 }}")


def test_short_requests_return_after_their_own_steps(llm):
    """64 at once: each returns when it is finished, without waiting for longer ones."""
    lengths = [10 if index % 4 else 50 for index in range(64)]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate([[3 + index] * 5 for index in range(64)], params)
    assert llm.built.resolved.max_num_seqs >= 64
    for length, output in zip(lengths, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == length
        assert output.metrics.finished_step - output.metrics.arrival_step == length - 1


def test_rows_are_reused_while_a_long_request_runs(tiny_folder):
    """Four rows, one long request: the short ones pass through the other three while it runs."""
    few = LLM(str(tiny_folder), dtype="float32", max_num_seqs=4)
    lengths = [80] + [10] * 15
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = few.generate([[3 + index] * 5 for index in range(16)], params)
    finished = [output.metrics.finished_step - output.metrics.arrival_step for output in outputs]
    assert finished[0] == 79
    assert max(finished[1:]) < 60


def test_dummy_weights_take_and_return_token_ids():
    dummy = LLM("smollm2-135m", load_format="dummy", kv_cache_memory=1 << 26)
    output = dummy.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3))[0]
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
    for refused in (
        lambda: dummy.generate("text", GREEDY),
        lambda: dummy.generate([1], SamplingParams(stop="x")),
        lambda: dummy.generate([1], SamplingParams(bad_words=["x"])),
        dummy.get_tokenizer,
    ):
        with pytest.raises(NoTokenizer):
            refused()
    audit_rest(dummy.built.engine.scheduler)


def test_the_generation_config_sets_the_defaults(llm):
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)
    assert len(llm.generate("x")[0].outputs[0].token_ids) <= SamplingParams().max_tokens


def test_an_unknown_model_is_an_error_of_one_sentence():
    with pytest.raises(QuireError, match="no-such-model"):
        LLM("./no-such-model")


def test_settings_are_understood_as_on_the_command_line(tiny_folder):
    small = LLM(tiny_folder, dtype="float32", kv_cache_memory="1MiB", max_model_len="auto")
    assert small.built.resolved.kv_bytes == 1 << 20
    with pytest.raises(QuireError, match=r"There is no pp_size here: use pipeline_parallel_size"):
        LLM(tiny_folder, pp_size=2)
    with pytest.raises(TypeError, match=r"did you mean kv_cache_memory\?"):
        LLM(tiny_folder, kv_cache_mem="1MiB")
    with pytest.raises(QuireError, match=r"kv_cache_memory: 'much' is not a size; write a number, or for example 32k"):
        LLM(tiny_folder, kv_cache_memory="much")


def test_a_folder_without_a_tokenizer_takes_token_ids_alone(llm, tiny_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    silent = LLM(str(bare), dtype=torch.float32)
    prompt = {"prompt_token_ids": byte_ids("plain")}
    answer = silent.generate(prompt, GREEDY)[0].outputs[0]
    assert answer.token_ids == llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert answer.text == ""
    for refused in (
        lambda: silent.generate("text", GREEDY),
        lambda: silent.chat([{"role": "u", "content": "hi"}]),
        lambda: silent.generate(prompt, SamplingParams(stop="x")),
        lambda: silent.generate(prompt, SamplingParams(bad_words=["x"])),
    ):
        with pytest.raises(QuireError, match="no tokenizer"):
            refused()
    audit_rest(silent.built.engine.scheduler)


def test_a_model_may_be_a_path_and_prompts_may_be_arrays(llm, tiny_folder):
    ids = byte_ids("array")
    expected = llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    for form in (np.array(ids), torch.tensor(ids), list(np.array(ids)), {"prompt_token_ids": np.array(ids)}):
        assert llm.generate(form, GREEDY)[0].outputs[0].token_ids == expected
    stopping = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[np.int64(expected[0])])
    assert llm.generate(ids, stopping)[0].outputs[0].stop_reason == expected[0]
    assert LLM(tiny_folder, dtype="float32").generate(ids, GREEDY)[0].outputs[0].token_ids == expected


def test_chat_refuses_as_many_parameters_as_generate_does(llm):
    with pytest.raises(InvalidParameter, match="1 prompts and 0 sampling_params"):
        llm.chat([{"role": "u", "content": "x"}], [])


@pytest.mark.parametrize(
    "left_nothing",
    [
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
        {"allowed_token_ids": byte_ids("x"), "bad_words": ["x"]},
    ],
)
def test_parameters_that_leave_no_token_are_refused(llm, left_nothing):
    with pytest.raises(InvalidParameter, match="no token that could be sampled"):
        llm.generate("abc", SamplingParams(**left_nothing))


def test_a_failed_sequence_has_its_reason_and_others_continue(llm):
    """A bad word of two tokens leaves no allowed token after its first one."""
    params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=byte_ids("x"), bad_words=["xx"])
    failed, well = llm.generate(["abc", "abc"], [params, GREEDY])
    assert failed.outputs[0].finish_reason == "nothing_left"
    assert "No token could be sampled" in failed.outputs[0].error
    assert well.outputs[0].error is None
    assert well.outputs[0].token_ids == llm.generate("abc", GREEDY)[0].outputs[0].token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_an_error_instead_of_computing(llm, tiny_folder):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:  # no assertion here: it would be lost
        for use in (lambda: llm.generate("Hello", GREEDY), lambda: LLM(str(tiny_folder), dtype="float32")):
            try:
                use()
                os.write(theirs, b"computed ")
            except QuireError as error:
                os.write(theirs, error.message.encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours, encoding="utf-8") as told:
        assert told.read().count('multiprocessing.get_context("spawn")') == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_may_use_the_tokenizer(llm):
    """As the workers of a data loader do."""
    child = os.fork()
    if child == 0:
        try:
            ids, params = llm.get_tokenizer().encode("Hello"), llm.get_default_sampling_params()
            os._exit(0 if ids and params.max_tokens else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
