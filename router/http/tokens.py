"""POST /tokenize and /detokenize: what the model's tokenizer makes of a prompt, and of tokens.

Owns: these two answers. Refuses to know: requests that run.
"""

from __future__ import annotations

import asyncio
from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.admission import Admitted, ModelLimits, NotFound, admit
from baton.router.gateway import LONG_TEXT_CHARS, Refused
from baton.router.http.chat import CHAT_NAMES
from baton.router.http.errors import ApiError, from_refused
from baton.router.http.logprobs import TokenWords
from baton.router.http.schema import DetokenizeRequest, TokenizeRequest
from baton.router.http.translate import chat_of
from baton.router.journey import Trouble
from baton.router.tokenizer import Tokenizer


async def tokenize(body: TokenizeRequest, tokenizer: Tokenizer, limits: ModelLimits) -> dict[str, Any]:
    """Raises ApiError for what is too long for a prompt, or no conversation."""
    if body.messages is None:
        special = body.add_special_tokens is not False
        tokens = await encoded(body.prompt or "", special, tokenizer, limits.max_tokens)
    else:
        tokens = await _of_chat(body, tokenizer, limits)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": limits.max_tokens, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = list(map(TokenWords(tokenizer).text_of, tokens))
    return answer


async def detokenize(body: DetokenizeRequest, tokenizer: Tokenizer, limits: ModelLimits) -> dict[str, Any]:
    tokens = body.tokens
    if len(tokens) > limits.max_tokens:
        raise ApiError(400, f"tokens are {len(tokens)}, must be at most {limits.max_tokens}", "tokens")
    wrong = next((token_id for token_id in tokens if token_id >= limits.vocab_size), None)
    if wrong is not None:
        raise ApiError(400, f"tokens has {wrong}, must be token ids from 0 to {limits.vocab_size - 1}", "tokens")
    if len(tokens) <= LONG_TEXT_CHARS:
        return {"prompt": tokenizer.decode(tokens, False)}
    return {"prompt": await asyncio.to_thread(tokenizer.decode, tokens, False)}


async def encoded(text: str, special: bool, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """The tokens of a prompt, with special ones around it or without; long ones are read in a thread."""
    fewest = tokenizer.fewest_tokens(text)
    if fewest > max_tokens:
        raise ApiError(400, f"prompt is at least {fewest} tokens, must be at most {max_tokens}", "prompt")
    if len(text) <= LONG_TEXT_CHARS:
        return tokenizer.encode(text, special)
    return await asyncio.to_thread(tokenizer.encode, text, special)


async def _of_chat(body: TokenizeRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[int]:
    chat = chat_of(body.messages or (), body.tools, body.chat_template_kwargs, bool(body.continue_final_message))
    request = inference.GenerateRequest(chat=chat)
    if chat.ByteSize() <= LONG_TEXT_CHARS:
        admitted = admit(request, limits, tokenizer)
    else:
        admitted = await asyncio.to_thread(admit, request, limits, tokenizer)
    if isinstance(admitted, Admitted):
        return list(admitted.prompt_token_ids)
    assert not isinstance(admitted, NotFound)
    raise from_refused(Refused(Trouble.INVALID, "", violations=tuple(admitted)), "", CHAT_NAMES)
