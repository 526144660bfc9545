"""POST /v1/completions: one or several prompts, of text or of tokens.

Owns: this endpoint's request and choices. Refuses to know: all that it shares with chat (`translate`, `writer`).
"""

from __future__ import annotations

from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.admission import ModelLimits
from baton.router.http.logprobs import CompletionLogprobs, TokenWords
from baton.router.http.schema import CompletionRequest
from baton.router.http.tokens import encoded
from baton.router.http.translate import grammar_name, sampling_of
from baton.router.http.writer import Choice, Writer, quote
from baton.router.tokenizer import Tokenizer

# As in the OpenAI API and in vLLM.
DEFAULT_MAX_TOKENS = 16


async def requests_of(
    body: CompletionRequest, request_id: str, tokenizer: Tokenizer, limits: ModelLimits
) -> list[inference.GenerateRequest]:
    """One request for each prompt."""
    sampling = sampling_of(body)
    # A prompt is scored by a request for at least one token; if none is wanted, nobody will see it.
    sampling.max_tokens = max(1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
        if body.echo:
            sampling.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    prompts = prompts_of(body)
    requests = []
    for place, prompt in enumerate(prompts):
        request = inference.GenerateRequest(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{place}",
            sampling=sampling,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            session_id=body.session_id or "",
        )
        if not isinstance(prompt, str):
            request.token_ids.ids.extend(prompt)
        elif body.add_special_tokens is False and prompt:
            request.token_ids.ids.extend(await encoded(prompt, False, tokenizer, limits.max_tokens - 1))
        else:
            request.text = prompt
        requests.append(request)
    return requests


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


class CompletionWriter(Writer):
    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, request_id: str, model: str, body: CompletionRequest, words: TokenWords) -> None:
        super().__init__(request_id, model, body, words)
        self._request = body
        self._prompts = prompts_of(body)
        self._scored_only = body.max_tokens == 0
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def names(self, prompt: int) -> dict[str, str]:
        name = "prompt" if len(self._prompts) == 1 else f"prompt[{prompt}]"
        return {"text": name, "token_ids.ids": name, "prompt": name, "sampling.grammar": grammar_name(self._request)}

    def finish_reason(self, choice: Choice) -> str | None:
        # The one token that is not shown may have been the end of a text: not of this one.
        reason = super().finish_reason(choice)
        return "length" if reason is not None and self._scored_only else reason

    def part(self, choice: Choice, message: inference.GenerateResponse) -> str:
        text = "" if self._scored_only else message.text
        if not choice.began:
            text = self._echo(choice) + text
        if self._request.logprobs is None:
            return f'"text":{quote(text)},"logprobs":null'
        logprobs = self._logprobs_of(choice)
        start = len(logprobs.tokens)
        self._extend(logprobs, choice, message.prompt_logprobs, message.logprobs, first=not choice.began)
        return f'"text":{quote(text)},"logprobs":{quote(logprobs.since(start))}'

    def plain(self, text: str) -> str | None:
        if self._request.logprobs is not None or self._scored_only:
            return None
        return f'"text":{quote(text)},"logprobs":null'

    def members(self, choice: Choice) -> dict[str, Any]:
        text = self._echo(choice) + ("" if self._scored_only else "".join(choice.texts))
        if self._request.logprobs is None:
            return {"text": text, "logprobs": None}
        logprobs = self._logprobs_of(choice)
        self._extend(logprobs, choice, choice.prompt_logprobs, choice.logprobs, first=True)
        return {"text": text, "logprobs": logprobs.since(0)}

    def _extend(self, logprobs: CompletionLogprobs, choice: Choice, prompt: Any, output: Any, *, first: bool) -> None:
        if first and self._request.echo:
            logprobs.begin(choice.generation.admitted.prompt_token_ids[0])
            logprobs.extend(prompt)
        if not self._scored_only:
            logprobs.extend(output)

    def _logprobs_of(self, choice: Choice) -> CompletionLogprobs:
        width = self._request.logprobs or 0
        return self._logprobs.setdefault(choice.index, CompletionLogprobs(self.words, width))

    def _echo(self, choice: Choice) -> str:
        """The prompt's text, as the client has sent it or as its tokens read."""
        if not self._request.echo:
            return ""
        prompt = self._prompts[choice.index // (self._request.n or 1)]
        return prompt if isinstance(prompt, str) else self.words.join(prompt)
