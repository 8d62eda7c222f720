"""Requests that no advisory names: long texts, lists and chunks within their limits, odd framing, upgrades, grammars
of every API, forms and ids.

What is bounded rather than refused may be answered. The control request after each shows that nobody else pays.
"""

from collections.abc import Callable

from tests.attack.advisories import ANSWERED, IGNORED, REFUSED, USER, Case, chat, completion, http, parts

BROKEN_HTTP = frozenset({400})
DEEP = 100_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def group(statuses: frozenset[int], **cases: bytes) -> list[Case]:
    return [Case("N", what.replace("_", " "), sent, statuses) for what, sent in cases.items()]


def called(arguments: str) -> bytes:
    """A conversation with a tool call."""
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "x"}
    return chat(messages=[*USER, call, answer, *USER], tools=[TOOL])


def texts() -> list[Case]:
    """Up to the longest text that might fit: 128 characters for each token of the context."""
    words = {"marks": "\u0301", "letters": "a", "spaces": " ", "lines": "\n", "emoji": "👩‍👩‍👧", "apostrophes": "'s"}
    return [
        case
        for name, word in words.items()
        for text in [word * (1_000_000 // len(word))]
        for case in (
            Case("N", f"a prompt of {name}", completion(prompt=text), ANSWERED),
            Case("N", f"a message of {name}", chat(messages=[{"role": "user", "content": text}]), ANSWERED),
            Case("N", f"tokenize {name}", http("/tokenize", {"prompt": text}), ANSWERED),
        )
    ]


def lists() -> list[Case]:
    """Many of everything that has a list, and what is nested in texts instead of JSON."""
    turns = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "x"}] * 5_000
    named = [{**TOOL, "function": {**TOOL["function"], "name": f"f{n}"}} for n in range(2_000)]  # type: ignore[dict-item]
    doubled = b'{"prompt":"hi",' + b'"max_tokens":2,' * 300_000 + b'"max_tokens":2}'
    return [
        *group(
            REFUSED, stop_strings=completion(stop=[f"s{n}" for n in range(100_000)]),
            long_stop_strings=completion(stop=["a" * 10**6] * 4),
            biases=completion(logit_bias={str(n): 1 for n in range(100_000)}),
            deep_arguments=called("[" * DEEP + "]" * DEEP), deep_objects=called('{"a":' * DEEP + "1" + "}" * DEEP),
            messages=chat(messages=USER * 100_000), parts=parts(*[{"type": "text", "text": "a"}] * 200_000),
            tools=chat(tools=named), nested_prompt=completion(prompt=[[[1]]]), empty_prompt=completion(prompt=[[]]),
            a_million_ids=completion(prompt=[1] * 1_000_000), booleans=completion(prompt=[True]),
            item_references=http("/v1/responses", {"input": [{"type": "item_reference", "id": "a"}] * 100_000}),
            a_data_URL_of_15_MB=parts({"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 15_000_000}}),
            template_variables_of_the_server=chat(chat_template_kwargs={"messages": [], "raise_exception": 1}),
            deep_template_variable=http("/v1/chat/completions", b'{"messages":[{"role":"user","content":"hi"}],'
                                        b'"chat_template_kwargs":{"a":' + b"[" * DEEP + b"]" * DEEP + b"}}"),
        ),
        *group(
            ANSWERED, doubled_keys=http("/v1/completions", doubled),
            turns_to_be_dropped=http("/v1/responses", {"input": turns, "truncation": "auto", "max_output_tokens": 4}),
            template_variables=chat(chat_template_kwargs={f"k{n}": n for n in range(50_000)}),
            a_million_digits=http("/v1/completions", b'{"prompt":"hi","max_tokens":2,"x":' + b"9" * 10**6 + b"}"),
            scored_prompt=completion(prompt=[5] * 4_000, prompt_logprobs=20, max_tokens=1),
        ),
    ]  # fmt: skip


def framing() -> list[Case]:
    """What two servers might read in two ways."""
    whole = completion(max_tokens=1)
    head, _, body = whole.partition(b"\r\n\r\n")
    length = b"Content-Length: %d" % len(body)

    def framed(header: bytes, sent: bytes = body) -> bytes:
        return head.replace(length, header) + b"\r\n\r\n" + sent

    chunked = b"Transfer-Encoding: chunked"
    last = b"0\r\n\r\n"
    return [
        *group(
            BROKEN_HTTP, plus=framed(b"Content-Length: +%d" % len(body)), hex=framed(b"Content-Length: 0x10"),
            twice=framed(length + b", %d" % len(body)), space_before_colon=framed(b"Transfer-Encoding : chunked", last),
            folded=framed(b"Transfer-Encoding:\r\n chunked", last), xchunked=framed(b"Transfer-Encoding: xchunked"),
            chunked_twice=framed(b"Transfer-Encoding: chunked, identity", last),
            bare_lines=whole.replace(b"\r\n", b"\n"),
            NUL=framed(b"Content-Len\x00gth: 5"), negative_chunk=framed(chunked, b"-5\r\nhello\r\n" + last),
            hex_chunk=framed(chunked, b"0x5\r\nhello\r\n" + last), bare_chunk=framed(chunked, b"5\nhello\n0\n\n"),
            trailers=framed(chunked, b"%x\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(body), body)),
            tiny_chunks=framed(chunked, b"1\r\n \r\n" * 70_000 + last), HTTP_2=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            TLS=bytes.fromhex("16030100c8010000c40303") + bytes(200),
            absolute=b"GET http://evil/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
            star=b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        ),
        *group(
            IGNORED, h2c=http("/v1/completions", {"prompt": "hi", "max_tokens": 1}, headers={"Upgrade": "h2c"}),
            charset=http("/v1/completions", {"prompt": "hi"}, headers={"Content-Type": "application/json; charset=x"}),
            ranges=http("/docs", method="GET", headers={"Range": "bytes=" + ",".join(["0-"] * 3000)}),
            forwarded=http("/v1/models", method="GET", headers={"X-Forwarded-Host": "evil", "X-Forwarded-Proto": "x"}),
        ),
        *group(
            frozenset({405}), a_websocket=http("/v1/completions", method="GET", headers={"Upgrade": "websocket"}),
            preflight=http("/v1/completions", method="OPTIONS", headers={"Origin": "http://evil"}),
        ),
    ]  # fmt: skip


def nested(depth: int, wrap: Callable[[object], object], inner: object) -> object:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


PAIR = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
SCHEMAS: dict[str, object] = {
    "pattern properties": {"patternProperties": {f"^(a|b){{1,50}}.*{n}$": {"type": "string"} for n in range(200)}},
    "products of arrays": nested(
        5, lambda inner: {"type": "array", "items": inner, "minItems": 50, "maxItems": 5000}, PAIR
    ),
    "60,000 values": {"enum": [f"value number {n}" for n in range(60_000)]},
    "20,000 properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}},
    "nested repetitions": {"type": "string", "pattern": "^((a{1,90}){1,90}){1,90}$"},
    "letters of all scripts": {"type": "string", "pattern": r"^[\p{L}\p{N}\p{Sc}]{1,4000}$"},
    "cases that double": {
        "$defs": {f"d{n}": {"if": {"$ref": f"#/$defs/d{n + 1}"}, "then": {"$ref": f"#/$defs/d{n + 1}"}}
                  for n in range(20)} | {"d20": PAIR},
        "$ref": "#/$defs/d0",
    },
    "dependent schemas": {"dependentSchemas": {f"p{n}": {"required": [f"p{n + 1}"]} for n in range(40)}},
    "a type that is a list of lists": {"type": ["string", ["x"], None, 5]},
}  # fmt: skip
REGEXES = [r"[\p{L}&&[^\p{Lu}]]{1,3000}", r"(\p{Han}|\p{Hiragana}|\p{Arabic}){0,2000}x", "(?i)" + "[a-zß-ÿſK]" * 300,
           "(.{0,300}x){100}", "(a|b)*a(a|b){22}", "(|||||a)*" * 200, "(" * 3000 + "a" + ")" * 3000]  # fmt: skip
LARKS = ["start: s\ns: s s | s s s | \"a\" | ", "start: (a|b|c)*\na: \"x\"*\nb: \"x\"+\nc: \"x\"?",
         "\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)), 'r40: "a"']),
         'start: ("a"{1,1000}){1,1000}', "%ignore /(a|aa)*/\nstart: \"b\"+"]  # fmt: skip


def grammars_of_every_api() -> list[Case]:
    """Constraints where each API has them. What the grammar allows may be generated: 16 tokens at most."""
    bounded = frozenset({200, 400, 422})
    cases = []
    for name, schema in SCHEMAS.items():
        tool = {"name": "f", "input_schema": schema}
        text = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
        parameters = {"max_new_tokens": 16, "grammar": {"type": "json", "value": schema}}
        chatted = {"messages": USER, "stream": False, "format": schema, "options": {"num_predict": 16}}
        called_for = {"messages": USER, "max_tokens": 16, "tools": [tool], "tool_choice": {"type": "any"}}
        sent = {
            "Ollama": http("/api/chat", chatted),
            "Responses": http("/v1/responses", {"input": "hi", "max_output_tokens": 16, "text": text}),
            "Anthropic": http("/v1/messages", called_for),
            "TGI": http("/generate", {"inputs": "hi", "parameters": parameters}),
            "llama.cpp": http("/completion", {"prompt": "hi", "n_predict": 16, "json_schema": schema}),
        }
        cases += [Case("N", f"{name} for {api}", each, bounded) for api, each in sent.items()]
    for place, regex in enumerate(REGEXES):
        cases.append(Case("N", f"regex {place}", completion(structured_outputs={"regex": regex}), bounded))
    for place, lark in enumerate(LARKS):
        cases.append(Case("N", f"Lark {place}", completion(structured_outputs={"grammar": lark}), bounded))
    return cases


def files_and_ids() -> list[Case]:
    """Forms, file names, ids and numbers that no client of good will sends."""

    def form(boundary: str, *, name: str = "a", more: bytes = b"") -> bytes:
        mark = b"--" + boundary.encode()
        purpose = mark + b'\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        file = b'\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n{}\r\n' % name.encode()
        body = purpose + more + mark + file + mark + b"--\r\n"
        return http("/v1/files", body, headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})

    field = b'--x\r\nContent-Disposition: form-data; name="n%d"\r\n\r\n1\r\n'
    window = {"input_file_id": "file-" + "0" * 32, "endpoint": "/v1/completions", "completion_window": "9" * 4000 + "h"}
    digits = "9" * 5000
    paths = ["/v1/files/..%2f..%2fetc%2fpasswd", "/v1/files/%00/content", "/v1/batches/..%2fx", "/v1/responses/%00",
             f"/v1/responses/{digits}", "/v1/responses/resp_x?stream=true&starting_after=" + digits]  # fmt: skip
    return [
        *group(
            REFUSED, a_long_boundary=form("b" * 300),
            many_fields=form("x", more=b"".join(field % n for n in range(5000))),
            two_files=form("x", more=b'--x\r\nContent-Disposition: form-data; name="file"; filename="b"\r\n\r\n1\r\n'),
            headers_of_a_part=form("x", more=b"--x\r\n" + b"X: y\r\n" * 100_000 + b"\r\n1\r\n"),
            a_limit_that_is_no_number=http("/v1/files?limit=%C2%B2", method="GET"),
            another_endpoint=http("/v1/batches", {**window, "endpoint": "/abort_requests"}),
        ),
        *group(IGNORED, a_file_above_the_folder=form("x", name="../../../etc/passwd"), a_NUL=form("x", name="a\0b")),
        *group(frozenset({404}), a_window_of_4000_digits=http("/v1/batches", window)),
        *(Case("N", f"GET {path[:40]}", http(path, method="GET"), frozenset({404})) for path in paths),
        *(Case("N", f"explain {number[:9]}", http(f"/engine/requests/{number}/explain", method="GET"), frozenset({403}))
          for number in (digits, "-1", "%E0%A5%A7", "1_0")),
        Case("N", "a body of HTTP/1.0", completion(max_tokens=1).replace(b"HTTP/1.1", b"HTTP/1.0"), IGNORED),
    ]  # fmt: skip


def more_requests() -> list[Case]:
    return [*texts(), *lists(), *framing(), *grammars_of_every_api(), *files_and_ids()]
