"""The effect of each sampling parameter, through the public API, on a model whose greedy text is generated first."""

import pytest

from quire import LLM, SamplingParams
from quire.sched.audit import audit_rest
from tests.llm.tiny import END, FIRST_BYTE, VOCAB, byte_ids

PROMPTS = ["one", "two and more", "3", "fourth prompt of them all"]


@pytest.fixture(autouse=True)
def _at_rest(llm: LLM):
    yield
    audit_rest(llm.built.engine.scheduler)


def complete(llm: LLM, prompt: str = "one", **params: object):
    """The first continuation; by default greedy and 30 tokens long."""
    settings = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True} | params
    return llm.generate(prompt, SamplingParams(**settings))[0].outputs[0]


def readable(llm: LLM, **params: object):
    """Random letters: text in which a stop string is easily found."""
    return complete(llm, temperature=1.0, seed=5, allowed_token_ids=byte_ids("abcdefgh"), **params)


def test_a_seed_reproduces_in_any_batch(llm):
    params = SamplingParams(seed=11, max_tokens=20)
    alone = llm.generate("seeded", params)[0].outputs[0].token_ids
    assert llm.generate("seeded", params)[0].outputs[0].token_ids == alone
    crowd = llm.generate([*PROMPTS, "seeded", *PROMPTS], params)
    assert crowd[len(PROMPTS)].outputs[0].token_ids == alone
    other = SamplingParams(seed=12, max_tokens=20)
    assert llm.generate("seeded", other)[0].outputs[0].token_ids != alone


def test_without_a_seed_the_engines_own_decides(tiny_folder):
    params = SamplingParams(max_tokens=20)
    first, second, third = (
        LLM(str(tiny_folder), dtype="float32", seed=seed).generate(PROMPTS, params) for seed in (1, 1, 2)
    )
    texts = [[output.outputs[0].token_ids for output in outputs] for outputs in (first, second, third)]
    assert texts[0] == texts[1] != texts[2]
    assert first[0].outputs[0].token_ids != first[1].outputs[0].token_ids


def test_several_continuations_differ_and_are_reproducible(llm):
    params = SamplingParams(n=3, seed=2, max_tokens=20, ignore_eos=True)
    output = llm.generate("n", params)[0]
    texts = [completion.token_ids for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in texts}) == 3
    crowd = llm.generate([*PROMPTS, "n"], [SamplingParams(max_tokens=9)] * len(PROMPTS) + [params])
    assert [completion.token_ids for completion in crowd[-1].outputs] == texts
    alone = llm.generate("n", SamplingParams(seed=2, max_tokens=20, ignore_eos=True))[0]
    assert alone.outputs[0].token_ids == texts[0]


def test_several_greedy_continuations_are_one(llm):
    outputs = llm.generate("n", SamplingParams(n=3, temperature=0.0, max_tokens=10))[0].outputs
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids


def test_stop_strings_work_across_tokens(llm):
    """Every token is one letter, so that a string of three crosses two borders."""
    text = readable(llm).text
    assert len(text) == 30
    for start in (1, 5, 12):
        stop = text[start : start + 3]
        end = text.index(stop)
        cut = readable(llm, stop=["zzz", stop])
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:end], "stop", stop)
        assert len(cut.token_ids) == end + 3
        kept = readable(llm, stop=stop, include_stop_str_in_output=True)
        assert kept.text == text[: end + 3]


def test_a_stop_string_that_only_begins_is_text(llm):
    text = readable(llm).text
    whole = readable(llm, stop=text[-2:] + "!")
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "length", None)


def test_a_stop_string_in_the_last_token_is_a_stop(llm):
    text = readable(llm).text
    stop = next(text[-size:] for size in range(1, 30) if text.index(text[-size:]) == 30 - size)
    last = readable(llm, stop=stop)
    assert (last.text, last.finish_reason, last.stop_reason) == (text[: 30 - len(stop)], "stop", stop)


def test_min_tokens_delay_stop_strings(llm):
    text = readable(llm).text
    late = readable(llm, stop=text[0], min_tokens=10)
    assert len(late.token_ids) >= 10
    assert late.text == text[: len(late.token_ids) - 1]


