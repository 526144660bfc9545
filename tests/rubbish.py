"""Random and malformed HTTP requests, as a careless or hostile client would send them.

Owns: what can be wrong with a request: its fields, its JSON, its bytes, its headers, its framing, and the client's own
conduct. Refuses to know: the server, and what it may answer (`raw_http`).
"""

from __future__ import annotations

import json
import random
from typing import Any

from raw_http import JSON_TYPE, Shot

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
PAGES = ("/health", "/v1/models", "/metrics", "/openapi.json")
BODY_LIMIT = 5 << 20


def shot(rng: random.Random) -> Shot:
    """One request out of all kinds, half of them well-formed HTTP around a body that is wrong somewhere."""
    kinds = (_fields, _text, _bytes, _headers, _lines, _framing, _gone, _pipelined, _slow, _heavy)
    return rng.choices(kinds, weights=(40, 12, 8, 10, 8, 8, 6, 4, 1, 1))[0](rng)


def post(path: str, body: bytes, *headers: str, content_type: str = JSON_TYPE, version: str = "1.1") -> bytes:
    """A well-formed request around a body."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1", "replace") + body


def valid(rng: random.Random, path: str) -> dict[str, Any]:
    """A body that is right, with few tokens to generate."""
    prompt = rng.choice(("hello", "é 漢字 🙂", "a b c " * 20, [1, 2, 3], [[5, 6], [7]], ["one", "two"]))
    if path == "/tokenize":
        return {"model": rng.choice(MODELS), "prompt": prompt if isinstance(prompt, str) else "text"}
    if path == "/detokenize":
        return {"model": rng.choice(MODELS), "tokens": [1, 2, 3]}
    common = {"max_tokens": rng.randint(1, 3), "temperature": rng.choice((0, 0.7, 1.0)), "stream": rng.random() < 0.4}
    if path == "/v1/completions":
        return {"model": rng.choice(MODELS), "prompt": prompt, **common}
    # Said twice, so that a slip in one name does not ask for as many tokens as fit.
    common["max_completion_tokens"] = common["max_tokens"]
    return {"model": rng.choice(MODELS), "messages": [{"role": "user", "content": "hello"}], **common}


# A server answers to its own model's name, and to none; these are the names of those that the tests run.
MODELS = (None, None, None, "demo", "paper")

FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "n", "stream", "stream_options", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo", "suffix", "best_of", "user", "priority", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "ignore_eos", "response_format", "guided_json", "guided_regex",
    "guided_grammar", "guided_choice", "structured_outputs", "tools", "tool_choice", "chat_template_kwargs",
    "add_generation_prompt", "add_special_tokens", "tokens", "session_id", "cache_salt", "request_id", "slo_ttft_ms",
    "functions", "store", "metadata", "modalities", "parallel_tool_calls", "reasoning_effort", "service_tier",
)  # fmt: skip


def _odd(rng: random.Random, depth: int = 0) -> Any:
    """A value that few fields expect."""
    plain: tuple[Any, ...] = (
        None, True, False, 0, -0.0, 1, -1, 2, 16, 17, 129, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**63, -(2**63) - 1,
        2**64, 10**40, 0.5, 1.0000001, 2.5, -0.1, 1e-320, 1e308, -1e308, "", " ", "0", "1", "true", "null", "NaN",
        "\u0000", "a\u0000b", "\ufeff", "\u202e", "🙂", "e\u0301", "x" * 300, "<|im_end|>", "{{ 7 * 7 }}", "%s%n",
        [], [None], [[]], [0], [-1], [2**40], ["a", 1, None], [""], ["x"] * 20, {}, {"": ""}, {"type": "x"},
        {"a": None}, {"1": 1e9}, {"-1": 0}, {"x": 5}, {"99999999999": 1},
    )  # fmt: skip
    if depth < 3 and rng.random() < 0.15:
        return [_odd(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    if depth < 3 and rng.random() < 0.15:
        return {rng.choice(FIELDS): _odd(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    return rng.choice(plain)


def _message(rng: random.Random) -> Any:
    content: Any = rng.choice(
        ("hi", "", None, 5, [], [{"type": "text", "text": "hi"}], [{"type": "text"}], [{"type": "image_url"}], {}, [[]])
    )
    role: Any = rng.choice(("user", "assistant", "system", "tool", "developer", "", None, 3, "user\n", {}))
    extra = {"tool_calls": _odd(rng), "name": _odd(rng)} if rng.random() < 0.2 else {}
    return rng.choice(({"role": role, "content": content, **extra}, {"role": role}, {"content": content}, _odd(rng)))


def _schema(rng: random.Random, depth: int = 0) -> Any:
    """A JSON schema, or nearly one."""
    kinds = ("object", "array", "string", "integer", "number", "boolean", "null", "thing", 7, None)
    schema: dict[str, Any] = {"type": rng.choice(kinds)}
    if depth < 3:
        schema |= rng.choice(
            (
                {},
                {"properties": {"a": _schema(rng, depth + 1)}, "required": rng.choice((["a"], ["b"], "a", 1))},
                {"items": _schema(rng, depth + 1), "minItems": rng.choice((0, 3, -1, "x", 10**9))},
                {"enum": rng.choice((["x", 1, None], [], "x"))},
                {"anyOf": [_schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]},
                {"$ref": rng.choice(("#", "#/$defs/a", "#/nowhere", "http://127.0.0.1:1/x", 5))},
                {"pattern": rng.choice(PATTERNS), "minLength": rng.choice((0, 10**6, -5))},
                {"minimum": _odd(rng), "maximum": _odd(rng), "multipleOf": rng.choice((0, 0.1, -1, 7))},
                {"not": {}, "if": {}, "patternProperties": {rng.choice(PATTERNS): {}}},
            )
        )
    return rng.choice((schema, schema, schema, _odd(rng)))


# Each is wrong, or costs a naive engine of its kind exponential time or space.
PATTERNS = (
    "(a+)+$", "(a|aa)*b", "((a{0,100}){0,100}){0,100}", "(x{1000}){1000}", "[", "(", "*", "\\", "(?P<n>a)(?P=n)",
    "(?<=a)b", "a{2,1}", "[z-a]", "\\u", "(?i)x", ".{0,100000}", "^$", "", "[^\\x00-\\U0010ffff]",
    "(" * 500 + ")" * 500, "(.*a){25}", "\\p{Nope}", "\x00",
)  # fmt: skip
GRAMMARS = (
    "start: start start | \"a\"", "start: a\na: b\nb: a", "start:", "start: nothing", "root ::= root",
    "root ::= \"a\"*",
    "start: /[/", "start: " + "(" * 300 + "\"a\"" + ")" * 300, "", "%%%", "start: \"\"*",
    "start: A{100000000}\nA: \"a\"",
    "start: %json {\"type\": 7}", "\x00",
)  # fmt: skip


def _constraint(rng: random.Random) -> dict[str, Any]:
    """Something that the output should match, if it can."""
    schema = _schema(rng)
    return rng.choice(
        (
            {"response_format": {"type": rng.choice(("json_object", "text", "json_schema", "xml", None, 5))}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"response_format": {"type": "regex", "pattern": rng.choice(PATTERNS), "regex": rng.choice(PATTERNS)}},
            {"response_format": {"type": "grammar", "grammar": rng.choice(GRAMMARS)}},
            {"guided_json": schema},
            {"guided_regex": rng.choice(PATTERNS)},
            {"guided_grammar": rng.choice(GRAMMARS)},
            {"guided_choice": _odd(rng)},
            {"structured_outputs": {"regex": rng.choice(PATTERNS)}},
            {"structured_outputs": {"grammar": rng.choice(GRAMMARS)}},
            {"structured_outputs": {"json": schema, "choice": ["a"]}},
        )
    )


def _fields(rng: random.Random) -> Shot:
    """A right body with one to three fields that are not."""
    path = rng.choices(PATHS, weights=(4, 4, 1, 1))[0]
    body = valid(rng, path)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        body |= rng.choice(
            (
                {rng.choice(FIELDS): _odd(rng)},
                {rng.choice(FIELDS): _odd(rng)},
                {rng.choice(list(body)): _odd(rng)},
                {"messages": rng.choice(([_message(rng) for _ in range(rng.randint(0, 3))], _message(rng)))},
                {"stop": rng.choice((["a"] * 4, ["a"] * 500, ["\n", ""], "x" * 5000, [1], None, "🙂", [None]))},
                {"logit_bias": {str(rng.randint(-3, 60000)): rng.uniform(-200, 200) for _ in range(rng.randint(0, 9))}},
                {"stream_options": rng.choice(({"include_usage": _odd(rng)}, {"continuous_usage_stats": True}, []))},
                _constraint(rng),
            )
        )
    return Shot("fields", (post(path, json.dumps(_brief(body)).encode()),))


def _brief(body: dict[str, Any]) -> dict[str, Any]:
    """The same mistakes, but few tokens: a request for thousands of them, well meant, is a load and no malformation."""
    bounds = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    if bounds == [None, None] and ("messages" in body or "prompt" in body):
        body["max_tokens"] = 4
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):
        value = body.get(name)
        if isinstance(value, int) and 4 < value < 10_000:
            body[name] = 16 if name == "n" and value == 16 and body.get("prompt") == "hello" else 3
    return body


def _text(rng: random.Random) -> Shot:
    """A body that is no JSON, or only just."""
    path = rng.choice(PATHS)
    text = json.dumps(valid(rng, path), ensure_ascii=False)
    place = rng.randrange(len(text) + 1)
    field = rng.choice(FIELDS)
    body = rng.choice(
        (
            text[:place],
            text[:place] + rng.choice('{}[]",:\\\x00\n0e-') + text[place:],
            text + rng.choice(("}", " ", "\n", text, "\x00", "//", ",")),
            "\ufeff" + text,
            text.replace('"', "'"),
            text[:-1] + f', "{field}": {rng.choice(NUMBERS)}}}',
            text[:-1] + f', "{field}": "{rng.choice(STRINGS)}"}}',
            text[:-1] + f', "max_tokens": 2, "max_tokens": {rng.choice(("1", "null", "{}"))}}}',
            "[" * rng.choice((10, 1000, 100_000)),
            '{"a":' * rng.choice((10, 1000, 50_000)) + "1" + "}" * rng.choice((0, 10, 1000, 50_000)),
            text[:-1] + f', "{field}": ' + "[" * 5000 + "]" * 5000 + "}",
            rng.choice(("", " ", "null", "true", "0", '""', "[]", "{}", "NaN", "-", "{", '{"a"}', "\x00", "undefined")),
        )
    )
    return Shot("text", (post(path, body.encode("utf-8", "surrogatepass")),))


NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "9" * 400, "9" * 6000, "0x10", "01", "+1", "1.", ".5",
    "1_000", "--1", "1e", "0e0", "-0", "1E+2", "0.1e1",
)  # fmt: skip
STRINGS = (
    "\\ud800", "\\udfff", "\\ud83d\\u0041", "\\u0000", "\\x41", "\\u00", "\\", "\t", "\\ud83d\\ude42", "\\/", "\\u202e",
)  # fmt: skip


def _bytes(rng: random.Random) -> Shot:
    """A body that is no UTF-8, or says that it is something else."""
    path = rng.choice(PATHS)
    text = json.dumps(valid(rng, path))
    right = text.encode()
    place = rng.randrange(len(right) + 1)
    body = rng.choice(
        (
            right[:place] + rng.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x28\xa1"))
            + right[place:],
            text.encode("utf-16"),
            text.encode("utf-32-le"),
            rng.randbytes(rng.randint(1, 300)),
            b"\x1f\x8b" + right,
            b"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--x--",
            b"a=1&b=%ff",
            right,
        )
    )  # fmt: skip
    content_type = rng.choice(
        (JSON_TYPE, "text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "", "x" * 500,
         "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=nope", "\xff/\xfe")
    )  # fmt: skip
    encoding = rng.choice(((), ("Content-Encoding: gzip",), ("Content-Encoding: br",)))
    return Shot("bytes", (post(path, body, *encoding, content_type=content_type),))


def _headers(rng: random.Random) -> Shot:
    """Headers that are strange, many, long, twice, or not allowed at all."""
    path = rng.choice(PATHS)
    body = json.dumps(valid(rng, path)).encode()
    extra = rng.choice(
        (
            ["Content-Type: text/plain"],
            ["Content-Length: 5"],
            ["Host: y", "Host: z"],
            ["X-Request-Id: a", "X-Request-Id: b"],
            [f"X-Request-Id: {rng.choice(('', 'x' * 5000, 'é', 'a b', '../../x', '%0d%0aX: y'))}"],
            [f"Authorization: {rng.choice(('', 'Bearer', 'Bearer ', 'Basic !!', 'Bearer é', 'x' * 9000))}"],
            [f"traceparent: {rng.choice(('', '00-0-0-0', 'x' * 400, '00-' + 'f' * 32 + '-' + 'f' * 16 + '-01'))}"],
            ["traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate: " + "é=,," * 90],
            [f"X-{number}: y" for number in range(rng.choice((50, 500)))],
            ["X-Long: " + "y" * rng.choice((1000, 30_000, 200_000))],
            ["Cookie: " + "a=b; " * 200],
            ["Expect: 100-continue"],
            ["Expect: nonsense"],
            ["Connection: close, upgrade", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"],
            ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13"],
            [f"Origin: {rng.choice(('null', 'http://x', 'é'))}", "Access-Control-Request-Method: POST"],
            ["Accept: image/png", "Accept-Encoding: x, *;q=0", "Range: bytes=0-1", "If-None-Match: *"],
            ["Transfer-Encoding: identity"],
            [" folded: x"],
            ["No colon here"],
            [": no name"],
            ["Bad name: x"],
            ["X-Nul: a\x00b"],
            ["X-Bell: a\x07b\x7f"],
            ["X-Forwarded-For: 1.2.3.4, é", "Forwarded: for=_x", "X-Forwarded-Proto: javascript"],
        )
    )
    return Shot("headers", (post(path, body, *extra, version=rng.choice(("1.1", "1.1", "1.0"))),), answers=0)


def _lines(rng: random.Random) -> Shot:
    """A first line that leads somewhere else, or nowhere."""
    method, target, version, host = "GET", rng.choice(PAGES), "HTTP/1.1", "Host: x\r\n"
    strange = rng.randrange(6)
    if strange in (1, 5):
        method = rng.choice(
            ("HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "POST", "CONNECT", "PRI", "get", "X", "", "\xe9")
        )
    if strange in (2, 5):
        target = rng.choice(TARGETS)
    if strange in (3, 5):
        version = rng.choice(("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.10", "http/1.1", "", "x"))
    if strange in (4, 5):
        host = rng.choice(("", "Host: \r\n", "Host: a b\r\n", "Host: x:99999999\r\n", "Host: \xe9\r\n"))
    raw = f"{method} {target} {version}\r\n{host}Connection: close\r\n\r\n".encode("latin-1")
    return Shot("lines", (raw,), answers=1 if strange == 0 else 0, method=method)


TARGETS = (
    *PATHS, "/", "*", "//", "/v1", "/v1/", "/v1/models/", "/v1/models/demo", "/v1/models/%00", "/V1/MODELS", "/docs",
    "/health?x=" + "y" * 3000, "/%2e%2e/%2e%2e/etc/passwd", "/../../etc/passwd", "/health/../metrics", "/%ff%fe", "/;a",
    "/%", "/a\x80b", "http://127.0.0.1/health", "http://[::1", "/cluster?x[]=1", "/" + "a" * 70_000, "health", "",
    "/health#x", "/favicon.ico", "/cluster/\x00", "/cluster/../health",
)  # fmt: skip


def _framing(rng: random.Random) -> Shot:
    """A body whose length is not what is said, in one way or another."""
    path = rng.choice(PATHS)
    body = json.dumps(valid(rng, path)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON_TYPE}\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    length = rng.choice(
        (b"-1", b"+5", b"5, 5", b"0x5", b"", b"9" * 30, b"99999999", b"1e3", b" 5 6", b"5\x00", b"\xb2")
    )
    half = rng.randrange(len(whole))
    raw = rng.choice(
        (
            head + b"Content-Length: " + length + b"\r\n\r\n" + body,
            head + b"Content-Length: %d\r\n\r\n" % (len(body) + 50) + body,
            head + b"Content-Length: %d\r\n\r\n" % (len(body) // 2) + body,
            head + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body) + whole,
            head + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + whole,
            head + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + whole,
            head + b"Transfer-Encoding: xchunked\r\n\r\n" + whole,
            head + b"\r\n" + body,
            chunked + whole,
            chunked + whole[:half],
            chunked
            + rng.choice((b"zz\r\n", b"-5\r\n", b"ffffffffffffffffff\r\n", b"\r\n", b"5;" + b"x" * 70_000)) + body,
            chunked + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
            chunked + b"0\r\nX-Trailer: y\r\nContent-Length: 9\r\n\r\n",
            head.replace(b"\r\n", b"\n") + b"Content-Length: %d\n\n" % len(body) + body,
            rng.randbytes(rng.randint(1, 400)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(50),
            b"\r\n" * rng.choice((1, 5, 5000)) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"",
        )
    )  # fmt: skip
    return Shot("framing", (raw,), answers=0)


def _gone(rng: random.Random) -> Shot:
    """A client that leaves: before its request is whole, right after it, or with part of the answer."""
    path = rng.choice(PATHS[:2])
    body = valid(rng, path) | {"stream": rng.random() < 0.7, "max_tokens": 200, "n": rng.choice((1, 1, 2, 16))}
    raw = post(path, json.dumps(body).encode())
    if rng.random() < 0.3:
        return Shot("gone", (raw[: rng.randrange(1, len(raw))],), reads=0)
    # An answer that is not streamed has no part to read.
    return Shot("gone", (raw,), reads=rng.choice((0, 0, 1, 300, 4000)) if body["stream"] else 0)


def _pipelined(rng: random.Random) -> Shot:
    """Several requests at once on one connection: each gets its answer, in order."""
    requests = []
    for _ in range(rng.randint(2, 6)):
        path = rng.choice((*PATHS, "/health", "/v1/models"))
        body = json.dumps(valid(rng, path)).encode() if path in PATHS else b""
        requests.append(post(path, body) if path in PATHS else f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return Shot("pipelined", (b"".join(requests),), answers=len(requests))


def _slow(rng: random.Random) -> Shot:
    """A request that drips."""
    path = rng.choice(PATHS)
    raw = post(path, json.dumps(valid(rng, path)).encode())
    cuts = sorted(rng.sample(range(1, len(raw)), 8))
    pieces = tuple(raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True))
    whole = rng.random() < 0.7
    return Shot("slow", pieces if whole else pieces[:-1], answers=int(whole), pause_s=0.05)


def _heavy(rng: random.Random) -> Shot:
    """More than anybody should send."""
    path = rng.choice(PATHS)
    filler = rng.choice(("x", "x ", "é", "\\u0000", "🙂"))
    size = rng.choice((100_000, 1 << 20, BODY_LIMIT, 2 * BODY_LIMIT))
    body = valid(rng, path)
    name = {"/v1/chat/completions": "user", "/detokenize": "model"}.get(path, "prompt")
    text = json.dumps({**body, name: ""}, ensure_ascii=False)
    long = text.replace(f'"{name}": ""', f'"{name}": "{filler * (size // len(filler))}"').encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON_TYPE}\r\nContent-Length: {10**12}\r\n\r\n".encode()
    many = json.dumps({**body, "tokens": [1] * 200_000, "stop": ["x"] * 50_000, "prompt": [1] * 200_000}).encode()
    if rng.random() < 0.2:
        return Shot("heavy", (head + b"{}",), answers=0)
    return Shot("heavy", (post(path, rng.choice((long, many))),), answers=0)
