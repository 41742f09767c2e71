"""Give a model's embedding and head rows for more tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def extend_vocabulary(model: PreTrainedModel, tokens: int, learned: Sequence[int] | None) -> None:
    """Give embedding and head rows for `tokens` tokens. A new row starts as the mean of the rows
    with the ids `learned`; None: of all rows. Rows that only padded the old vocabulary are
    new, too.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    rows = len(embedding.weight)
    # Ids of rows that were trained, and for each row of the result whether it is new.
    old = torch.tensor(sorted(learned) if learned is not None else range(rows))
    old = old[old < rows]
    new = torch.ones(tokens, dtype=torch.bool)
    new[old[old < tokens]] = False
    parameters = {"embedding": embedding.weight, "head": head.weight, "bias": head.bias}
    tied = head.weight is embedding.weight
    for name, parameter in parameters.items():
        if parameter is None or (name == "head" and tied):
            continue
        values = parameter.detach()
        added = values.new_empty(max(0, tokens - rows), *values.shape[1:])
        values = torch.cat([values, added])  # (rows, C), or (rows,) for a bias
        values[: len(new)][new] = parameter.detach()[old].mean(0)
        parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    embedding.weight = parameters["embedding"]
    head.bias = parameters["bias"]
    head.weight = embedding.weight if tied else parameters["head"]
    if tokens <= rows:
        return
    embedding.num_embeddings = head.out_features = model.config.vocab_size = tokens
    if hasattr(model, "vocab_size"):  # transformers' models keep a copy
        model.vocab_size = tokens
