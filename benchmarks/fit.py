"""The tables of docs/fit.md: mixtures that --fit chooses, beside others of the same bytes.

    python benchmarks/real_models.py DIR
    openquant compress -m DIR/smollm2-135m -o WORK/out --fit 5.0bits --for vllm --text DIR/texts/articles.jsonl ...
    python benchmarks/fit.py DIR/smollm2-135m --scores WORK/smollm2-135m.scores.json --text ... --bits 5.0 --bits 6.0

The first command writes the scores. All mixtures then run over one set of texts that no score was measured on, in one
pass, with weights rounded to nearest. The others are chosen among the same schemes by the relative squared error of
weights, and at random; and all attention is int8-weights and the rest nvfp4.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from openquant.convert.conversion import loops
from openquant.data.corpus import read_corpus
from openquant.evaluation.kl import DocumentRecord
from openquant.files.checkpoint import Checkpoint, open_checkpoint
from openquant.fit.menu import UNQUANTIZED, Mixture, Unit, bits_per_weight, find_frontier, units_of
from openquant.fit.scores import measure_mixtures, replaced_tensors
from openquant.formats.schemes import find_scheme
from openquant.hub.source import find_source
from openquant.options import Texts
from openquant.plan.plan import Plan, make_plan
from openquant.streaming.interleaved import TextRun
from openquant.streaming.model import StreamedModel
from openquant.streaming.session import find_tokenizer
from openquant.weights.find import decoded_view
from openquant.weights.reading import Reader

# Costs of each choice of each unit, in any unit.
Costs = Sequence[Mapping[str, float]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--scores", type=Path, required=True, help="the NAME.scores.json of --fit")
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--bits", type=float, action="append", required=True, help="a size (repeatable)")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.source)
    kept = json.loads(options.scores.read_text())["units"]
    names = list(dict.fromkeys(name for unit in kept for name in unit["kl"]))
    plans = {name: make_plan(checkpoint, find_scheme(name)) for name in names}
    units = units_of(plans)
    assert [list(unit.modules) for unit in units] == [unit["modules"] for unit in kept], "scores of another model"
    scores = [{UNQUANTIZED: 0.0, **unit["kl"]} for unit in kept]
    plan = next(iter(plans.values()))
    errors = weight_errors(checkpoint, units, plan)
    attention = {number: "int8-weights" if "attn" in unit.modules[0] else "nvfp4" for number, unit in enumerate(units)}
    mixtures: dict[str, Mixture] = {"nvfp4": dict.fromkeys(range(len(units)), "nvfp4")}
    for bits in [*options.bits, 8 * size(units, attention) / sum(unit.elements for unit in units)]:
        begun = time.perf_counter()
        mixtures[f"{bits:.2f} by KL"] = best(units, scores, bits)
        print(f"{time.perf_counter() - begun:.2f} s for the frontier", file=sys.stderr)
        mixtures[f"{bits:.2f} by error of weights"] = best(units, errors, bits)
        for seed in (0, 1):
            mixtures[f"{bits:.2f} at random, {seed}"] = at_random(units, bits, seed)
    mixtures["attention int8-weights, the rest nvfp4"] = attention
    texts = Texts(tuple(options.text), samples=options.samples, length=options.length)
    corpus = read_corpus(texts, find_tokenizer(find_source(str(options.source)), checkpoint), "evaluation")
    run = TextRun(StreamedModel(checkpoint), corpus)
    found = measure_mixtures(run, units, plan.decisions.fused, list(mixtures.values()), loops(True)).records
    print(f"{corpus.described}\n")
    print("| mixture | bits | KL, nats | over nvfp4 | over the one by KL |")
    print("|---|---|---|---|---|")
    chosen: Sequence[DocumentRecord] | None = None
    for (name, mixture), records in zip(mixtures.items(), found, strict=True):
        chosen = records if name.endswith("by KL") else chosen
        beside = "" if chosen is None or records is chosen else ratio(records, chosen)
        kl = np.concatenate([record.kl for record in records]).mean()
        bits = bits_per_weight(units, size(units, mixture))
        print(f"| {name} | {bits:.2f} | {kl:.4f} | {ratio(records, found[0])} | {beside} |")


def weight_errors(checkpoint: Checkpoint, units: Sequence[Unit], plan: Plan) -> Costs:
    """The relative squared error of each matrix, added over those of a unit."""
    source = {
        name: tensor for path in checkpoint.root.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    decoded, _ = decoded_view(checkpoint)
    provider = StreamedModel(checkpoint).shard_provider

    def make_reader() -> Reader:
        return Reader(decoded.where, provider.path, loops=loops(True))

    costs: list[dict[str, float]] = []
    for unit in units:
        costs.append({UNQUANTIZED: 0.0})
        for name, choice in unit.choices.items():
            rounded = replaced_tensors(unit.weights, choice.schemes, plan.decisions.fused, make_reader)
            for tensor, make in rounded.items():
                before = source[tensor].double()
                error = (make().double() - before).square().sum() / before.square().sum()
                costs[-1][name] = costs[-1].get(name, 0.0) + float(error)
    return costs


def size(units: Sequence[Unit], mixture: Mixture) -> int:
    """Bytes of the units in a mixture."""
    return sum(unit.choices[mixture[number]].nbytes for number, unit in enumerate(units))


def best(units: Sequence[Unit], costs: Costs, bits: float) -> Mixture:
    """The mixture with the least sum of costs."""
    names = [list(unit.choices) for unit in units]
    frontier = find_frontier(
        [
            [(unit.choices[name].nbytes, cost[name]) for name in of_unit]
            for unit, of_unit, cost in zip(units, names, costs, strict=True)
        ]
    )
    index = frontier.within(int((bits + 0.005) * sum(unit.elements for unit in units) / 8))
    assert index is not None, "no mixture is so small"
    return {
        number: of_unit[at] for number, (of_unit, at) in enumerate(zip(names, frontier.choices(index), strict=True))
    }


def at_random(units: Sequence[Unit], bits: float, seed: int) -> Mixture:
    """Schemes drawn for each unit from those of at least 4.5 bits, until no larger one fits."""
    drawn = random.Random(seed)
    mixture = dict.fromkeys(range(len(units)), "nvfp4")
    limit = int((bits + 0.005) * sum(unit.elements for unit in units) / 8)
    for number in drawn.sample(range(len(units)), len(units)):
        for name in drawn.sample(["int5", "int6", "int8-weights"], 3):
            if size(units, {**mixture, number: name}) <= limit:
                mixture[number] = name
                break
    return mixture


def ratio(records: Sequence[DocumentRecord], others: Sequence[DocumentRecord]) -> str:
    """Mean KL over that of others, with the 95 % interval of a bootstrap over documents."""
    a, b = (np.array([record.kl.mean() for record in each]) for each in (records, others))
    drawn = np.random.default_rng(0).integers(0, len(a), (2000, len(a)))
    low, high = np.quantile(a[drawn].mean(1) / b[drawn].mean(1), (0.025, 0.975))
    return f"{a.mean() / b.mean():.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
