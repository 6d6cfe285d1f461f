"""A vLLM plugin with a kernel for weights in words, for which vLLM's CPU build has none: of 4 bits on a CPU without
AVX-512, of 2, 3 and 5 to 8 bits nowhere, of embeddings nowhere (vLLM's is written in Triton).

With this directory on PYTHONPATH, vLLM finds it by its entry point. Plain torch multiplies by the weights that words and
scales stand for: names, shapes, the order in words and scales are tested, no kernel of a GPU is.

On a CPU without VNNI, oneDNN's products of INT8 codes are off by 1.7 % of their norm (measured with vLLM 0.32.0 on an
AMD EPYC with AVX2 only; its sums of two products must fit 16 bits there). Plain torch multiplies the codes there, which
vLLM's own operator has made of the activations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional
from torch import Tensor


def register() -> None:
    """Add the kernel before those that vLLM has, and exact products where the CPU has none; a second call changes nothing."""
    import vllm._custom_ops
    import vllm.model_executor.kernels.linear as linear
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding as embedding
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum
    from vllm.scalar_type import scalar_types

    known = linear._POSSIBLE_KERNELS.get(PlatformEnum.CPU, [])
    if not current_platform.is_cpu() or any(kernel.__name__ == "WordsKernel" for kernel in known):
        return

    # The number of bits, and whether there are zero points.
    bits = {scalar_types.uint8b128: (8, False)}
    for number in (2, 3, 5, 6, 7):
        symmetric = getattr(scalar_types, f"uint{number}b{2 ** (number - 1)}")
        bits |= {symmetric: (number, False), getattr(scalar_types, f"uint{number}"): (number, True)}
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        bits |= {scalar_types.uint4b8: (4, False), scalar_types.uint4: (4, True)}

    class WordsKernel(MPLinearKernel):
        """One scale for each row or for groups of its inputs."""

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            fits = config.weight_type in bits and bits[config.weight_type][1] == config.zero_points
            return (
                fits,
                None if fits else "only symmetric weights of 8 bits, of 4 where vLLM's kernel is missing, or of others",
            )

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            words, scale, zeros = self._get_weight_params(layer)
            number, shifted = bits[self.config.weight_type]
            # AutoAWQ and GPTQ have them in columns.
            if words.input_dim == 0:
                words, scale = words.T, scale.T
            layer.decoded = decoded(words.data, scale.data, number, zeros.data if shifted else None)

        def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.decoded, bias)

    known.insert(0, WordsKernel)
    embedding._dequant_gather_triton = looked_up
    if not torch.cpu._is_vnni_supported():
        vllm._custom_ops.create_onednn_scaled_mm = Codes
        vllm._custom_ops.onednn_scaled_mm = multiplied


def decoded(words: Tensor, scale: Tensor, bits: int, zeros: Tensor | None) -> Tensor:
    """Weights [out, in] in the dtype of their scales [out, groups]: several in a word, the first lowest, each half of its
    range above its value, or its zero point above it. Of these words [out * bits / 32, groups] hold those of several rows.
    """
    grouped = unpacked(words, bits).float().unflatten(1, (scale.shape[1], -1))
    zero = 2 ** (bits - 1) if zeros is None else unpacked(zeros.T, bits).T.float().unsqueeze(2)
    return ((grouped - zero) * scale.float().unsqueeze(2)).flatten(1).to(scale.dtype)


def looked_up(ids: Tensor, words: Tensor, scale: Tensor, hidden: int, bits: int) -> Tensor:
    """Rows [ids, hidden] of an embedding's words [vocabulary, hidden * bits / 32]."""
    return decoded(words[ids], scale[ids], bits, None)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes of words [rows, cols], of each row one after the other, without gaps: some lie in two words."""
    single = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    codes = single.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits, dtype=torch.int32)
    return codes.sum(-1, dtype=torch.int32)


class Codes:
    """What vLLM's handler of a layer holds: int8 codes [in, out] with float32 scales [out, 1]."""

    def __init__(self, weight: Tensor, scales: Tensor, *options: Any) -> None:
        _output_dtype, _dynamic, zero_points, *_ = options
        if zero_points:
            raise NotImplementedError("activations with zero points")
        self.n = weight.shape[1]
        self.codes, self.scales = weight.float(), scales.float().flatten()


def multiplied(
    codes: Codes, x: Tensor, output: Tensor, scale: Tensor, zero: None, adjusted: Any, bias: Tensor | None
) -> Tensor:
    """int8 activations [tokens, in] times a layer's weights. float32 holds sums of up to 1,040 products exactly."""
    product = (x.float() @ codes.codes) * scale.float().reshape(-1, 1) * codes.scales
    return output.copy_(product if bias is None else product + bias.float())
