"""Requests that no advisory names: long texts, lists and chunks within their limits, odd framing, upgrades.

What is bounded rather than refused may be answered. The control request after each shows that nobody else pays.
"""

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


def more_requests() -> list[Case]:
    return [*texts(), *lists(), *framing()]
