"""What a client's request must satisfy before anything is spent on it.

Owns: the bounds of every field of `GenerateRequest`, the defaults of what is absent, and the prompt's tokenization.
Refuses to know: load, queues, workers, clocks and the wire's error format. All of a request's faults are reported
together, each with its field, value and bound, because a person fixes them together.

    GenerateRequest --> admit() --> Admitted                 every default filled in
                                    list[FieldViolation]     INVALID_ARGUMENT, with google.rpc.BadRequest
                                    NotFound                 NOT_FOUND
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.proto import inference_pb2 as inference
from baton.proto.messages import LogitBias, Sampling
from baton.router.grammar import BadGrammar, translate
from baton.router.tokenizer import RESERVED_ARGUMENTS, ChatMessage, ChatTemplateError, Conversation, Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_OUTPUTS = 16
MAX_NAME_CHARS = 128
MAX_SHOWN_CHARS = 80
ROLES = ("system", "developer", "user", "assistant", "tool")

_NAME = re.compile(r"[A-Za-z0-9._:/+=@-]*")
_NAME_BOUND = f"at most {MAX_NAME_CHARS} letters, digits and ._:/+=@-"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One fault: the field's path in GenerateRequest, what it holds and what it may hold."""

    field: str
    value: str
    bound: str

    @property
    def description(self) -> str:
        return f"{self.field} is {self.value}, must be {self.bound}"


