"""Split documents into those to train on and those to validate on."""

import datasets
import numpy as np
import pyarrow

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.source import Documents
from nanogpt_hf.errors import DataError


def hold_out(documents: Documents, data: DataSection) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split into train and validation: a single document is cut near its end, of several some are drawn by seed."""
    if documents.validation is not None:
        return documents.train, documents.validation
    count = len(documents.train)
    if count == 1 and data.format == "chat":
        raise DataError(f"data.source: {data.one_source}: one conversation is too few to validate on another; give two")
    if count == 1:
        text = documents.train[0]["text"] or ""
        cut = int(len(text) * (1 - data.validation_fraction))
        kind = documents.train.features.arrow_schema.field("text").type

        def lone(part: str, name: str) -> datasets.Dataset:
            # With a given fingerprint, since datasets would pickle the whole text to compute one.
            return datasets.Dataset(pyarrow.table({"text": pyarrow.array([part], kind)}), fingerprint=name)

        return lone(text[:cut], "train"), lone(text[cut:], "validation")
    train, validation = held_out_rows(count, data)
    return documents.train.select(train), documents.train.select(validation)


def held_out_rows(count: int, data: DataSection) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and those to validate on, of `count` documents, each in order."""
    held_out = max(1, round(count * data.validation_fraction))
    # argsort of raw bits: a permutation that no version of NumPy changes
    bits = np.random.Philox(key=derive_seed(data.validation_seed, "validation")).random_raw(count)
    order = np.argsort(bits, kind="stable")
    return np.sort(order[held_out:]), np.sort(order[:held_out])
