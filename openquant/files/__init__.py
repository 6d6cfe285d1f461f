"""Bytes on disk: safetensors files, model directories, the output. This room knows no number format and no model.

TensorInfo       name, dtype and shape of a tensor, as a safetensors header has them
Location         shard and offset of a tensor's bytes
Checkpoint       an opened model directory: config, tensors, where they lie, other files
SourceFile       a shard that is read at offsets; ShardFile is one that is written at offsets
Claim            one run's claim on its output directory: the lock, the journal, what is finished
OutputDirectory  the output directory, held open; gives files their final names
LayerStore       layers that GPTQ has quantized, stored beside the output until the conversion

checkpoint = open_checkpoint(Path("Qwen3-8B"))
info = checkpoint.tensors["lm_head.weight"]          # TensorInfo("lm_head.weight", "BF16", (151936, 4096))
location = checkpoint.where[info.name]                  # Location("model-00005-of-00005.safetensors", 1256)
with SourceFile(checkpoint.root / location.shard, location.shard) as file:
    file.read(into, location.offset, info.name)         # fills a buffer, or raises a SourceError with the name
"""
