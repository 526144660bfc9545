"""What ranks need to know of a step: a few flat arrays of numbers.

Owns: `StepInputs` and its bytes, one message a step. Refuses to know: sequences, sampling, and how the bytes travel.

    message: 7 lengths | token_ids | query_lens | context_lens | table_sizes | blocks | rows | scored       all int32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]
_NUM_ARRAYS = 7


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A batch: sequence i has the next `query_lens[i]` of `token_ids` and, with them, `context_lens[i]` tokens.

    `tables[i]`: the blocks of these. `rows`: the tokens whose final hidden state is wanted, in the order in which they
    are scored, `scored[0]` of them first, then `scored[1]` and so on. A token id of -1 - r stands for the token that
    row r of the step before has sampled, which nobody but the device need know.
    """

    token_ids: Numbers
    query_lens: Numbers
    context_lens: Numbers
    tables: Sequence[Numbers]
    rows: Numbers
    scored: Sequence[int]

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence has one token, and is scored."""
        count = len(self.query_lens)
        return len(self.token_ids) == count == len(self.rows) and bool((self.rows == np.arange(count)).all())

    def encode(self) -> bytes:
        sizes = np.fromiter(map(len, self.tables), np.int64, len(self.tables))
        arrays = (
            self.token_ids,
            self.query_lens,
            self.context_lens,
            sizes,
            np.concatenate(self.tables),
            self.rows,
            np.array(self.scored, np.int64),
        )
        return np.concatenate([[len(array) for array in arrays], *arrays]).astype(np.int32).tobytes()

    @classmethod
    def decode(cls, message: bytes) -> StepInputs:
        numbers = np.frombuffer(message, np.int32).astype(np.int64)
        ends = np.cumsum(numbers[:_NUM_ARRAYS])[:-1]
        token_ids, query_lens, context_lens, sizes, blocks, rows, scored = np.split(numbers[_NUM_ARRAYS:], ends)
        tables = np.split(blocks, np.cumsum(sizes)[:-1])
        return cls(token_ids, query_lens, context_lens, tables, rows, scored.tolist())


def resolved(token_ids_T: torch.Tensor, sampled_R: torch.Tensor) -> torch.Tensor:
    """The token ids, with those that a row of the step before has sampled."""
    rows = (-1 - token_ids_T).clamp_(min=0)
    return torch.where(token_ids_T < 0, sampled_R.to(token_ids_T.device)[rows], token_ids_T)
