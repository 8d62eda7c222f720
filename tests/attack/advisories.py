"""Requests of published advisories against other engines, by class (S1 to S26), and the statuses that close each.

200 is expected where the hostile part has no meaning here: it is ignored, and nothing of it may be executed, fetched or
kept. `ANSWERED` is for work that is bounded rather than refused. Other checks are in `test_advisories.py`.
"""

import base64
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

KEY = "sk-hostile"
REFUSED = frozenset({400})
NOT_SERVED = frozenset({404, 405})
IGNORED = frozenset({200})
ANSWERED = frozenset({200, 400})
NO_KEY = frozenset({401})
USER = [{"role": "user", "content": "hi"}]
VOCABULARY = 49_152  # of the default model


class Case(NamedTuple):
    """One request and what may come back."""

    advisory: str
    what: str
    sent: bytes
    statuses: frozenset[int]


class Bomb:
    """Unpickled, it writes the canary."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self._canary, "w"))


def http(
    path: str,
    body: object = None,
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    key: str | None = KEY,
) -> bytes:
    """The bytes of a request. A body that is not bytes is written as JSON."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"Host": "here", "Connection": "close", "Content-Type": "application/json"}
    given |= {"Authorization": f"Bearer {key}"} if key else {}
    given |= {"Content-Length": str(len(content)), **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode("utf-8") + content


def completion(**fields: object) -> bytes:
    return http("/v1/completions", {"prompt": "hi", "max_tokens": 4, **fields})


def raw_completion(fields: str) -> bytes:
    """With fields that `json` would not write."""
    return http("/v1/completions", f'{{"prompt": "hi", "max_tokens": 4, {fields}}}'.encode())


def chat(**fields: object) -> bytes:
    return http("/v1/chat/completions", {"messages": USER, "max_tokens": 4, **fields})


def parts(*content: object) -> bytes:
    return chat(messages=[{"role": "user", "content": list(content)}])


def schema(value: object) -> bytes:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": value, "strict": True}})


def tool(parameters: object) -> bytes:
    function = {"name": "f", "parameters": parameters, "strict": True}
    return chat(tools=[{"type": "function", "function": function}], tool_choice="required")


def group(advisory: str, statuses: frozenset[int], **cases: bytes) -> list[Case]:
    return [Case(advisory, what.replace("_", " "), sent, statuses) for what, sent in cases.items()]


def code_execution(canary: str) -> list[Case]:
    """S1, S4, S6, S7: serialized objects, code from a request, and paths."""
    bomb = pickle.dumps(Bomb(canary))
    text = base64.b64encode(bomb).decode()
    reduced = {"py/reduce": [{"py/type": "os.system"}, {"py/tuple": [f"touch {canary}"]}]}
    code = f"__import__('os').system('touch {canary}')"
    kinds = [
        "application/octet-stream",
        "application/x-pickle",
        "application/x-python-serialize",
        "application/msgpack",
    ]
    routes = ["/update_weights", "/update_weights_from_tensor", "/update_weights_from_distributed", "/collective_rpc",
              "/load_lora_adapter", "/v1/load_lora_adapter", "/init_weights_update_group", "/send_to_prefill",
    ]  # fmt: skip
    traversals = ["/v1/models/../../etc/passwd", "/v1/models/..%2f..%2f..%2fetc%2fpasswd", "/docs/../../etc/passwd",
                  "/v1/models/%00/etc/passwd", "/static/../../../etc/passwd", "//etc/passwd",
                  "/docs%2f..%2fopenapi.json", "/v1/models/....//....//etc/passwd", "/v1/models/file:///etc/passwd",
    ]  # fmt: skip
    names = ["../../etc/passwd", "/etc/passwd", "..\\..\\windows", "a/../../b", "hi\x00there", "x" * 100_000]
    return [
        *group(
            "S1", REFUSED,
            pickle_as_JSON=http("/v1/completions", bomb),
            custom_logit_processor=completion(custom_logit_processor=json.dumps({"callable": text})),
            logits_processors=completion(logits_processors=[{"qualname": "os.system", "args": [f"touch {canary}"]}]),
        ),
        *(Case("S1", f"pickle as {kind}", http("/v1/completions", bomb, headers={"Content-Type": kind}),
               frozenset({415})) for kind in kinds),
        *(Case("S1", f"pickle to {path}", http(path, {"serialized_named_tensors": [text]}), NOT_SERVED)
          for path in routes),
        *group(
            "S1", IGNORED,
            objects_to_be_reduced=completion(metadata=reduced, user=json.dumps(reduced)),
            a_pickle_as_a_prompt=completion(prompt=text, cache_salt=text[:200]),
        ),
        *group(
            "S4", IGNORED,
            trust_in_a_request=completion(trust_remote_code=True, code_revision="main", revision="evil"),
            processor_arguments=chat(mm_processor_kwargs={"code_revision": "evil", "trust_remote_code": True}),
        ),
        Case("S6", "code as the arguments of a call", chat(messages=[
            *USER, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": code}}]}]), ANSWERED),
        Case("S6", "code as the name of a tool", chat(tools=[
            {"type": "function", "function": {"name": code, "parameters": {"type": "object"}}}]), ANSWERED),
        *(Case("S7", f"GET {path}", http(path, method="GET"), NOT_SERVED) for path in traversals),
        *(Case("S7", f"model {name[:20]!r}", completion(model=name), frozenset({400, 404})) for name in names),
        *group(
            "S7", frozenset({400, 404}),
            upload=http("/v1/files", b"--x\r\nContent-Disposition: form-data; name=file; filename=../../a\r\n\r\n--x--",
                        headers={"Content-Type": "multipart/form-data; boundary=x"}),
            lora_path=completion(lora_path="../../etc"),
        ),
    ]  # fmt: skip


def templates() -> list[Case]:
    """S5, S9: templates of a request, and variables that would replace the server's."""
    bomb = "{% for a in range(99999999) %}{% for b in range(99999999) %}x{% endfor %}{% endfor %}"
    escape = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    bodies = [
        ("/v1/chat/completions", {"messages": USER}), ("/tokenize", {"messages": USER}),
        ("/apply-template", {"messages": USER}),
    ]  # fmt: skip
    kept = [{"messages": []}, {"tokenize": True}, {"chat_template": bomb}, {"conversation": [], "return_dict": True},
            {"add_generation_prompt": "x" * 10}, {"__class__": 1}, {"range": 1, "self": 2}, {"x": "y" * 2_000_000},
    ]  # fmt: skip
    return [
        *(Case(advisory, f"{path} with {name}", http(path, {**body, "chat_template": template}), REFUSED)
          for path, body in bodies
          for advisory, name, template in (("S5", "an escape", escape), ("S9", "a bomb", bomb))),
        *(Case("S9", f"template variable {next(iter(extra))}", chat(chat_template_kwargs=extra), ANSWERED)
          for extra in kept),
        *group("S5", IGNORED, an_escape_as_content=chat(messages=[{"role": "user", "content": escape}])),
    ]  # fmt: skip


def grammars() -> list[Case]:
    """S10: invalid and exploding constraints."""
    deep: object = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 4} for level in range(14)}
    exploding = {"$ref": "#/$defs/d0", "$defs": {**wide, "d14": {"type": "string", "pattern": "a.*b"}}}
    options = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    for _ in range(3):
        options = {"anyOf": [options] * 6}
    unclosed = {"type": "string", "pattern": "(unclosed"}

    def regex(pattern: str) -> bytes:
        return completion(structured_outputs={"regex": pattern})

    def lark(text: str) -> bytes:
        return completion(structured_outputs={"grammar": text})

    return [
        *group(
            "S10", REFUSED,
            unclosed_pattern=schema(unclosed), unknown_type=schema({"type": "strung"}),
            type_is_a_number=schema({"type": 7}), reference_to_nothing=schema({"$ref": "#/$defs/none"}),
            reference_to_a_URL=schema({"$ref": "http://169.254.169.254/schema"}),
            reference_to_a_file=schema({"$ref": "file:///etc/passwd"}), deep_schema=schema(deep),
            exploding_references=schema(exploding), schema_of_64_KiB_more=schema(
                {"type": "string", "description": "x" * 9, "enum": ["y" * 60 + str(n) for n in range(20_000)]}),
            tool_with_an_unclosed_pattern=tool({"type": "object", "properties": {"a": unclosed}}),
            tool_with_an_unknown_type=tool({"type": "object", "properties": {"a": {"type": "strung"}}}),
            tool_that_explodes=tool({"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}},
                                     "$defs": exploding["$defs"]}),
            unclosed_regex=regex("(a"), regex_of_30000_brackets=regex("(" * 30_000 + "a" + ")" * 30_000),
            regex_with_a_look_ahead=regex("(?=a)b"), empty_Lark=lark(""), Lark_of_nothing=lark("start: start"),
            Lark_with_an_unknown_rule=lark("start: nothing"), Lark_that_includes=lark("%import os\nstart: os.x"),
            deep_Lark=lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
            two_constraints=completion(structured_outputs={"regex": "a", "choice": ["a"]}),
            choice_of_nothing=completion(structured_outputs={"choice": []}),
            disk_cache=completion(guided_json={"type": "object"}),
        ),
        *group(
            "S10", ANSWERED,
            nested_repetition=regex("(a+)+b"), alternatives_that_overlap=regex("(a|aa|a?)+$"),
            large_repetition=regex("(.{1,3000}){1,3000}"), many_options=schema(options),
            endless_recursion=schema({"$ref": "#"}), schema_is_a_text=schema("{}"), a_string_of_a_gigabyte=schema(
                {"type": "string", "minLength": 10**9}),
            cycle=schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            an_array_of_a_million=schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
            ambiguous_Lark=lark('start: a a a\na: a a | "x" | ""'),
        ),
    ]  # fmt: skip


def bodies() -> list[Case]:
    """S11, S15: headers, bodies, media and tensors."""
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    plain = completion()
    head, _, body = plain.partition(b"\r\n\r\n")
    chunked = head.replace(b"Content-Length: %d\r\n" % len(body), b"").replace(
        b"Content-Type", b"Transfer-Encoding: chunked\r\nContent-Type"
    )
    embeds = base64.b64encode(b"PK\x03\x04" + bytes(100)).decode()
    return [
        Case("S11", "a header of 64 KiB", http("/v1/completions", {}, headers={"X-A": "a" * 65_536}), frozenset({431})),
        Case("S11", "a path of 64 KiB", http("/" + "a" * 65_536, {}), frozenset({414, 431})),
        Case("S11", "1,000 headers", http("/v1/completions", {}, headers={f"X-{n}": "a" for n in range(1000)}),
             frozenset({431})),
        Case("S11", "a length of 10^18", http("/v1/completions", headers={"Content-Length": str(10**18)}),
             frozenset({413})),
        Case("S11", "a length of 10^30", http("/v1/completions", headers={"Content-Length": str(10**30)}),
             frozenset({400, 413})),
        Case("S11", "a body of 17 MiB", http("/v1/completions", b" " * (17 << 20)), frozenset({0, 413})),
        Case("S11", "a chunk of 2^60 bytes", chunked + b"\r\n\r\n1000000000000000\r\n" + b" " * 65_536,
             frozenset({0, 400, 413})),
        Case("S11", "length and chunks", chunked.replace(b"Content-Type", b"Content-Length: 5\r\nContent-Type")
             + b"\r\n\r\n0\r\n\r\n", REFUSED),
        Case("S11", "two lengths", plain.replace(b"Content-Type", b"Content-Length: 5\r\nContent-Type"), REFUSED),
        Case("S11", "gzip", http("/v1/completions", b"\x1f\x8b" + bytes(50), headers={"Content-Encoding": "gzip"}),
             frozenset({415})),
        *group(
            "S11", REFUSED,
            depth_10000=http("/v1/completions", b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
            depth_of_an_ignored_field=http("/v1/completions", b'{"prompt": "a", "x": ' + b'{"a":' * 9_999 + b"1"
                                           + b"}" * 10_000),
            a_number_of_5000_digits=raw_completion('"seed": ' + "9" * 5000),
            not_UTF_8=http("/v1/completions", b'{"prompt": "\xff\xfe"}'),
            half_a_surrogate=http("/v1/completions", b'{"prompt": "\\ud800"}'),
            UTF_16=http("/v1/completions", json.dumps({"prompt": "hi"}).encode("utf-16")),
            image=parts(pixel), image_of_ambiguous_size=parts({**pixel, "width": 10**9, "height": -1}),
            sound=parts(sound), video=parts({"type": "video_url", "video_url": {"url": "x"}, "fps": 10**9}),
            ten_thousand_images=parts(*[pixel] * 10_000),
            file_part=parts({"type": "file", "file": {"file_id": "../../a"}}),
        ),
        *group(
            "S15", REFUSED,
            prompt_embeds=completion(prompt_embeds=embeds),
            prompt_embeds_list=completion(prompt=[], prompt_embeds=[embeds] * 4),
            image_embeds=parts({"type": "image_embeds", "image_embeds": embeds}),
            input_tensor=parts({"type": "tensor", "data": embeds, "shape": [1, -1]}),
        ),
        *group("S15", IGNORED, hashes_of_media=chat(mm_hashes={"image": ["a"]}, image_embeds=embeds)),
    ]  # fmt: skip


def amplification() -> list[Case]:
    """S12: counts at and beyond their limits, in every API that has them."""
    numbers = [10**9, 2**31, 2**63, 10**30, -1, 0, True, "4", 1.5, [], {}]
    fields = [("n", numbers), ("best_of", [10**9, -1]), ("max_tokens", [2**31, 2**63, 10**30, -2, "9"]),
              ("min_tokens", [10**9, -1]), ("logprobs", [10**9, -1]), ("prompt_logprobs", [10**9, -5]),
              ("beam_width", [10**9]), ("top_k", [10**30, "a"]), ("truncate_prompt_tokens", [2**63]),
              ("stop", [["a"] * 1000, "a" * 100_000, [""] * 9]), ("stop_token_ids", [list(range(49_000))]),
              ("logit_bias", [{str(n): 1 for n in range(49_000)}]), ("bad_words", [["word"] * 10_000]),
              ("prompt", [["hi"] * 10_000, [[1]] * 10_000, [], "a" * 2_000_000, list(range(9)) * 10_000]),
              ("priority", [10**9, -(10**9)]), ("timeout_s", [-1, 1e300])]  # fmt: skip
    return [
        *(Case("S12", f"{name} = {str(value)[:20]}", completion(**{name: value}), REFUSED)
          for name, values in fields for value in values),
        *group(
            "S12", REFUSED,
            chat_n=chat(n=10**9), chat_top_logprobs=chat(logprobs=True, top_logprobs=10**6),
            chat_max_completion_tokens=chat(max_completion_tokens=-2),
            cost_of_n_and_max_tokens=completion(n=128, max_tokens=8_000, prompt=[1] * 190),
            beams_beyond_n=completion(use_beam_search=True, n=128, beam_width=2),
            detokenize_of_a_negative=http("/detokenize", {"tokens": [-1]}),
            detokenize_of_2_63=http("/detokenize", {"tokens": [2**63]}),
            embeddings_dimensions=http("/v1/embeddings", {"input": "hi", "dimensions": 10**9}),
            many_embeddings=http("/v1/embeddings", {"input": ["hi"] * 100_000}),
            responses_of_2_63=http("/v1/responses", {"input": "hi", "max_output_tokens": 2**63}),
            responses_top_logprobs=http("/v1/responses", {"input": "hi", "top_logprobs": 10**6}),
            message_max_tokens=http("/v1/messages", {"messages": USER, "max_tokens": -1}),
        ),
        Case("S12", "TGI's best_of", http("/generate", {"inputs": "hi", "parameters": {"best_of": 10**9}}),
             frozenset({400, 422})),
        Case("S12", "TGI's max_new_tokens", http("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": -1}}),
             frozenset({400, 422})),
    ]  # fmt: skip


def floats_and_ids() -> list[Case]:
    """S13, S14: numbers that comparisons let through, and ids beyond the logits."""
    odd = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"]
    names = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "length_penalty", "timeout_s"]  # fmt: skip
    ids = [-1, VOCABULARY, 2**31, 2**32, 2**63]
    return [
        *(Case("S13", f"{name} = {value}", raw_completion(f'"{name}": {value}'), REFUSED)
          for name in names for value in odd),
        *(Case("S13", f"a bias of {value}", raw_completion(f'"logit_bias": {{"5": {value}}}'), REFUSED)
          for value in odd),
        *(Case("S14", f"{name} with {token}", completion(**{name: [token]}), REFUSED)
          for name in ("prompt", "allowed_token_ids", "stop_token_ids") for token in ids),
        *(Case("S14", f"logit_bias of {token}", completion(logit_bias={str(token): 1}), REFUSED) for token in ids),
        *group("S14", REFUSED, no_allowed_token=completion(allowed_token_ids=[]),
               an_id_within_a_text_prompt=completion(prompt=["hi", 10**6]),
               embeddings_of_an_id=http("/v1/embeddings", {"input": [VOCABULARY]})),
        *group("S14", ANSWERED, a_bad_word_of_no_token=completion(bad_words=["\x04"]),
               every_token_forbidden=completion(logit_bias={str(n): -100 for n in range(300)})),
    ]  # fmt: skip


