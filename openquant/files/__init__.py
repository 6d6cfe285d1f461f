"""Bytes on disk: safetensors files, model directories, the output. Nothing here knows of number formats or models.

TensorInfo       name, dtype and shape of a tensor, as a safetensors header has them
Location         the shard and the offset at which its bytes are
Checkpoint       a model directory, opened: config, tensors, where they lie, other files
SourceFile       a shard read at offsets; ShardFile one being written so
Claim            the claim of a run on its output directory: its lock, its journal, what is finished there
OutputDirectory  that directory, held open: how a file gets its final name
LayerStore    layers that were rounded before, beside it until it is finished

checkpoint = open_checkpoint(Path("Qwen3-8B"))
info = checkpoint.tensors["lm_head.weight"]          # TensorInfo("lm_head.weight", "BF16", (151936, 4096))
place = checkpoint.where[info.name]                  # Location("model-00005-of-00005.safetensors", 1256)
with SourceFile(checkpoint.root / place.shard, place.shard) as file:
    file.read(into, place.offset, info.name)         # fills a buffer, or a SourceError that names the tensor
"""
