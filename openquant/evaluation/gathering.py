"""What several processes found of their documents, put together in the first.

It travels as bytes: arrays of numbers as numpy stores them, never pickled, and counts as JSON.

    data = packed(records, counts)            # of this process's documents
    records, counts = unpacked(data, documents)
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..data.corpus import Document
from .kl import DocumentRecord

# Columns of a record: numbers, and what is true or not.
_FIGURES = ("kl", "confidence", "source_nll", "output_nll")
_FLAGS = ("top1", "top5")

# Of each pass, by the document's number.
Records = Mapping[int, Mapping[int, DocumentRecord]]


def pack_records(records: Records, counts: Mapping[str, Any]) -> bytes:
    """What a process found of its documents, which are all equally long.

    Args:
        records: of its passes and documents.
        counts: anything that JSON can hold.
    """
    arrays = {"counts": np.frombuffer(json.dumps(counts).encode(), np.uint8)}
    for number, found in records.items():
        arrays[f"{number}.documents"] = np.array(list(found), np.int64)
        for kind, columns in (("figures", _FIGURES), ("flags", _FLAGS)):
            arrays[f"{number}.{kind}"] = np.array(
                [[getattr(record, column) for column in columns] for record in found.values()]
            )
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpack_records(
    data: bytes, documents: Sequence[Document]
) -> tuple[dict[int, dict[int, DocumentRecord]], dict[str, Any]]:
    """What `pack_records` was given, of a corpus with these documents."""
    records: dict[int, dict[int, DocumentRecord]] = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        counts: dict[str, Any] = json.loads(arrays["counts"].tobytes())
        for name in arrays.files:
            number, _, kind = name.partition(".")
            if kind == "documents":
                figures, flags = arrays[f"{number}.figures"], arrays[f"{number}.flags"]
                records[int(number)] = {
                    at: DocumentRecord(documents[at].domain, documents[at].name, *numbers, *truths)
                    for at, numbers, truths in zip(arrays[name].tolist(), figures, flags, strict=True)
                }
    return records, counts