def labels() -> list[Case]:
    """S16, S17, S24: whatever a client names, it is no key, path, address, label of a metric, or line of the log."""
    salts = ["../../x", "a:b|c", "\x00", "😀" * 60, "\r\n{}", "' OR 1=1 --", "x" * 256]
    ids = ["http://169.254.169.254/latest", "10.0.0.1:5600", "../../etc/passwd", "x" * 128, "%0d%0aX-Injected: 1"]
    methods = ["MKCALENDAR", "SEARCH", "EVIL", "PROPFIND", "REPORT", "LOCK"]
    log = '\x1b[31m\u202e{"level": "fatal"}\\n'
    return [
        *(Case("S16", f"method {method}", http("/v1/models", method=method), frozenset({400, 405}))
          for method in methods),
        *(Case("S16", f"path {number}", http(f"/random/{number}", method="GET"), NOT_SERVED) for number in range(5)),
        *(Case("S16", f"model random-{number}", completion(model=f"random-{number}"), frozenset({404}))
          for number in range(5)),
        *(Case("S17", f"cache_salt {salt[:12]!r}", completion(cache_salt=salt), ANSWERED) for salt in salts),
        *(Case("S17", f"request id {label[:20]}", http("/v1/completions", {"prompt": "hi", "max_tokens": 1},
               headers={"X-Request-Id": label}), IGNORED) for label in ids),
        *group(
            "S17", ANSWERED,
            cache_salt_of_a_number=completion(cache_salt=7), long_salt=completion(cache_salt="x" * 257),
            connector_parameters=completion(kv_transfer_params={"remote_host": "10.0.0.1", "remote_port": 1}),
            id_in_the_body=completion(request_id="../../a", user="b" * 100_000),
        ),
        Case("S24", "colours in a header", http("/v1/completions", {"prompt": "hi"}, headers={"X-Request-Id": log}),
             frozenset({200, 400})),
        Case("S24", "a model that is a log line", completion(model=f"m\r\n{log}"), frozenset({404})),
        Case("S24", "a path that is a log line", http("/%0d%0a%7b%22level%22:%22x%22%7d", method="GET"), NOT_SERVED),
        Case("S24", "a role that is a log line", chat(messages=[{"role": log, "content": "hi"}]), ANSWERED),
    ]  # fmt: skip


