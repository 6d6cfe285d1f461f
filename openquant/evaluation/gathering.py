"""Serializes the figures that a process computed of its documents, for the first process to combine.

Arrays are stored in numpy's format, never pickled, and counts as JSON.

    data = pack_records(records, counts)            # of this process's documents
    records, counts = unpack_records(data, documents)
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..data.corpus import Document
from .kl import DocumentRecord

# Fields of a DocumentRecord that are float64, and those that are bool.
_FIGURES = ("kl", "confidence", "source_nll", "output_nll")
_FLAGS = ("top1", "top5")

# Records by pass number, then by document number.
Records = Mapping[int, Mapping[int, DocumentRecord]]


def pack_records(records: Records, counts: Mapping[str, Any]) -> bytes:
    """Serialize the figures of documents, and counts, for another process.

    Args:
        records: by number of the pass through a model, then by the document's index in the corpus: KL divergence,
            probabilities and token agreement at each position but the last, float64 or bool [length - 1]. All documents
            have the same length.
        counts: anything that JSON can hold, such as `Measurements.counts()`.

    Returns:
        The bytes of a npz file, for `unpack_records`.
    """
    arrays = {"counts": np.frombuffer(json.dumps(counts).encode(), np.uint8)}
    for number, by_document in records.items():
        arrays[f"{number}.documents"] = np.array(list(by_document), np.int64)
        for kind, columns in (("figures", _FIGURES), ("flags", _FLAGS)):
            arrays[f"{number}.{kind}"] = np.array(
                [[getattr(record, column) for column in columns] for record in by_document.values()]
            )
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpack_records(
    data: bytes, documents: Sequence[Document]
) -> tuple[dict[int, dict[int, DocumentRecord]], dict[str, Any]]:
    """Read what `pack_records` wrote.

    Args:
        data: bytes of a npz file from `pack_records`.
        documents: all documents of the corpus; records get their domain and name from it.

    Returns:
        The records by number of the pass, then by the document's index in `documents`; and the counts. A record has
        arrays [length - 1], float64 or bool, with a figure of each position but the last.
    """
    records: dict[int, dict[int, DocumentRecord]] = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        counts: dict[str, Any] = json.loads(arrays["counts"].tobytes())
        for name in arrays.files:
            number, _, kind = name.partition(".")
            if kind == "documents":
                figures, flags = arrays[f"{number}.figures"], arrays[f"{number}.flags"]
                records[int(number)] = {
                    at: DocumentRecord(documents[at].domain, documents[at].name, *figure_rows, *flag_rows)
                    for at, figure_rows, flag_rows in zip(arrays[name].tolist(), figures, flags, strict=True)
                }
    return records, counts
