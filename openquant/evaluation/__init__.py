"""Compares quantized models with their source: KL divergence of the logits, answers, and a verdict.

run                  evaluate(): opens source and outputs, compares them, writes eval.json
compare              runs source, noise floor and outputs unit by unit over the same texts
kl                   KL divergence and other figures at each position of a document, and their means and intervals
as_served            an output as engines serve it: decoded weights, rounded activations, FP8 KV cache; greedy
                     continuations of prompts by source and output, and where they differ
task_passes          multiple-choice questions as token ids, run among the texts; what eval.json has of tasks:
                     accuracies, intervals, paired tests
verdict              the word of the verdict, and the layers that stand out
results              eval.json; what is measured so far, of several ranks or for a run that continues an interrupted
                     one; the checkpoints that are compared

evaluation = evaluate("Qwen3-8B-FP8", "Qwen/Qwen3-8B")
evaluation.outputs[0]["kl"]["mean"]      # 0.0031
"""
