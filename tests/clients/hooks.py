"""For schemathesis: what its made-up requests for tokens cannot know, and how many they may ask for.

Owns: the name of the model, as a random one is refused before anything else is looked at, and the number of tokens: a
request for as many as fit is a load and no test of the API.
Refuses to know: everything else about a request, which goes out as it was made up.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "demo"
MAX_TOKENS = 2
BOUNDS = ("max_tokens", "max_completion_tokens")


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict) or not {"prompt", "messages"} & body.keys():
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if all(body.get(name) is None for name in BOUNDS):
        body["max_tokens"] = MAX_TOKENS
    for name in BOUNDS:
        if isinstance(body.get(name), int) and body[name] > MAX_TOKENS:
            body[name] = MAX_TOKENS
