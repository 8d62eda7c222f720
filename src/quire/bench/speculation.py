"""Speculative decoding on real text: tokens per second with and without drafts, in turns, by task and requests.

    quote     the prompt has a passage of Python's help texts twice; the second breaks off, and the model continues it
    repeat    a request that was answered before, again
    chat      the beginning of a story, another one each time: nothing to repeat
    json      a person described under a JSON schema, another one each time: its grammar forces the names of the fields

On a GPU also with planted acceptance: whatever is drafted is accepted with a given probability, so that a model with
random weights shows what drafts gain, with the governor and with a fixed number of drafts.

Both engines answer the same prompts one right after the other, so that what slows the machine slows both; a figure is
the median of these ratios. The time is that from the first token of a batch to its last: prompts take as long with
drafts as without. Outputs must be the same, or the measurement fails.
"""

import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from quire.bench.scheduler import Curve, Point, svg
from quire.core.sampling import SamplingParams
from quire.llm import LLM
from quire.runner.model_runner import ModelRunner

_PASSAGE = 1500  # characters
_BEGUN = 80  # of them, repeated in the prompt
_PLACES = ("by the sea", "in the mountains", "on a small island", "at the edge of a forest", "in an old harbour town")
_PERSONS = ("a clockmaker", "a young baker", "two brothers", "a retired captain", "a girl with a telescope")


_RECORD: dict[str, object] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "occupation": {"type": "string", "maxLength": 24},
        "year_of_birth": {"type": "integer", "minimum": 1800, "maximum": 2020},
        "is_member": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Norway", "Sweden", "Denmark"]},
            },
            "required": ["street_and_number", "postal_code", "country"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "occupation", "year_of_birth", "is_member", "address"],
    "additionalProperties": False,
}


