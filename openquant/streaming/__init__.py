"""A checkpoint's model run one layer at a time, by transformers' classes, in the memory that one layer takes.

StreamedModel  a model without weights, made from a config and the headers of shards; loads and frees one unit at a time
ForwardPass           a forward pass of texts through it, and what comes of it
run_interleaved            takes Passes through models side by side, reading every weight once
ShardProvider        how shards that lie elsewhere come before the units that need them
products_in_float32    products of bfloat16 weights, for CPUs that have none

streamed = StreamedModel(open_checkpoint(path))
run_interleaved([[ForwardPass(streamed, lambda: streamed.model(input_ids=ids, use_cache=False).logits)]], finished=show)
"""