def test_stop_token_ids_end_the_text_and_are_named(llm):
    tokens = readable(llm).token_ids
    place = tokens.index(tokens[7])
    stopped = readable(llm, stop_token_ids=[tokens[7]])
    assert stopped.token_ids == tokens[: place + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", tokens[7])
    assert stopped.text == llm.get_tokenizer().decode(tokens[:place])
    kept = readable(llm, stop_token_ids=[tokens[7]], include_stop_str_in_output=True)
    assert kept.text == llm.get_tokenizer().decode(tokens[: place + 1])


def test_the_models_end_ends_unless_ignored(llm):
    bias = {END: 100.0}
    ended = complete(llm, ignore_eos=False, logit_bias=bias)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason, ended.text) == ([END], "stop", None, "")
    ignored = complete(llm, ignore_eos=True, logit_bias=bias)
    assert ignored.token_ids == [END] * 30 and ignored.finish_reason == "length"
    assert ignored.text == ""
    shown = complete(llm, ignore_eos=True, logit_bias=bias, skip_special_tokens=False)
    assert shown.text == "</s>" * 30


def test_min_tokens_delay_the_end_token(llm):
    late = complete(llm, ignore_eos=False, min_tokens=6, logit_bias={END: 100.0})
    assert len(late.token_ids) == 7
    assert END not in late.token_ids[:6] and late.token_ids[6] == END


def test_only_allowed_tokens_come(llm):
    allowed = byte_ids("xyz")
    assert set(complete(llm, temperature=2.0, seed=1, allowed_token_ids=allowed).token_ids) == set(allowed)


def test_a_bias_can_force_and_forbid(llm):
    assert complete(llm, logit_bias={77: 100.0}).token_ids == [77] * 30
    greedy = complete(llm).token_ids
    assert greedy[0] not in complete(llm, logit_bias={greedy[0]: -100.0}).token_ids


def test_bad_words_never_come(llm):
    letters = byte_ids("ab")
    plain = complete(llm, temperature=1.0, seed=4, allowed_token_ids=letters).text
    assert "ab" in plain and "b" in plain
    without = complete(llm, temperature=1.0, seed=4, allowed_token_ids=letters, bad_words=["ab"]).text
    assert "ab" not in without and set(without) <= {"a", "b"}
    assert complete(llm, temperature=1.0, seed=4, allowed_token_ids=letters, bad_words=["b"]).text == "a" * 30


def test_a_strong_penalty_forbids_repetition(llm):
    assert len(set(complete(llm).token_ids)) < 30
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.5}):
        assert complete(llm, **penalty).token_ids != complete(llm).token_ids


def test_the_narrowest_filters_are_greedy(llm):
    greedy = complete(llm).token_ids
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.001}):
        assert complete(llm, seed=9, **({"temperature": 1.0} | narrow)).token_ids == greedy


def test_top_k_keeps_to_the_likeliest(llm):
    completion = complete(llm, temperature=2.0, seed=3, top_k=4, logprobs=4)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank <= 4 and len(entry) == 4


def test_logprobs_of_a_random_choice_name_the_choice(llm):
    completion = complete(llm, temperature=2.0, seed=3, logprobs=0)
    assert all(list(entry) == [token] for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert any(entry[token].rank > 1 for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))


def test_by_default_max_tokens_fill_the_context(tiny_folder):
    llm = LLM(str(tiny_folder), dtype="float32", max_model_len=64)
    completion = complete(llm, max_tokens=None)
    assert len(completion.token_ids) == llm.built.resolved.max_model_len - len(byte_ids("one"))
    assert completion.finish_reason == "length"


def test_every_parameter_at_once_beside_plain_neighbours(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    busy = SamplingParams(
        n=2, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.5, max_tokens=20, min_tokens=3, stop=["qqq"], stop_token_ids=[FIRST_BYTE], seed=1,
        logprobs=3, prompt_logprobs=2, logit_bias={50: 2.0}, bad_words=["no"],
        allowed_token_ids=list(range(FIRST_BYTE, VOCAB)),
    )  # fmt: skip
    alone = llm.generate("plain", plain)[0].outputs[0].token_ids
    busy_alone = [completion.token_ids for completion in llm.generate("busy", busy)[0].outputs]
    outputs = llm.generate(["busy", "plain", "busy", "plain"], [busy, plain, busy, plain])
    assert outputs[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids == alone
    for output in (outputs[0], outputs[2]):
        assert [completion.token_ids for completion in output.outputs] == busy_alone


def test_bad_words_that_exclude_all_allowed_tokens_end_a_continuation(llm):
    said = complete(llm, allowed_token_ids=byte_ids("a"), bad_words=["aaa"])
    assert (said.finish_reason, said.token_ids) == ("nothing_left", byte_ids("a") * 2)
    assert said.error == "No token could be sampled: allowed_token_ids and bad_words left none. Relax one of them."
    beams = complete(llm, allowed_token_ids=byte_ids("a"), bad_words=["aaa"], use_beam_search=True, beam_width=2)
    assert beams.finish_reason == "nothing_left"
