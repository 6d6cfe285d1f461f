"""Products of bfloat16 in float32: none is left to torch's slow ones, and results are those of float32, rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from openquant.files.checkpoint import open_checkpoint
from openquant.streaming import model as products
from openquant.streaming.model import Float32Products, StreamedModel, products_in_float32
from support.conversions import Shelf

MULTIPLY = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "linear", "matmul", "attention")
IDS = torch.randint(10, 500, (2, 40), generator=torch.Generator().manual_seed(0))


class Watched(TorchDispatchMode):
    """Notes the products that torch computes, and in what."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in MULTIPLY or name.endswith("attention"):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def test_a_model_computes_all_products_in_float32(shelf: Shelf) -> None:
    for architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"):
        source = open_checkpoint(shelf.source(architecture))
        with StreamedModel(source, dtype=torch.float32).resident() as model:
            exact = model(input_ids=IDS, use_cache=False).logits
        with StreamedModel(source, dtype=torch.bfloat16).resident() as model, Watched() as watched:
            plain = model(input_ids=IDS, use_cache=False).logits
            assert torch.bfloat16 in watched.dtypes
            watched.dtypes.clear()
            with Float32Products():
                found = model(input_ids=IDS, use_cache=False).logits
            assert watched.dtypes == {torch.float32}, architecture
        assert found.dtype is torch.bfloat16
        assert (found - exact).norm() < 1.2 * (plain - exact).norm(), architecture


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, w: functional.linear(x, w),
    "with bias": lambda x, w: functional.linear(x, w, bias=w[:, 0]),
    "@": lambda x, w: x @ w.T,
    "matmul": lambda x, w: x.matmul(w.T),
    "bmm": lambda x, w: torch.bmm(x[None], w.T[None]),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x, w.T),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None], w[None], w[None]),
}


def test_results_are_those_of_float32_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(5, 48), random(64, 48)
    for name, product in PRODUCTS.items():
        with Float32Products(), monkeypatch.context() as patch:
            found = product(x, weight)
            patch.setattr(products, "PIECE", 48 * 24)
            torch.testing.assert_close(product(x, weight), found, rtol=2**-7, atol=1e-6)
        assert torch.equal(found, product(x.float(), weight.float()).bfloat16()), name


def test_few_tokens_are_left_to_torch() -> None:
    weight = random(64, 48)
    with Float32Products(), Watched() as watched:
        for tokens, dtype in ((1, torch.bfloat16), (3, torch.bfloat16), (4, torch.float32)):
            watched.dtypes.clear()
            x = random(1, tokens, 48)
            found = functional.linear(x, weight)
            assert watched.dtypes == {dtype}
            torch.testing.assert_close(found, (x.float() @ weight.float().T).bfloat16(), rtol=2**-7, atol=1e-6)


def test_experts_take_the_rows_up_to_their_offsets() -> None:
    x, weight, offsets = random(7, 48), random(4, 48, 32), torch.tensor([3, 3, 5, 7], dtype=torch.int32)
    with Float32Products():
        found = functional.grouped_mm(x, weight, offs=offsets)
    expected = [
        x[low:high].float() @ weight[at].float() for at, (low, high) in enumerate([(0, 3), (3, 3), (3, 5), (5, 7)])
    ]
    assert torch.equal(found, torch.cat(expected).bfloat16())


def test_only_processors_without_such_products_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for multiplies, device, expected in ((False, "cpu", True), (True, "cpu", False), (False, "cuda", False)):
        monkeypatch.setattr(products, "_multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        assert isinstance(products_in_float32(device), Float32Products) is expected
