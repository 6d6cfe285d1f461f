"""A checkpoint's model of which one unit's weights are in memory at a time; interleaved.py runs forward passes on it.

    streamed = StreamedModel(open_checkpoint(path))
    streamed.load("model.layers.0")
    streamed.free("model.layers.0")

How far passes are is counted in tokens, of which one that is through half of the layers counts half:

    progress = PassProgress(streamed.layers, tokens=16 * 512, advanced=advanced)
    run_interleaved(passes, progress=progress.layer_done, ...)

On CPUs without bfloat16 instructions torch takes eight times as long for bfloat16 as for float32, so matrices are
multiplied in float32 and the products rounded. CPUs with the instructions also sum in float32 and round, so results are
the same up to the order of sums. Threads are as many as there is work for:

    with products_in_float32(), limited_threads(streamed, tokens=512):
        model(input_ids=ids, use_cache=False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..convert.conversion import ShardProvider
from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..formats.reference import TORCH_DTYPES
from ..machine import available_cpus
from ..weights.find import decoded_view
from ..weights.weight import Weight
from . import transformers_internals
from .memory import compute_dtype
from .meta_model import REST, LazyTensors, MetaModel
from .session import LocalShards

# Bytes above which embeddings are looked up in pieces of LOOKUPS tokens, and the output head is multiplied in pieces of
# half as many bytes.
LARGE_TABLE = 1 << 26
LOOKUPS = 64


class StreamedModel(MetaModel):
    """A checkpoint's model, of which only the weights that are being computed with are in memory.

    Args:
        checkpoint: the checkpoint; quantized weights are decoded to bfloat16.
        dtype: the dtype it computes in; None for float32 if most of the checkpoint is, else bfloat16.
        device: the device it computes on, such as "cpu".

    Attributes:
        checkpoint: the checkpoint.
        scales: by unit, names of further tensors that are read with it, such as scales of inputs; none at first.
        shard_provider: provides the shards of each unit; by default from the checkpoint's directory. Set another
            before anything is loaded.
        quantized: the checkpoint's quantized weights, by module of `model`: "model.layers.0.mlp.up_proj". Stacked
            experts have the parameter's name, "model.layers.0.mlp.experts.gate_up_proj", and the first expert's weight.
        made_of: for each parameter, the tensors of the checkpoint that it is made of, by their unquantized names.
        head: the module that computes logits from hidden states; None if there is none.
        layers: names of the decoder layers, layers of vision towers included, in the order they are computed: the units
            without embedding tables and the output head.
        order: names of the units in the order they are probably called: REST, embedding tables, the others.

    Raises:
        SourceError: transformers has no such model, or refuses its config.json.
        PlanError: the checkpoint is quantized in a format that cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, device: str = "cpu") -> None:
        decoded, weights = decoded_view(checkpoint)
        self.checkpoint = checkpoint
        self.shard_provider: ShardProvider = LocalShards(checkpoint.root)
        self.scales: dict[str, list[str]] = {}
        tensors = LazyTensors(decoded, weights, lambda shard: self.shard_provider.path(shard))
        super().__init__(decoded, tensors, dtype or TORCH_DTYPES[compute_dtype(decoded)], device)

        # Found once: a large mixture has tens of thousands of modules.
        self.head = transformers_internals.output_head(self.model)
        self.layers = [
            unit
            for unit, module in self.units.items()
            if module is not self.head and not isinstance(module, nn.Embedding)
        ]
        self.order = (REST, *sorted(self.units, key=lambda unit: not isinstance(self.units[unit], nn.Embedding)))
        self.made_of: dict[str, tuple[str, ...]] = {}
        for tensor, target in self.targets.items():
            self.made_of[target] = (*self.made_of.get(target, ()), *tensors.pieces(tensor))
        self.quantized: Mapping[str, Weight] = {
            target.removesuffix(".weight"): weights[pieces[0]]
            for target, pieces in self.made_of.items()
            if pieces[0] in weights
        }

    def load(self, unit: str) -> None:
        """Load the weights of a unit, or with REST those outside of all units, once the shards of it are on disk.

        Raises:
            SourceError: a weight is missing, has the wrong shape, or cannot be read or downloaded.
            OutputError: shards cannot be written, or another rank has failed.
        """
        self.shard_provider.wait_for(unit, lambda: False)
        self.load_weights(unit)
        if unit == REST:
            self.shard_provider.release(unit)

    def free(self, unit: str) -> None:
        """Replace the weights of a unit, or of REST, by placeholders. Streamed shards of it may then be deleted."""
        super().free(unit)
        if unit != REST:
            self.shard_provider.release(unit)

    def shards_by_unit(self) -> dict[str, list[str]]:
        """Return file names of the shards that each unit and REST are loaded from, sorted."""
        found = {}
        for unit in self.order:
            shards = {self.checkpoint.where[name].shard for name in self.scales.get(unit, ())}
            found[unit] = sorted(shards | self.tensors.shards(self.needs[unit].tensors))
        return found

    def embed_in_pieces(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the input embedding's `forward`, with a few tokens at a time if its table is large.

        For each row that is read, the system reads up to a megabyte of the mapped file around it.

        Args:
            forward: the module's `forward`.
            args: its arguments: token ids [batch, tokens].
            kwargs: its keyword arguments.

        Returns:
            The embeddings [batch, tokens, hidden].

        Raises:
            SourceError: the table has no row for a token.
        """
        table = self.model.get_input_embeddings().weight
        ids = next(iter(args), kwargs.get("input"))
        if ids is not None and int(ids.max()) >= len(table):
            raise SourceError(
                f"a text has token {int(ids.max())}, and the input embedding {len(table)} rows",
                "copy the tokenizer's files from the model that it was made from",
            )

        if len(args) != 1 or kwargs or args[0].dim() != 2 or table.nbytes <= LARGE_TABLE:
            return forward(*args, **kwargs)
        embeddings = []
        for ids in args[0].split(max(1, LOOKUPS // args[0].shape[0]), dim=1):
            embeddings.append(forward(ids))
            self.release_pages()
        return torch.cat(embeddings, dim=1)

    def project_in_pieces(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the output head's `forward`, with some rows of its weight at a time if that is large.

        Multiplied at once, all of the mapped weight would come into memory: 1.2 GB for Qwen3-8B.

        Args:
            forward: the module's `forward`.
            args: its arguments: hidden states [..., hidden].
            kwargs: its keyword arguments.

        Returns:
            The logits [..., vocabulary].
        """
        head = self.head
        if not isinstance(head, nn.Linear) or getattr(forward, "__func__", None) is not nn.Linear.forward:
            return forward(*args, **kwargs)
        if len(args) != 1 or kwargs or self.device != "cpu" or head.weight.nbytes <= LARGE_TABLE:
            return forward(*args, **kwargs)

        logits = args[0].new_empty(*args[0].shape[:-1], len(head.weight))
        step = max(1, LARGE_TABLE // 2 // head.weight[0].nbytes)
        for low in range(0, len(head.weight), step):
            rows = slice(low, low + step)
            logits[..., rows] = functional.linear(
                args[0], head.weight[rows], None if head.bias is None else head.bias[rows]
            )
            self.release_pages()
        return logits

    def logits(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Compute the logits of a text; to be called inside of a ForwardPass.

        Args:
            ids: token ids, int64 [length], on the model's device.
            cache: KV cache of transformers, such as Fp8Cache; None for none.

        Returns:
            The logits [length, vocabulary] in the model's dtype, of the next token at each position.
        """
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            options[transformers_internals.cache_argument(self.model)] = cache
        text_logits: Tensor = self.model(input_ids=ids[None], **options).logits[0]
        return text_logits

    def release_pages(self) -> None:
        """Drop the pages of mapped weights from memory, such as while another model computes."""
        self.tensors.release_pages()

    @contextmanager
    def resident(self) -> Iterator[PreTrainedModel]:
        """Load all weights inside this context, in which the model is one like any other; for `generate`.

        Raises:
            SourceError: a weight is missing, has the wrong shape or cannot be read.
        """
        units = (REST, *self.units)
        try:
            for unit in units:
                self.load(unit)
            with transformers_internals.quiet_transformers(), torch.inference_mode():
                yield self.model
        finally:
            for unit in units:
                self.free(unit)


# Called with the number of tokens that are done and of all tokens.
Advanced = Callable[[int, int], None]


class PassProgress:
    """Counts the tokens of forward passes. A token that is through half of the layers counts half.

    Args:
        layers: names of the layers, in the order they are computed.
        tokens: the number of tokens of all texts, in all models.
        advanced: called whenever a batch is through a layer; None for no call.
        more: the number of tokens that are computed before or after, such as those of answers to prompts.
    """

    def __init__(self, layers: Sequence[str], tokens: int, advanced: Advanced | None, more: int = 0) -> None:
        self._left = list(layers)
        # The number of layers that text goes through; 0 before the first one.
        self._layers = 0
        self._tokens = tokens
        self._more = more
        self._more_done = 0
        self._advanced = advanced

    def layer_done(self, unit: str, done: int, batches: int) -> None:
        """Note that batches are through a unit; for `run_interleaved`'s `progress`.

        Args:
            unit: name of the unit.
            done: how many batches are through it.
            batches: the number of batches.
        """
        part = 0.0
        # Others are embedding tables, and layers that an earlier run computed.
        if unit in self._left:
            if not self._layers:
                # Layers of vision towers come before the first one that text goes through.
                self._left = self._left[self._left.index(unit) :]
                self._layers = len(self._left)
            if done == batches:
                self._left.remove(unit)
            else:
                part = done / batches
        self._report(part)

    def more_done(self, tokens: int) -> None:
        """Note that so many of the tokens before or after the layers are computed."""
        self._more_done += tokens
        self._report(0.0)

    def _report(self, part: float) -> None:
        """Say how far the passes are; part: the share that is done of a layer that is not."""
        if self._advanced is None:
            return
        done = self._layers - len(self._left) + part if self._layers else 0.0
        total = self._tokens + self._more
        self._advanced(min(int(self._tokens * done / max(1, self._layers)) + self._more_done, total), total)


# Weights that are converted to float32 at once: 2 MB. That is small beside a large layer, and little enough for malloc
# to reuse the memory for the next piece; the system would zero fresh memory first.
PIECE = 1 << 19
# Tokens for which torch's own bfloat16 is as fast: conversion takes as long for one token, as in answers, as for many.
FEW_TOKENS = 3


def products_in_float32(device: str = "cpu") -> AbstractContextManager[Any]:
    """Return a context manager in which this thread multiplies bfloat16 matrices in float32, if that is faster.

    Linear layers of at most FEW_TOKENS tokens stay in bfloat16: converting their weights takes longer.

    Args:
        device: the device that computes. Nothing changes on others than "cpu", and on CPUs with bfloat16 instructions.
    """
    if device != "cpu" or _multiplies_bfloat16():
        return nullcontext()
    return Float32Products()


def _multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 with oneDNN. Without that library it multiplies slowly."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


class Float32Products(TorchFunctionMode):
    """Computes matrix products and attention of bfloat16 tensors in float32 and rounds the results to bfloat16.

    Those of a Linear with at most FEW_TOKENS tokens are left to torch.
    """

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        product = _PRODUCTS.get(func)
        if product is not None and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bfloat16:
            return product(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _whole(func: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A product of activations only, which are small enough to be converted whole."""
    product: torch.Tensor = func(*map(_to_float32, args), **{name: _to_float32(kwargs[name]) for name in kwargs})
    return product.bfloat16()


def _linear(
    func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if x.numel() <= FEW_TOKENS * x.shape[-1]:
        product: torch.Tensor = func(x, weight, bias)
        return product
    x32 = x.float()
    if weight.numel() <= PIECE:
        return functional.linear(x32, weight.float(), _to_float32(bias)).bfloat16()
    product = x.new_empty(*x.shape[:-1], weight.shape[0])
    step = max(1, PIECE // weight.shape[1])
    for low in range(0, weight.shape[0], step):
        rows = slice(low, low + step)
        part = functional.linear(x32, weight[rows].float(), None if bias is None else bias[rows].float())
        product[..., rows] = part
    return product


def _multiply_groups(
    _func: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_other: Any
) -> torch.Tensor:
    """As torch._grouped_mm: rows of x up to each offset in `offs` [experts], times that expert's weight [in, out]."""
    product = x.new_zeros(x.shape[0], weight.shape[-1])
    low = 0
    for expert, high in enumerate(offs.tolist()):
        if high > low:
            product[low:high] = x[low:high].float() @ weight[expert].float()
        low = high
    return product


def _to_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        return value.float()
    return value


_PRODUCTS: Mapping[Callable[..., Any], Callable[..., torch.Tensor]] = {
    functional.linear: _linear,
    torch._grouped_mm: _multiply_groups,
    **dict.fromkeys(
        (
            functional.scaled_dot_product_attention,
            *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
            *(getattr(torch.Tensor, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__")),
        ),
        _whole,
    ),
}


# Multiplications of a layer below which one thread is faster: about ten milliseconds of one core. For layers of 200,000
# weights and 512 tokens, two threads took longer than one, and more processor time.
LEAST_PRODUCTS = 1 << 29


@contextmanager
def limited_threads(model: StreamedModel, tokens: int) -> Iterator[None]:
    """Let torch use as many threads inside this context as are fastest for a model.

    Args:
        model: the model.
        tokens: tokens of each text. With small layers it is one thread; else torch's number, at most the CPUs that this
            process may use.
    """
    layers = [model.units[unit] for unit in model.layers]
    largest = max((sum(weight.numel() for weight in layer.parameters()) for layer in layers), default=0)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if largest * tokens < LEAST_PRODUCTS else min(before, available_cpus()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
