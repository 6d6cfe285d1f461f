"""Runs a checkpoint's model by transformers' classes, one layer at a time, in the memory that one layer takes.

A unit is the part of the model that is loaded at once: an embedding table, a decoder layer or the output head.

model                  a StreamedModel loads and frees the units of a model; how far passes are; products of bfloat16 on
                       CPUs without instructions for them
meta_model             the model without weights, from headers; tensors as transformers loads them, read or decoded when
                       they are indexed; stacks of experts
interleaved            runs forward passes unit by unit, and reads every weight once; hooks on the inputs of layers
packing                several questions in one sequence, each computed as if it were alone
offload                a file for hidden states that do not fit into memory
pass_checkpoint        a file that forward passes are saved to, so that a stopped run continues
session                a streamed run: shards as they arrive, a file for hidden states; tokenizer and documents of a run
memory                 memory that each step takes, known before
transformers_internals everything that is used of transformers beyond its documentation

streamed = StreamedModel(open_checkpoint(path))
run_interleaved([[ForwardPass(streamed, lambda: streamed.model(input_ids=ids, use_cache=False).logits)]], finished=show)
"""