def access() -> list[Case]:
    """S20, S21: routes that other servers leave open, and keys that are none."""
    open_elsewhere = ["/invocations", "/score", "/rerank", "/tokenize", "/detokenize", "/pause", "/abort_requests",
                      "/update_weights", "/collective_rpc", "/sleep", "/flush_cache", "/start_profile",
                      "/v1/completions", "/generate", "/v1/messages", "/reset_prefix_cache", "/v1/responses",
                      "/apply-template",
    ]  # fmt: skip
    read = [
        "/metrics",
        "/load",
        "/server_info",
        "/v1/models",
        "/openapi.json",
        "/tokenizer_info",
        "/info",
    ]
    admin = ["/pause", "/resume", "/abort_requests", "/reset_prefix_cache"]
    keys = ["", "sk-hostil", "sk-hostilee", "SK-HOSTILE", "sk-hostile\x00", "sk-hostile,sk-innocent", "null", "*",
            base64.b64encode(b"sk-hostile").decode()]  # fmt: skip
    hosts = ["x/health", "health", "localhost/health?", "127.0.0.1", "[::1]/ready", "a@health"]
    return [
        *(Case("S20", f"POST {path} without a key", http(path, {}, key=None), NO_KEY) for path in open_elsewhere),
        *(Case("S20", f"GET {path} without a key", http(path, method="GET", key=None), NO_KEY) for path in read),
        *(Case("S20", f"{path} without the admin key", http(path, {}), frozenset({403})) for path in admin),
        *(Case("S21", f"key {key[:14]!r}", http("/v1/models", method="GET", key=key or None), frozenset({400, 401}))
          for key in keys),
        *(Case("S21", f"Host {host}", http("/v1/models", method="GET", key=None, headers={"Host": host}),
               frozenset({400, 401})) for host in hosts),
    ]  # fmt: skip


