"""POST /v1/chat/completions: a conversation, by the model's own template.

Owns: this endpoint's request and choices. Refuses to know: templates (`tokenizer`) and all that it shares with
completions (`translate`, `writer`). What the model says is content: calls of tools are not read out of it.
"""

from __future__ import annotations

from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.http.schema import ChatCompletionRequest
from baton.router.http.translate import chat_of, grammar_name, sampling_of
from baton.router.http.writer import Choice, Writer, quote


def request_of(body: ChatCompletionRequest, request_id: str) -> inference.GenerateRequest:
    sampling = sampling_of(body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    return inference.GenerateRequest(
        request_id=request_id,
        chat=chat_of(
            body.messages,
            None if body.tool_choice == "none" else body.tools,
            body.chat_template_kwargs,
            continues=bool(body.continue_final_message),
        ),
        sampling=sampling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        session_id=body.session_id or "",
    )


class ChatWriter(Writer):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    _body: ChatCompletionRequest

    def names(self, prompt: int) -> dict[str, str]:
        return {
            **CHAT_NAMES,
            "sampling.max_tokens": "max_completion_tokens" if self._body.max_completion_tokens else "max_tokens",
            "sampling.logprobs": "top_logprobs",
            "sampling.grammar": grammar_name(self._body),
        }

    def part(self, choice: Choice, message: inference.GenerateResponse) -> str:
        logprobs = "null"
        if self._body.logprobs and message.logprobs:
            logprobs = quote(self._logprobs(message.logprobs))
        # The role comes with the first token: a chunk before it would pass for one.
        role = "" if choice.began else '"role":"assistant",'
        text = "" if choice.began and not message.text and not message.token_ids else f'"content":{quote(message.text)}'
        return f'"delta":{{{role}{text}}},"logprobs":{logprobs}'

    def plain(self, text: str) -> str | None:
        return f'"delta":{{"content":{quote(text)}}},"logprobs":null'

    def members(self, choice: Choice) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
        }

    def _logprobs(self, entries: Any) -> dict[str, Any]:
        return {"content": [self.words.chat(entry) for entry in entries], "refusal": None}


CHAT_NAMES = {
    "chat.template_arguments": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat": "messages",
    "prompt": "messages",
}
