"""An example body for every endpoint that reads one. They are in the OpenAPI document and on the page /docs."""

from collections.abc import Mapping

_QUESTION = [{"role": "user", "content": "Name three rivers."}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_PROMPT: dict[str, object] = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}}

# By path, then by what the example shows.
EXAMPLES: Mapping[str, Mapping[str, dict[str, object]]] = {
    "/v1/batches": {
        "an uploaded file": {"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    },
    "/v1/chat/completions": {
        "a question": {"messages": _QUESTION, "temperature": 0.7, "max_tokens": 64},
        "streamed": {"messages": _QUESTION, "max_tokens": 32, "stream": True},
        "JSON schema": {
            "messages": [{"role": "user", "content": "Invent a person."}],
            "max_tokens": 64,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}},
        },
        "tools": {
            "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
            "max_tokens": 64,
            "tools": [_WEATHER],
        },
        "choice": {
            "messages": [{"role": "user", "content": "Is water wet?"}],
            "structured_outputs": {"choice": ["yes", "no"]},
        },
    },
    "/v1/completions": {
        "a prompt": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
        "log probabilities": {"prompt": "The capital of France is", "max_tokens": 4, "logprobs": 3},
        "several prompts": {"prompt": ["One, two,", "Red, green,"], "max_tokens": 4},
        "regular expression": {
            "prompt": "The year is",
            "max_tokens": 8,
            "structured_outputs": {"regex": " (19|20)[0-9]{2}"},
        },
    },
    "/v1/responses": {"a question": {"input": "Name three rivers.", "max_output_tokens": 64}},
    "/v1/responses/input_tokens": {"a question": {"input": "Name three rivers."}},
    "/v1/embeddings": {"two texts": {"input": ["A river.", "A mountain."]}},
    "/v1/messages": {"a question": {"max_tokens": 64, "messages": _QUESTION}},
    "/v1/messages/count_tokens": {"a question": {"messages": _QUESTION}},
    "/": {"a prompt": _PROMPT},
    "/generate": {"a prompt": _PROMPT},
    "/generate_stream": {"a prompt": _PROMPT},
    "/api/chat": {
        "a question": {"messages": _QUESTION, "stream": False, "options": {"num_predict": 64}},
        "JSON schema": {
            "messages": [{"role": "user", "content": "Invent a person."}],
            "stream": False,
            "format": _PERSON,
            "options": {"num_predict": 64},
        },
    },
    "/api/generate": {"a prompt": {"prompt": "Name three rivers.", "options": {"num_predict": 32}}},
    "/api/embed": {"two texts": {"input": ["A river.", "A mountain."]}},
    "/api/embeddings": {"a text": {"prompt": "A river."}},
    "/api/show": {"the served model": {}},
    "/api/pull": {"the default model": {"model": "smollm2-135m-instruct"}},
    "/completion": {"a prompt": {"prompt": "The capital of France is", "n_predict": 16}},
    "/infill": {"a gap": {"input_prefix": "def add(a, b):\n", "input_suffix": "\n\nadd(1, 2)", "n_predict": 16}},
    "/tokenize": {"a text": {"prompt": "Hello world"}},
    "/detokenize": {"two tokens": {"tokens": [19556, 905]}},
    "/apply-template": {"a question": {"messages": _QUESTION}},
    "/abort_requests": {"one request": {"request_ids": ["id-of-x-quire-request-id"]}},
}
