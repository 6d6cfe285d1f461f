"""Compares quantized models with their source: KL divergence of the logits, weights, answers, and a verdict.

run                  evaluate(): opens source and outputs, compares them, writes eval.json
compare              runs source and outputs unit by unit over the same texts
kl                   KL divergence and other figures at each position of a document, and their means and intervals
noise_floor          the noise floor: the source again, with rounding noise of bfloat16
as_served            an output as engines serve it: decoded weights, rounded activations, FP8 KV cache
activation_rounding  rounds activations, keys and values as engines do
weight_changes       how one weight differs from the source's, and how much of that its format explains
generate, answers    greedy continuations of prompts by source and output, and where they differ
counters, gathering  distances of hidden states and routes of tokens; figures of several ranks put together
saved_measurements   what is measured so far, for a run that continues an interrupted one
task_requests        multiple-choice questions as token ids; `task_passes` runs them among the texts
task_statistics      intervals, paired tests; `task_results` makes what eval.json has of tasks
under_test           the checkpoints that are compared, with their settings
verdict_word         "same", "close", "similar", "changed" or "broken"; `verdict` finds the layers that stand out
results, types       eval.json, and the types of its keys

evaluation = evaluate("Qwen3-8B-FP8", "Qwen/Qwen3-8B")
evaluation.outputs[0]["kl"]["mean"]      # 0.0031
"""
