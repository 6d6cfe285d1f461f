"""Bytes on disk: safetensors files, model directories, the output. This room knows no number format and no model.

checkpoint                  opens a model directory: config, tensors, where they lie, other files; what identifies it: a
                            digest of all bytes, and a stamp that is cheap to compare
shardfile                   a safetensors header: name, dtype and shape of each tensor (TensorInfo), and where its
                            bytes lie (Location). Reads shards at offsets, and writes them; the write that completes
                            a shard publishes it. Layers that GPTQ has quantized, until the conversion
                            copies them
output                      one run's claim on its output directory: the lock and the journal. A run that was killed is
                            resumed: its finished shards are known by their final names and sizes
destination                 where other files may go, and which they replace; whole or not at all; room on disk;
                            `.openquant.json`, which records how an output was made
cards                       eval.json and README.md, read with distrust
model_files                 configs and indexes; names of files, and which belong to a model

checkpoint = open_checkpoint(Path("Qwen3-8B"))
info = checkpoint.tensors["lm_head.weight"]          # TensorInfo("lm_head.weight", "BF16", (151936, 4096))
location = checkpoint.where[info.name]                  # Location("model-00005-of-00005.safetensors", 1256)
with SourceFile(checkpoint.root / location.shard, location.shard) as file:
    file.read(into, location.offset, info.name)         # fills a buffer, or raises a SourceError with the name
"""
