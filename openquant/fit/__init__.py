"""Mixed precision under a size: which layers get which scheme, by what the model answers.

| module | what it does |
|---|---|
| `budget` | reads `--fit`: bits a weight, bytes, GPUs, or a KL divergence |
| `units` | the groups of layers that need one scheme, and the size of each in every scheme |
| `rounding` | weights as a scheme rounds them, for a model that runs |
| `scores` | runs texts with one unit quantized at a time: the KL divergence that each choice costs |
| `allocation` | the best choice for each size, by dynamic programming |
| `run` | `compress --fit`: scores, choice, check on other texts, and the options that the choice stands for |

    openquant compress -m Qwen/Qwen3-32B --fit 5.0bits
"""