class SpeculationFigure(NamedTuple):
    """One task with one number of requests."""

    task: str
    num_requests: int
    num_tokens: int  # of all outputs of one repeat
    plain_s: tuple[float, ...]  # of each repeat
    drafting_s: tuple[float, ...]
    drafted: int
    accepted: int

    @property
    def ratios(self) -> list[float]:
        """How many times as fast with drafts, in each repeat."""
        return [plain / drafting for plain, drafting in zip(self.plain_s, self.drafting_s, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def prompts_of(task: str, num_requests: int, repeat: int) -> list[str]:
    """Different ones for each request, and but for `repeat` for each repeat."""
    first = 0 if task == "repeat" else (1 + repeat) * num_requests
    return [_prompt(task, first + number) for number in range(num_requests)]


def _prompt(task: str, number: int) -> str:
    if task == "quote":
        text = "\n".join(topics[name] for name in sorted(topics))
        start = number * _PASSAGE % (len(text) - _PASSAGE)
        passage = text[start : start + _PASSAGE]
        return f"{passage}\n\nThe same text again:\n\n{passage[:_BEGUN]}"
    place, person = _PLACES[number % len(_PLACES)], _PERSONS[number // len(_PLACES) % len(_PERSONS)]
    if task == "json":
        return f"Person {number} is {person} who lives {place}. All that is known, as a JSON object:\n"
    return f"Story {number}. Once upon a time there lived {person} {place}. One morning"


def measure_speculation(
    plain: LLM,
    drafting: LLM,
    *,
    tasks: Many[str],
    sizes: Many[int],
    repeats: int,
    num_output: int,
    temperature: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[SpeculationFigure]:
    """Figures of every task and number of requests. The first repeat of each warms up and is not counted."""
    usual = SamplingParams(temperature=temperature, seed=0, max_tokens=num_output, ignore_eos=True)
    for task in tasks:
        params = replace(usual, json=_RECORD) if task == "json" else usual
        for size in sizes:
            say(f"{task}, {size}")
            pairs: list[tuple[_Turn, _Turn]] = []  # without drafts, and with them
            for repeat in range(1 + repeats):
                prompts = prompts_of(task, size, repeat)
                if repeat % 2:
                    pair = _generate(plain, prompts, params), _generate(drafting, prompts, params)
                else:
                    pair = _generate(drafting, prompts, params), _generate(plain, prompts, params)
                    pair = pair[::-1]
                assert pair[0].tokens == pair[1].tokens, f"{task}: drafts changed an output"
                pairs.append(pair)
            counted = pairs[1:]
            yield SpeculationFigure(
                task,
                size,
                sum(map(len, counted[-1][0].tokens)),
                tuple([turn.seconds for turn, _ in counted]),
                tuple([turn.seconds for _, turn in counted]),
                sum(turn.drafted for _, turn in counted),
                sum(turn.accepted for _, turn in counted),
            )


# What further parameters a request with planted drafts has.
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": {7: -4.0, 11: 2.0}},
    "logprobs": {"logprobs": 5},
}


class PlantedFigure(NamedTuple):
    """Planted drafts with one number of requests. Seconds: of a request, from its first token to its last, the mean of
    all requests, of each repeat."""

    chance: float
    num_requests: int
    num_tokens: int  # of one request
    plain_s: tuple[float, ...]
    governed_s: tuple[float, ...]
    fixed_s: tuple[float, ...]  # always as many drafts as allowed

    @property
    def governed(self) -> float:
        """How many times as fast with the governor: the median of the repeats."""
        return _median_ratio(self.plain_s, self.governed_s)

    @property
    def fixed(self) -> float:
        return _median_ratio(self.plain_s, self.fixed_s)


def planted_plot(title: str, figures: Many[PlantedFigure]) -> str:
    """The gain by number of requests and acceptance, as SVG."""
    curves = []
    for chance in dict.fromkeys(each.chance for each in figures):
        these = sorted((each for each in figures if each.chance == chance), key=lambda each: each.num_requests)
        governed = tuple(Point(each.num_requests, each.governed) for each in these)
        fixed = tuple(Point(each.num_requests, each.fixed) for each in these)
        curves += [Curve(f"{chance:.0%}, governor", governed), Curve(f"{chance:.0%}, always", fixed, dashed=True)]
    return svg(f"{title}: times as fast as without drafts, by drafts accepted", "requests", "×", curves)


def _median_ratio(plain_s: Many[float], drafting_s: Many[float]) -> float:
    return statistics.median(plain / drafting for plain, drafting in zip(plain_s, drafting_s, strict=True))


def measure_planted(
    llm: LLM,  # built with planted drafts
    runner: ModelRunner,
    *,
    chances: Many[float],
    sizes: Many[int],
    repeats: int,
    num_input: int,
    num_output: int,
    num_drafts: int,
    sampling: str = "greedy",
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[PlantedFigure]:
    """Figures of every acceptance and number of requests: without drafts, with the governor, and always with as many
    as allowed, in turns. The first turn of each warms up: the others find their prompts in the prefix cache. The text
    says nothing of planted acceptance, so the governor learns from drafts alone."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, **_SAMPLINGS[sampling])
    scheduler = llm.built.engine.scheduler
    usual = replace(scheduler.policy.speculation, hindsight=False)
    policies = [
        replace(usual, max_drafts=0),
        *(replace(usual, max_drafts=num_drafts, governed=g) for g in (True, False)),
    ]
    vocab_size = llm.built.checkpoint.spec.vocab_size
    for chance in chances:
        runner.plant_acceptance(chance)
        for size in sizes:
            say(f"{chance:.0%} accepted, {size}")
            prompts = [_tokens(number, num_input, vocab_size) for number in range(size)]
            turns: list[list[float]] = []
            for repeat in range(1 + repeats):
                seconds = []
                for policy in policies if repeat else policies[1:2]:
                    scheduler.replace_speculation(policy, forget=not repeat)
                    seconds.append(_decode_s(llm, prompts, params))
                turns.append(seconds)
            plain_s, governed_s, fixed_s = zip(*turns[1:], strict=True)
            yield PlantedFigure(chance, size, num_output, plain_s, governed_s, fixed_s)


def _tokens(number: int, count: int, vocab_size: int) -> list[int]:
    return [(7919 * number * number + 104_729 * place + place * place) % vocab_size for place in range(count)]


def _decode_s(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    outputs = llm.generate(prompts, params, progress=False)
    return statistics.mean(
        (output.metrics.finished_s or 0.0) - (output.metrics.first_token_s or 0.0) for output in outputs
    )


class _Turn(NamedTuple):
    seconds: float
    tokens: list[list[int]]
    drafted: int
    accepted: int


def _generate(llm: LLM, prompts: list[str], params: SamplingParams) -> _Turn:
    outputs = llm.generate(prompts, params, progress=False)
    first_s = [output.metrics.first_token_s or 0.0 for output in outputs]
    last_s = [output.metrics.finished_s or 0.0 for output in outputs]
    return _Turn(
        max(last_s) - min(first_s),
        [list(output.outputs[0].token_ids) for output in outputs],
        sum(output.metrics.num_drafted_tokens for output in outputs),
        sum(output.metrics.num_accepted_tokens for output in outputs),
    )
