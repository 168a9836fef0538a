"""A store as a Hugging Face `datasets` object: to look into with the tools that people have for those.

Rows are read when they are asked for, states decoded. Training does not go this way: it reads shards.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset, List, Value

from eagle3.features.shard import IndexEntry
from eagle3.features.store import FeatureStore


def as_dataset(where: Path | str) -> IterableDataset:
    """Returns the samples of a store as a streamed data set, in the store's order; states are fp32 lists.

    Raises:
        UserError: there is no store, or it is damaged.
    """
    store = FeatureStore(where)
    states = List(List(Value("float32")))
    features = Features(
        {
            "sample_id": Value("string"),
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("bool")),
            "aux_hidden_states": states,  # (T, A*D)
            "last_hidden_states": states,  # (R, D)
            "last_rows": List(Value("int32")),
        }
    )
    return IterableDataset.from_generator(_rows, gen_kwargs={"where": store.path}, features=features)


def as_table(where: Path | str) -> Dataset:
    """Returns what is known of each sample without its states: quick for any store, and can be sorted and filtered.

    Raises:
        UserError: there is no store, or it is damaged.
    """
    entries = FeatureStore(where).entries
    kinds = {each.name: Value("string" if each.type is str else "int64") for each in fields(IndexEntry)}
    columns = {name: [getattr(entry, name) for entry in entries] for name in kinds}  # there without samples, too
    return Dataset.from_dict(columns, features=Features(kinds))


def _rows(where: Path | str) -> Iterator[dict[str, Any]]:
    store = FeatureStore(where)
    for index in range(len(store)):
        sample = store[index]
        yield {
            "sample_id": sample.sample_id,
            "input_ids": sample.input_ids.numpy(),
            "loss_mask": sample.loss_mask.numpy(),
            "aux_hidden_states": sample.aux_hidden_states.to(torch.float32).numpy(),
            "last_hidden_states": sample.last_hidden_states.to(torch.float32).numpy(),
            "last_rows": sample.last_rows.numpy(),
        }