def addresses(listener: int) -> list[Case]:
    """S22, S23: URLs wherever a text may stand. The listener must never be asked."""
    target = f"127.0.0.1:{listener}"
    urls = [f"http://{target}/a.png", f"https://{target}/", f"http://evil.example\\@{target}/", f"ftp://{target}/",
            f"gopher://{target}/_x", f"http://[::ffff:127.0.0.1]:{listener}/", f"http://0x7f000001:{listener}/",
            f"//{target}/", f"http://{target}#@evil.example/", "file:///etc/passwd", "data:image/png;base64,AAAA",
    ]  # fmt: skip
    fetched: Iterable[tuple[str, object]] = [
        ("image_url", {"type": "image_url", "image_url": {"url": ""}}),
        ("input_image", {"type": "input_image", "image_url": ""}),
        ("video_url", {"type": "video_url", "video_url": {"url": ""}}),
        ("audio_url", {"type": "audio_url", "audio_url": {"url": ""}}),
    ]
    cases = [Case("S22", f"image at {url[:30]}", parts({"type": "image_url", "image_url": {"url": url}}), REFUSED)
             for url in urls]  # fmt: skip
    for kind, part in fetched:
        filled = json.loads(json.dumps(part).replace('""', json.dumps(urls[0])))
        cases.append(Case("S22", f"{kind} in a chat", parts(filled), REFUSED))
    source = {"type": "image", "source": {"type": "url", "url": urls[0]}}
    message = {"messages": [{"role": "user", "content": [source]}], "max_tokens": 4}
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": urls[0]}]}]
    broken = parts({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!!"}})
    return [
        *cases,
        *group("S22", REFUSED, image_in_a_message=http("/v1/messages", message),
               image_in_a_response=http("/v1/responses", {"input": items})),
        *group("S22", IGNORED, image_in_Markdown=completion(prompt=f"![a]({urls[0]})"),
               markdown_for_TGI=http("/generate", {"inputs": f"![]({urls[0]})", "parameters": {"max_new_tokens": 2}}),
               addresses_elsewhere=completion(user=urls[0], metadata={"callback_url": urls[0]}, cache_salt=urls[0])),
        *group("S23", REFUSED, broken_image=broken, object_instead_of_a_prompt=completion(prompt={"a": 1}),
               wrong_types=completion(temperature="hot", n={}), an_array=http("/v1/completions", []),
               no_body=http("/v1/completions"), half_a_body=http("/v1/completions", b'{"prompt": "a'),
               broken_image_in_a_message=http("/v1/messages", {**message, "max_tokens": "many"})),
    ]  # fmt: skip


def corpus(canary: str, listener: int) -> list[Case]:
    return [*code_execution(canary), *templates(), *grammars(), *bodies(), *amplification(), *floats_and_ids(),
            *labels(), *access(), *addresses(listener)]  # fmt: skip
