"""What constrained output costs a step: microseconds a row, with the demo model's vocabulary.

Owns: the table. `python benchmarks/grammar.py [--model M] [--threads N]`. Times are the process's CPU time, which a
shared machine does not blur: `matchers` that of the thread that fills the masks beside the model's computation,
`sampler` what the mask adds to the step itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import psutil
import torch

from baton.engine.checkpoint import resolve_model
from baton.engine.grammar import Constrained, Grammars
from baton.engine.models.config import read_config
from baton.engine.sampler import Row, sample
from baton.proto.inference_pb2 import Grammar
from baton.proto.messages import Sampling
from baton.router.grammar import translate

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "address"],
}
GRAMMARS = {
    "schema": Grammar(json_schema=json.dumps(SCHEMA)),
    "JSON object": Grammar(json_object=True),
    "regex": Grammar(regex=r"[A-Z][a-z]+( [A-Z][a-z]+)*, [0-9]{1,3}"),
}
NUM_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = resolve_model(options.model)
    config = read_config(path)
    memory, started = psutil.Process().memory_info().rss, time.process_time()
    grammars = Grammars(path, config.vocab_size, config.eos_token_ids, options.threads)
    spent, memory = time.process_time() - started, psutil.Process().memory_info().rss - memory
    print(f"tokenizer of {config.vocab_size} ids: {spent:.2f} s of CPU, {memory / 2**20:.0f} MiB")
    print(
        f"{'grammar':12} {'rows':>5} {'matchers':>10} {'worst step':>11} {'sampler':>9}   us a row (worst: us a step)"
    )
    for name, grammar in GRAMMARS.items():
        for num_rows in (1, 16, 64):
            report(grammars, config.vocab_size, config.eos_token_ids, name, grammar, num_rows)


def report(
    grammars: Grammars, vocabulary: int, eos: tuple[int, ...], name: str, grammar: Grammar, num_rows: int
) -> None:
    notation = translate(grammar)
    assert isinstance(notation, str)
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    generator = torch.Generator().manual_seed(0)
    fills: list[float] = []
    unmasked: list[float] = []
    masked: list[float] = []
    for _ in range(NUM_STEPS):
        rows = [Constrained(i, f"{name}{num_rows}-{i}", notation, o, 0, len(o), eos) for i, o in enumerate(outputs)]
        start = time.process_time()
        limits = grammars.begin(rows).result(60)
        fills.append(time.process_time() - start)
        assert limits.mask is not None
        assert not limits.refused
        logits = torch.randn(num_rows, vocabulary, generator=generator)
        free = [Row(Sampling(seed=i, temperature=1.0), [0, *o], 1, 1 + len(o)) for i, o in enumerate(outputs)]
        copy = logits.clone()
        start = time.process_time()
        sample(copy, free)
        middle = time.process_time()
        tokens = sample(logits, free, limits.mask).token_ids
        unmasked.append(middle - start)
        masked.append(time.process_time() - middle)
        for index, token in enumerate(tokens):
            # An output that has ended begins again.
            outputs[index] = [] if token in eos else outputs[index]
            if token not in eos:
                outputs[index].append(token)
    typical, extra = statistics.median(fills), statistics.median(masked) - statistics.median(unmasked)
    print(
        f"{name:12} {num_rows:5} {typical / num_rows * 1e6:10.1f} {max(fills[1:]) * 1e6:11.0f} "
        f"{extra / num_rows * 1e6:9.1f}"
    )


if __name__ == "__main__":
    main()
