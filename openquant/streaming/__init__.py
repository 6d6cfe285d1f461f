"""Runs a checkpoint's model by transformers' classes, one layer at a time, in the memory that one layer takes.

A unit is the part of the model that is loaded at once: an embedding table, a decoder layer or the output head.

StreamedModel        a model on placeholders, made from config.json and the shards' headers; loads and frees units
ForwardPass          one forward pass through it
run_interleaved      runs forward passes unit by unit, and reads every weight once
ModuleHooks          observes or replaces the inputs of layers
OffloadFile          a file for hidden states that do not fit into memory
PassCheckpoint       a file that forward passes are saved to, so that a stopped run continues
ShardProvider        downloads or finds the shards that a unit needs
products_in_float32  fast products of bfloat16 matrices on CPUs without instructions for them

streamed = StreamedModel(open_checkpoint(path))
run_interleaved([[ForwardPass(streamed, lambda: streamed.model(input_ids=ids, use_cache=False).logits)]], finished=show)
"""
