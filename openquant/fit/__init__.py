"""What fits a GPU: a table of schemes, and mixed precision under a size, by what the model answers.

| module | what it does |
|---|---|
| `table` | `openquant fit`: every scheme in one table, from headers alone |
| `budget` | reads `--fit` and `--gpu`: bits a weight, bytes, GPUs by memory or name, or a KL divergence |
| `menu` | units of layers that need one scheme, the schemes that may be chosen, the best mixtures of all sizes |
| `scores` | runs texts with one unit quantized at a time: the KL divergence that each choice costs |
| `session` | runs texts through the model, and keeps the scores |
| `run` | `compress --fit`: choice, check on other texts, its options; `fit --search`: mixtures of all sizes |

    openquant fit Qwen/Qwen3-32B --gpu 4090 --context 32k
    openquant fit Qwen/Qwen3-32B --gpu 4090 --search
    openquant compress -m Qwen/Qwen3-32B --fit 5.0bits
"""
