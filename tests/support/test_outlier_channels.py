"""The twin with outliers is the model it is made of."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from conftest import EXAMPLE
from support import small_checkpoints
from support.outlier_channels import twin


def test_a_twin_answers_alike(tmp_path: Path) -> None:
    ids = torch.randint(10, 2000, (1, 48), generator=torch.Generator().manual_seed(0))
    root = twin(EXAMPLE, tmp_path / "twin")
    found = []
    for path in (EXAMPLE, root):
        with torch.inference_mode():
            found.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids, use_cache=False).logits)
    assert (found[0] - found[1]).abs().max() < 1e-3 * found[0].abs().max()
    changed = {
        name
        for name, tensor in small_checkpoints.read(root).items()
        if not torch.equal(tensor, small_checkpoints.read(EXAMPLE)[name])
    }
    # Two norms and all seven matrices of each layer.
    assert len(changed) == 4 * 9
