"""The tables of docs/results.md: what each scheme and method costs on a model that somebody else trained.

    python benchmarks/real_models.py DIR
    python benchmarks/results.py DIR --work WORK

Each line of OUTPUTS is compressed into WORK, and all outputs are evaluated in one pass, on documents of articles, chats
and code that no calibration reads. Those of ANSWERED also answer questions of TASKS. What WORK has already is not made
again. Two hours on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

# By name of the output: what `openquant compress` is given. Those that read texts are also given TEXTS.
OUTPUTS = {
    "int8-weights": "--scheme int8-weights",
    "channel": "--scheme channel",
    "tensor": "--scheme tensor",
    "static": "--scheme tensor --activation-scheme static --calibrate",
    "mxfp8": "--scheme mxfp8",
    "int8": "--scheme int8",
    "int8-smooth": "--scheme int8 --smooth 0.5",
    "int6": "--scheme int6",
    "int5": "--scheme int5",
    "nvfp4": "--scheme nvfp4",
    "nvfp4-gptq": "--scheme nvfp4 --gptq",
    "nvfp4-w4a4": "--scheme nvfp4-w4a4",
    "mxfp4": "--scheme mxfp4",
    "int4": "--scheme int4",
    "int4-g64": "--scheme int4 --group-size 64",
    "int4-g32": "--scheme int4 --group-size 32",
    "int4-asym": "--scheme int4 --asymmetric",
    "int4-gptq": "--scheme int4 --gptq",
    "int4-awq": "--scheme int4 --awq",
    "int4-awq-gptq": "--scheme int4 --awq --gptq",
}
ANSWERED = ("int8-weights", "channel", "nvfp4-gptq", "nvfp4", "int4")
TASKS = ("general_knowledge", "social_iqa", "strategyqa", "winowhy")
READS_TEXTS = ("--calibrate", "--smooth", "--gptq", "--awq")
TEXTS = ("articles", "chats", "code")


def main() -> None:
    """Make what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what real_models.py fetched")
    parser.add_argument("--work", type=Path, required=True, help="where outputs and eval.json are kept")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--limit", type=int, default=70, help="questions of each task")
    options = parser.parse_args()
    source = options.directory / "smollm2-135m"
    texts = [part for name in TEXTS for part in ("--text", str(options.directory / "texts" / f"{name}.jsonl"))]
    options.work.mkdir(parents=True, exist_ok=True)
    for name, given in OUTPUTS.items():
        output = options.work / name
        if not (output / "config.json").exists():
            read = texts if any(option in given for option in READS_TEXTS) else []
            run("compress", "-m", str(source), "-o", str(output), "-q", *shlex.split(given), *read)
    (options.work / "prompts.txt").write_text("The capital of France is\n")
    results = options.work / "eval.json"
    if not results.exists():
        outputs = [str(options.work / name) for name in OUTPUTS]
        size = ["--samples", str(options.samples), "--length", str(options.length)]
        asked = [*size, "--prompts", str(options.work / "prompts.txt"), "--out", str(results)]
        asked += ["--figure", str(options.work / "results.png")]
        run("eval", *outputs, "--source", str(source), *texts, *asked)
    print_table(json.loads(results.read_text()))
    answers = options.work / "tasks.json"
    if not answers.exists():
        tasks = ",".join(str(options.directory / "tasks" / f"{name}.json") for name in TASKS)
        outputs = [str(options.work / name) for name in ANSWERED]
        size = ["--samples", "3", "--length", "64", "--prompts", str(options.work / "prompts.txt")]
        asked = ["--tasks", tasks, "--limit", str(options.limit), *size, "--out", str(answers)]
        run("eval", *outputs, "--source", str(source), *texts, *asked)
    print_tasks(json.loads(answers.read_text()))


def run(*arguments: str) -> None:
    """Run a command of openquant."""
    subprocess.run([sys.executable, "-m", "openquant", *arguments], check=True)


def print_table(evaluation: dict[str, Any]) -> None:
    """Print the figures of an evaluation, in order of KL, as Markdown."""
    print("| `openquant compress` | size | KL, nats | weights alone | same token | perplexity | verdict |")
    print("|---|---|---|---|---|---|---|")
    for output in sorted(evaluation["outputs"], key=lambda output: float(output["kl"]["mean"])):
        low, high = output["kl"]["interval"]
        print(
            f"| `{OUTPUTS[output['output']['name']]}` | {output['sizes']['output'] / 1e6:.0f} MB "
            f"| {output['kl']['mean']:.4f} [{low:.4f}, {high:.4f}] | {output['weights_only']['kl']:.4f} "
            f"| {100 * output['top1']:.1f} % | {output['perplexity']['ratio']:.3f} | {output['verdict']} |"
        )
    first, floor = evaluation["outputs"][0], evaluation["floor"]
    print(
        f"\nSource: {first['sizes']['source'] / 1e6:.0f} MB, perplexity {first['perplexity']['source']:.2f}. "
        f"Floor: {floor['kl']:.4f} nats, {100 * floor['top1']:.1f} % same token. "
        f"{first['text']['positions']:,} positions of {first['text']['documents']} documents, "
        f"SHA-256 {first['text']['sha256'][:16]}."
    )


def print_tasks(evaluation: dict[str, Any]) -> None:
    """Print the figures of questions, in order of the share that is answered otherwise, as Markdown."""
    print("\n| `openquant compress` | accuracy | difference | recovery | otherwise | right to wrong, wrong to right |")
    print("|---|---|---|---|---|---|")
    outputs = sorted(evaluation["outputs"], key=lambda output: float(output["tasks"]["pooled"]["answered_otherwise"]))
    for output in outputs:
        pooled = output["tasks"]["pooled"]
        [metric] = pooled["metrics"]
        accuracy, difference = (f"{100 * metric[key]:.1f} %" for key in ("output", "difference"))
        # A source without a right answer has none.
        recovery = "-" if metric["recovery"] is None else f"{100 * metric['recovery']:.1f} %"
        interval = ", ".join(f"{100 * edge:+.1f}" for edge in metric["difference_interval"])
        print(
            f"| `{OUTPUTS[output['output']['name']]}` | {accuracy} | {difference} [{interval}] | {recovery} "
            f"| {100 * pooled['answered_otherwise']:.1f} % | {metric['lost']}, {metric['gained']} |"
        )
    tasks = outputs[0]["tasks"]
    source = tasks["pooled"]["metrics"][0]["source"]
    print(f"\nSource: {100 * source:.1f} % of {tasks['questions']} questions, {tasks['tokens']:,} tokens.")


if __name__ == "__main__":
    main()