@dataclass(frozen=True, slots=True)
class NotFound:
    """The request names something that this cluster does not serve."""

    field: str
    name: str

    @property
    def description(self) -> str:
        return f"{self.field} {self.name!r} is not served here"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """`max_pool_tokens`: the most tokens that one sequence can hold in the smallest pool it would pass through; None
    where no pool is smaller than the model's length. `max_request_tokens`: the operator's own bound."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_pool_tokens: int | None = None
    max_request_tokens: int | None = None

    @property
    def max_tokens(self) -> int:
        """Prompt and output together."""
        bounds = (self.max_model_len, self.max_pool_tokens, self.max_request_tokens)
        return min(bound for bound in bounds if bound is not None)

    @property
    def max_tokens_source(self) -> str:
        if self.max_tokens == self.max_request_tokens:
            return "what this server allows one request"
        return "the model's length" if self.max_tokens == self.max_model_len else "what the smallest pool can hold"


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A client's request, checked and complete. `sampling` is the first output's; see `sampling_of`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    resume_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    session_id: str = ""
    slo: Slo = Slo()

    def sampling_of(self, index: int) -> Sampling:
        """Each of the n outputs has the next seed, so a client can ask for one of them again by itself."""
        return replace(self.sampling, seed=_wrapped(self.sampling.seed + index))


def random_seed() -> int:
    """A seed that nobody can guess, from the operating system."""
    return _wrapped(int.from_bytes(os.urandom(8), "little"))


def random_request_id() -> str:
    return str(uuid.uuid4())


def is_name(value: str) -> bool:
    """Whether a client may call a request, a session or a salt so. An empty name is none, and allowed."""
    return len(value) <= MAX_NAME_CHARS and _NAME.fullmatch(value) is not None


def admit(
    message: inference.GenerateRequest,
    limits: ModelLimits,
    tokenizer: Tokenizer,
    *,
    mint_seed: Callable[[], int] = random_seed,
    mint_request_id: Callable[[], str] = random_request_id,
) -> Admitted | list[FieldViolation] | NotFound:
    """Never raises for what a client can send. Takes time in proportion to the prompt, which is bounded."""
    check = _Check()
    check.name("request_id", message.request_id)
    check.name("session_id", message.session_id)
    check.name("cache_salt", message.cache_salt)
    slo = _slo(message.slo, check)
    prompt = _prompt(message, limits, tokenizer, check)
    sampling = _sampling(message.sampling, len(prompt), limits, check)
    stop = _stop(message.sampling.stop, check)
    n = message.sampling.n if message.sampling.HasField("n") else 1
    check.within("sampling.n", n, 1, MAX_OUTPUTS)
    resume = _resume(message.resume_token_ids, n, sampling.max_tokens, limits, check)
    if check.violations:
        return check.violations
    if message.adapter:
        return NotFound("adapter", message.adapter)
    if not message.sampling.HasField("seed"):
        sampling = replace(sampling, seed=_wrapped(mint_seed()))
    return Admitted(
        request_id=message.request_id or mint_request_id(),
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=stop,
        n=n,
        priority=message.priority,
        resume_token_ids=resume,
        cache_salt=message.cache_salt,
        session_id=message.session_id,
        slo=slo,
    )


class _Check:
    """Collects violations, so that each rule is one line."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def refuse(self, field: str, value: str, bound: str) -> None:
        shown = value if len(value) <= MAX_SHOWN_CHARS else value[: MAX_SHOWN_CHARS - 3] + "..."
        self.violations.append(FieldViolation(field, shown, bound))

    def within(self, field: str, value: float, low: float, high: float) -> None:
        # Written so that NaN, which compares false with everything, is refused.
        if not low <= value <= high:
            self.refuse(field, f"{value:g}", f"from {low:g} to {high:g}")

    def above_zero(self, field: str, value: float, high: float = math.inf) -> None:
        if not 0 < value <= high or math.isinf(value):
            self.refuse(field, f"{value:g}", "above 0" if math.isinf(high) else f"above 0 and at most {high:g}")

    def name(self, field: str, value: str) -> None:
        if not is_name(value):
            self.refuse(field, repr(value), _NAME_BOUND)

    def token_ids(self, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        self.refuse(f"{field}[{position}]", str(token_id), f"a token id from 0 to {vocab_size - 1}")


def _slo(message: inference.Slo, check: _Check) -> Slo:
    ttft_ms = message.ttft_ms if message.HasField("ttft_ms") else None
    tpot_ms = message.tpot_ms if message.HasField("tpot_ms") else None
    if ttft_ms is not None:
        check.above_zero("slo.ttft_ms", ttft_ms)
    if tpot_ms is not None:
        check.above_zero("slo.tpot_ms", tpot_ms)
    return Slo(ttft_ms, tpot_ms)


def _prompt(
    message: inference.GenerateRequest, limits: ModelLimits, tokenizer: Tokenizer, check: _Check
) -> tuple[int, ...]:
    """The prompt's ids; empty if it was refused."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return _text(message.text, limits, tokenizer, check)
    if kind == "chat":
        return _chat(message.chat, limits, tokenizer, check)
    if kind == "token_ids":
        ids = message.token_ids.ids
        if not ids:
            check.refuse("token_ids.ids", "empty", "at least one token id")
        elif _fits(len(ids), limits, check):
            check.token_ids("token_ids.ids", ids, limits.vocab_size)
            return tuple(ids)
        return ()
    check.refuse("prompt", "missing", "one of text, token_ids and chat")
    return ()


def _text(text: str, limits: ModelLimits, tokenizer: Tokenizer, check: _Check) -> tuple[int, ...]:
    if not text:
        check.refuse("text", repr(text), "at least one character")
        return ()
    if not _fits(tokenizer.fewest_tokens(text), limits, check, "at least "):
        return ()
    ids = tuple(tokenizer.encode(text))
    if not ids:
        check.refuse("text", repr(text), "text that has at least one token")
    return ids if ids and _fits(len(ids), limits, check) else ()


def _chat(chat: inference.Chat, limits: ModelLimits, tokenizer: Tokenizer, check: _Check) -> tuple[int, ...]:
    conversation = _conversation(chat, check)
    if conversation is None:
        return ()
    fewest = sum(tokenizer.fewest_tokens(message.content) for message in conversation.messages)
    if not _fits(fewest, limits, check, "at least "):
        return ()
    try:
        text = tokenizer.render(conversation)
    except ChatTemplateError as error:
        check.refuse("chat", "a conversation", f"one that the model can read ({error})")
        return ()
    if not _fits(tokenizer.fewest_tokens(text), limits, check, "at least "):
        return ()
    ids = tuple(tokenizer.encode_chat(text))
    if not ids:
        check.refuse("chat", "a conversation", "one that has at least one token")
    return ids if ids and _fits(len(ids), limits, check) else ()


def _conversation(chat: inference.Chat, check: _Check) -> Conversation | None:
    """The conversation; None if it was refused."""
    known = len(check.violations)
    if not chat.messages:
        check.refuse("chat.messages", "empty", "at least one message")
    messages = []
    for position, message in enumerate(chat.messages):
        path = f"chat.messages[{position}]"
        if message.role not in ROLES:
            check.refuse(f"{path}.role", repr(message.role), "one of " + ", ".join(ROLES))
        calls = _objects(f"{path}.tool_calls", message.tool_calls, check)
        messages.append(ChatMessage(message.role, message.content, message.name, message.tool_call_id, calls))
    tools = _objects("chat.tools", chat.tools, check)
    arguments = _json(chat.template_arguments or "{}")
    if not isinstance(arguments, dict):
        check.refuse("chat.template_arguments", repr(chat.template_arguments), "a JSON object")
    elif taken := sorted(RESERVED_ARGUMENTS.intersection(arguments)):
        check.refuse(f"chat.template_arguments.{taken[0]}", "given", "absent: the request has a field for it")
    if len(check.violations) > known:
        return None
    continues = chat.HasField("add_generation_prompt") and not chat.add_generation_prompt
    return Conversation(messages, tools or None, arguments, continues)


def _objects(field: str, text: str, check: _Check) -> list[dict[str, Any]]:
    """A JSON array of objects, where an empty text is an empty one."""
    value = _json(text or "[]")
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return value
    check.refuse(field, repr(text), "a JSON array of objects")
    return []


def _json(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fits(num_tokens: int, limits: ModelLimits, check: _Check, qualifier: str = "") -> bool:
    """A prompt must leave room for one token of output. `qualifier` says what kind of number `num_tokens` is."""
    if num_tokens < limits.max_tokens:
        return True
    bound = f"at most {limits.max_tokens - 1} tokens, so that one fits after it in {limits.max_tokens_source}"
    check.refuse("prompt", f"{qualifier}{num_tokens} tokens", bound)
    return False


def _sampling(
    message: inference.SamplingParams, num_prompt_tokens: int, limits: ModelLimits, check: _Check
) -> Sampling:
    """Sampling with its defaults. `num_prompt_tokens` 0 means that the prompt was refused, and sets no bound."""
    defaults = Sampling()
    temperature = message.temperature if message.HasField("temperature") else defaults.temperature
    top_p = message.top_p if message.HasField("top_p") else defaults.top_p
    top_k = message.top_k if message.HasField("top_k") else defaults.top_k
    min_p = message.min_p if message.HasField("min_p") else defaults.min_p
    repetition = message.repetition_penalty if message.HasField("repetition_penalty") else defaults.repetition_penalty
    presence = message.presence_penalty if message.HasField("presence_penalty") else defaults.presence_penalty
    frequency = message.frequency_penalty if message.HasField("frequency_penalty") else defaults.frequency_penalty
    logprobs = message.logprobs if message.HasField("logprobs") else None
    prompt_logprobs = message.prompt_logprobs if message.HasField("prompt_logprobs") else None

    if not 0 <= temperature < math.inf:
        check.refuse("sampling.temperature", f"{temperature:g}", "0 (greedy) or a finite number above it")
    check.above_zero("sampling.top_p", top_p, 1)
    if top_k < -1:
        check.refuse("sampling.top_k", str(top_k), "at least 1, or 0 or -1 for all tokens")
    check.within("sampling.min_p", min_p, 0, 1)
    check.above_zero("sampling.repetition_penalty", repetition, 10)
    check.within("sampling.presence_penalty", presence, -2, 2)
    check.within("sampling.frequency_penalty", frequency, -2, 2)
    if logprobs is not None:
        check.within("sampling.logprobs", logprobs, 0, MAX_LOGPROBS)
    if prompt_logprobs is not None:
        check.within("sampling.prompt_logprobs", prompt_logprobs, 0, MAX_LOGPROBS)
    check.token_ids("sampling.stop_token_ids", message.stop_token_ids, limits.vocab_size)
    max_tokens = _max_tokens(message, num_prompt_tokens, limits, check)
    if not 0 <= message.min_tokens <= max(max_tokens, 0):
        check.refuse("sampling.min_tokens", str(message.min_tokens), f"from 0 to max_tokens, {max_tokens}")
    eos = () if message.ignore_eos else limits.eos_token_ids
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(sorted({*message.stop_token_ids, *eos})),
        seed=message.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(message, limits, check),
        grammar=_grammar(message, limits, check),
    )


def _max_tokens(message: inference.SamplingParams, num_prompt_tokens: int, limits: ModelLimits, check: _Check) -> int:
    room = limits.max_tokens - num_prompt_tokens
    if not message.HasField("max_tokens"):
        return room
    if message.max_tokens < 1:
        check.refuse("sampling.max_tokens", str(message.max_tokens), "at least 1")
    elif message.max_tokens > room:
        bound = f"at most {room}: prompt ({num_prompt_tokens}) and output share {limits.max_tokens} tokens, "
        check.refuse("sampling.max_tokens", str(message.max_tokens), bound + limits.max_tokens_source)
    return message.max_tokens


def _logit_bias(message: inference.SamplingParams, limits: ModelLimits, check: _Check) -> tuple[LogitBias, ...]:
    entries = tuple(LogitBias(token_id, bias) for token_id, bias in sorted(message.logit_bias.items()))
    for entry in entries:
        if not 0 <= entry.token_id < limits.vocab_size:
            bound = f"a token id from 0 to {limits.vocab_size - 1}"
            check.refuse(f"sampling.logit_bias[{entry.token_id}]", str(entry.token_id), bound)
            break
        if not -100 <= entry.bias <= 100:
            check.refuse(f"sampling.logit_bias[{entry.token_id}]", f"{entry.bias:g}", "from -100 to 100")
            break
    return entries


def _grammar(message: inference.SamplingParams, limits: ModelLimits, check: _Check) -> str:
    """In the library's notation. The output ends where the grammar does, so nothing may keep it from ending there."""
    if not message.HasField("grammar"):
        return ""
    if message.ignore_eos:
        check.refuse("sampling.ignore_eos", "true", "false with a grammar, whose end is the output's")
    if message.min_tokens > 0:
        check.refuse("sampling.min_tokens", str(message.min_tokens), "0 with a grammar, whose end is the output's")
    if not limits.eos_token_ids:
        check.refuse("sampling.grammar", "set", "absent: this model has no token that ends an output")
    kind = message.grammar.WhichOneof("kind")
    grammar = translate(message.grammar)
    if isinstance(grammar, BadGrammar):
        check.refuse(f"sampling.grammar.{kind}" if kind else "sampling.grammar", grammar.value, grammar.bound)
        return ""
    return grammar


def _stop(stop: Iterable[str], check: _Check) -> tuple[str, ...]:
    texts = tuple(dict.fromkeys(stop))
    if len(texts) > MAX_STOP_STRINGS:
        check.refuse("sampling.stop", f"{len(texts)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for position, text in enumerate(texts):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            check.refuse(f"sampling.stop[{position}]", repr(text), f"1 to {MAX_STOP_CHARS} characters")
            break
    return texts


def _resume(token_ids: Sequence[int], n: int, max_tokens: int, limits: ModelLimits, check: _Check) -> tuple[int, ...]:
    if not token_ids:
        return ()
    if n > 1:
        check.refuse("resume_token_ids", f"{len(token_ids)} tokens", "empty when n is above 1: resume one output each")
    elif len(token_ids) > max_tokens:
        # As many as max_tokens is an output that is whole, of which the client has lost the last message.
        check.refuse("resume_token_ids", f"{len(token_ids)} tokens", f"at most max_tokens, {max_tokens}")
    else:
        check.token_ids("resume_token_ids", token_ids, limits.vocab_size)
    return tuple(token_ids)


def _wrapped(seed: int) -> int:
    """The seed as a signed 64-bit number, which is what the wire carries."""
    return (seed + 2**63) % 2**64 - 2**63
