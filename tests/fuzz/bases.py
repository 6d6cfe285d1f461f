"""Sound directories to begin with: small models of several kinds, quantized ones, and our outputs of some of them."""

from __future__ import annotations

from pathlib import Path

from cases import Base
from openquant import compress
from support import small_checkpoints
from support.mixed_precision import mixed_precision
from support.quantized_checkpoints import (
    SOURCES,
    asymmetric,
    asymmetric_config,
    awq,
    awq_config,
    gptq,
    gptq_config,
    store,
)

CARD = "---\nlicense: apache-2.0\ntags: [a, b]\nlanguage:\n- en\n---\n# A model\n"
PLAIN = [
    ("Qwen3ForCausalLM", 3, "bfloat16"),
    ("LlamaForCausalLM", 1, "float16"),
    ("Qwen3MoeForCausalLM", 2, "bfloat16"),
    ("Gemma3ForConditionalGeneration", 2, "float32"),
    ("Llama4ForCausalLM", 2, "bfloat16"),
]
OUTPUTS = [
    ("Qwen3ForCausalLM", {"scheme": "tensor"}),
    ("Qwen3ForCausalLM", {"scheme": "block"}),
    ("Qwen3MoeForCausalLM", {"scheme": "block", "format": "compressed-tensors"}),
    ("Llama4ForCausalLM", {"scheme": "channel"}),
    ("LlamaForCausalLM", {"scheme": "mxfp8"}),
    ("Qwen3ForCausalLM", {"scheme": "int4", "asymmetric": True}),
    ("Qwen3ForCausalLM", {"scheme": "nvfp4-w4a4"}),
]


def make(root: Path) -> list[Base]:
    """All of them, below a directory."""
    sources = {}
    for architecture, shards, dtype in PLAIN:
        source = small_checkpoints.write(root / architecture, architecture, shards=shards, dtype=dtype, vocab=128)
        (source / "README.md").write_text(CARD)
        (source / "tokenizer.json").write_text("{}")
        sources[architecture] = source
    quantized = [store(root / f"stored-{n}", make, config) for n, (make, config, _) in enumerate(SOURCES.values())]
    more = [(asymmetric(), asymmetric_config()), (awq(), awq_config()), (gptq(act=True), gptq_config(act=True))]
    quantized += [store(root / f"stored-more-{n}", make, config) for n, (make, config) in enumerate(more)]
    quantized.append(mixed_precision(root / "mixed-precision"))
    outputs = []
    for number, (architecture, options) in enumerate(OUTPUTS):
        output = root / f"output-{number}"
        compress(sources[architecture], output, **options)
        outputs.append(Base(output, sources[architecture]))
    compress(quantized[-1], root / "kept", "keep")
    outputs.append(Base(root / "kept", quantized[-1]))
    return [*map(Base, sources.values()), *outputs, *outputs, *map(Base, quantized)]
