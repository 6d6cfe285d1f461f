"""Hessians of experts: over the tokens that are routed to each, however transformers computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from openquant.calibration.gptq_pass import (
    MOE_TOKENS,
    Hessian,
    HessianObserver,
    LayerHessians,
    find_hessians,
    round_layers,
)
from openquant.data.corpus import Corpus, Document
from openquant.files.checkpoint import Checkpoint, open_checkpoint
from openquant.files.shardfile import LayerStore
from openquant.formats import compiled, kernels
from openquant.models import MODELS
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import Plan, make_plan
from openquant.streaming.interleaved import ForwardPass, TextRun, holds_experts, run_interleaved
from openquant.streaming.model import StreamedModel, products_in_float32
from support import small_checkpoints
from support.conversions import Shelf
from support.representatives import representatives

IDS = [tuple((7 * at * at + 31 * number) % 500 for at in range(60)) for number in range(2)]
CORPUS = Corpus(tuple(Document("some", f"some {at}", each) for at, each in enumerate(IDS)), "", {})
MOE = [name for name in small_checkpoints.RUNNABLE if MODELS[name].experts and not name.startswith("Llama4")]


def planned(root: Path, name: str) -> tuple[Checkpoint, Plan]:
    scheme = small_checkpoints.served_in(name, "int8-weights", "channel", "tensor", "mxfp8", "block")
    checkpoint = open_checkpoint(root)
    return checkpoint, make_plan(checkpoint, scheme, PlanOptions(gptq=CORPUS.account))


def summed(root: Path, name: str) -> dict[str, LayerHessians]:
    """All Hessians of a plan, accumulated in one pass."""
    checkpoint, plan = planned(root, name)
    model = StreamedModel(checkpoint)
    units = find_hessians(model, plan)
    for hessian in (hessian for unit in units.values() for hessian in (*unit.hessians, *unit.moe_hessians)):
        hessian.accumulating = True
    observer = HessianObserver(model.model, units.values())

    @contextmanager
    def around() -> Iterator[None]:
        with products_in_float32(), observer.on():
            yield

    bodies = [partial(_through, model, torch.tensor([ids])) for ids in IDS]
    run_interleaved([[ForwardPass(model, body, around)] for body in bodies], finished=lambda *_: None)
    return units


def _through(model: StreamedModel, ids: Tensor) -> None:
    model.model(input_ids=ids, use_cache=False)


def alone(root: Path) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """What goes into gate and up and into down of each expert, by module and number: each is called with the tokens
    that come to it, and no other."""
    streamed = StreamedModel(open_checkpoint(root))
    calls: dict[str, list[tuple[Any, ...]]] = {}
    with streamed.resident() as model, products_in_float32():
        stacks = {name: module for name, module in model.named_modules() if holds_experts(module)}

        def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, []).append((*args, *kwargs.values()))

        hooks = [
            module.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, module in stacks.items()
        ]
        for ids in IDS:
            _through(streamed, torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        found = {}
        # A text is sent to none of the experts of images that one architecture has.
        for name, module in ((name, stacks[name]) for name in calls):
            for expert in range(len(module.down_proj)):
                first, down = zip(*(_of_one(module, expert, *call) for call in calls[name]), strict=True)
                found[name, expert] = torch.cat(first), torch.cat(down)
    return found


def _of_one(module: Any, expert: int, states: Tensor, chosen: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    states = states.reshape(-1, states.shape[-1])
    own = states[(chosen.reshape(len(states), -1) == expert).any(-1)]
    seen: list[Tensor] = []
    kind = "_apply_gate" if module.has_gate else "act_fn"
    original: Callable[..., Tensor] = getattr(module, kind)
    module.__dict__[kind] = lambda *args: seen.append(original(*args)) or seen[-1]
    module(own, torch.full((len(own), 1), expert), torch.ones(len(own), 1, dtype=own.dtype))
    del module.__dict__[kind]
    return own, torch.cat(seen) if seen else own.new_zeros(0, 1)


def test_each_expert_has_the_hessian_of_its_tokens(shelf: Shelf, subtests: pytest.Subtests) -> None:
    for name in representatives(MOE):
        with subtests.test(name):
            root = shelf.source(name)
            units, expected = summed(root, name), alone(root)
            counted = 0
            for place, both in ((place, both) for unit in units.values() for place, both in unit.experts.items()):
                assert both.first is not None
                assert both.down is not None
                for stack, at in ((both.first, 0), (both.down, 1)):
                    for expert, hessian in stack.by_expert.items():
                        if (place, expert) not in expected:  # of images
                            assert hessian.tokens == 0
                            continue
                        inputs = expected[place, expert][at].double()
                        assert hessian.tokens == len(inputs)
                        counted += bool(len(inputs))
                        if hessian.waiting:
                            hessian.add_waiting_rows()
                        if hessian.upper is not None:
                            off = hessian.upper.double() - (inputs.T @ inputs).triu()
                            # Rounded to bfloat16 after sums in another order.
                            assert off.triu().norm() <= 0.02 * (inputs.T @ inputs).triu().norm()
                assert both.first.moe_hessian is not None
                assert both.first.moe_hessian.tokens == sum(map(len, IDS))
            # One small model has none.
            assert counted or not expected


def test_experts_without_tokens_have_the_hessian_of_the_moe_layer() -> None:
    moe_hessian = Hessian(4, accumulating=True)
    few, none = (Hessian(4, moe_hessian=moe_hessian, accumulating=True) for _ in range(2))
    values = torch.randn(40, 4)
    moe_hessian.add(values)
    few.add(values[:3])
    layer = values.T @ values * MOE_TOKENS / 40
    assert torch.allclose(none.pop_matrix(), layer, rtol=1e-4)
    assert torch.allclose(few.pop_matrix(), layer + values[:3].T @ values[:3], rtol=1e-4)
    assert Hessian(4).pop_matrix().tolist() == torch.zeros(4, 4).tolist()
    # A Hessian that is not accumulating belongs to another part.
    few.add(values)
    assert few.upper is None


def test_inputs_that_wait_are_not_those_of_the_model() -> None:
    """Float32 ones are not copied by conversion, and a unit's are resized where they go to a file."""
    hessian = Hessian(4, accumulating=True)
    inputs = torch.ones(3, 4)
    hessian.add(inputs)
    inputs.zero_()
    assert hessian.pop_matrix().tolist() == torch.full((4, 4), 3.0).tolist()


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Llama4ForCausalLM"])
def test_layers_in_parts_are_rounded_as_in_one(shelf: Shelf, tmp_path: Path, name: str) -> None:
    checkpoint, plan = planned(shelf.source(name), name)
    made: list[dict[str, bytes]] = []
    for max_bytes, loops in ((1 << 30, kernels), (300_000, compiled)):
        folder = LayerStore(tmp_path / str(max_bytes), "0" * 64)
        folder.claim()
        model = StreamedModel(checkpoint)
        computed = Mock(return_value=None)
        model.model.get_submodule("model.layers.1.self_attn").register_forward_pre_hook(computed)
        with patch.object(loops, "round_panel", wraps=loops.round_panel) as round_panel:
            round_layers(TextRun(model, CORPUS), plan, folder, loops, max_bytes)
        places = folder.places()
        assert round_panel.called
        # Texts run through it once, however many parts there are.
        assert computed.call_count == len(CORPUS.documents)
        files = {place.path.name for place in places.values()}
        assert any(not file.endswith("-0.safetensors") for file in files) == (max_bytes < 1 << 30)
        sizes = {info.name: info.nbytes for hessian in _all(checkpoint, plan) for info in hessian.output_tensors}
        made.append({tensor: _bytes(*place, sizes[tensor]) for tensor, place in places.items()})
        # Read again, they are the same.
        round_layers(TextRun(StreamedModel(checkpoint), CORPUS), plan, folder, kernels, max_bytes)
        assert folder.places() == places
    assert made[0] == made[1]


def _all(checkpoint: Checkpoint, plan: Plan) -> list[Hessian]:
    return [hessian for unit in find_hessians(StreamedModel(checkpoint), plan).values() for hessian in unit.hessians]


def _bytes(path: Path, offset: int, size: int) -> bytes:
    return path.read_bytes()[offset : offset + size]
