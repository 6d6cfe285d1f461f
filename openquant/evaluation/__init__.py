"""Compares quantized models with their source: KL divergence of the logits, weights, answers, and a verdict.

evaluate           the verb: opens source and outputs, compares them, writes eval.json
compare_outputs    runs source and outputs layer by layer over the same texts
DocumentRecord     KL divergence and other figures at each position of a document; summarize makes eval.json's figures
RoundingNoise      the noise floor: the source again, with bfloat16 rounding noise
ServedModel        an output as engines serve it: decoded weights, rounded activations, FP8 KV cache
WeightChange       how one weight differs from the source's, and how much of that its format explains
verdict_word       "same", "close", "changed" or "broken"

evaluation = evaluate("Qwen3-8B-FP8", "Qwen/Qwen3-8B")
evaluation.outputs[0]["kl"]["mean"]      # 0.0031
"""
