"""vLLM's engine in this process, asked for whole generations; runs in the peers' environment (see peers.py).

    question {"batch": 8, "prompt": 128, "output": 384, "seed": 1}
    answer   {"first_s": seconds until every sequence has its first token, "rest_s": from there to the end,
              "rest_tokens": tokens that came in that time}

Owns: the engine and the clock around its steps.
"""

import os
import random
import sys
import time

import peer_pipe  # first: it takes stdout away from what prints
from vllm import LLM, SamplingParams


class Engine:
    """One worker, one thread, no prefix cache."""

    def __init__(self, model: str, budget: int, max_model_len: int) -> None:
        self._llm = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        self._numbers = 0

    def generate(self, question: dict) -> dict:
        engine = self._llm.llm_engine
        rng = random.Random(question["seed"])
        sampling = SamplingParams(temperature=0.0, max_tokens=question["output"], ignore_eos=True, detokenize=False)
        counts = {}
        for _ in range(question["batch"]):
            name = f"request-{self._numbers}"
            self._numbers += 1
            counts[name] = 0
            prompt = {"prompt_token_ids": [rng.randrange(100, 40_000) for _ in range(question["prompt"])]}
            engine.add_request(name, prompt, sampling)
        began_s = time.perf_counter()
        first_s = ended_s = None
        at_first = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            ended_s = time.perf_counter()
            if first_s is None and all(counts.values()):
                first_s, at_first = ended_s, sum(counts.values())
        total = sum(counts.values())
        assert total == question["batch"] * question["output"], f"{total} tokens came"
        return {"first_s": first_s - began_s, "rest_s": ended_s - first_s, "rest_tokens": total - at_first}


def main() -> None:
    # Everything in one process: what another one would do beside it is not this core's work.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    engine.generate({"batch": 2, "prompt": 32, "output": 8, "seed": 0})
    peer_pipe.serve(engine.generate, {"ready": True})


if __name__ == "__main__":
    main()
