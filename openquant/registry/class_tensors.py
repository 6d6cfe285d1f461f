"""The tensors that each class has, with sizes in terms of config.json: class_tensors.jsonl, a line a class.

tools/class_tensors.py writes that file from transformers' own classes. A line has, for Qwen3ForCausalLM,

    "sizes":    ["num_hidden_layers", "num_attention_heads*head_dim", "hidden_size", ..]: the others say places in it
    "outside":  {"lm_head.weight": [[4, 2], null, [["tie_word_embeddings", false]]], ..}: a TensorRule for each name
    "lists":    {"model.layers": [0, [{"self_attn.q_proj.weight": [[1, 2], null, []], ..}, ..], {}, {}]}: a LayerList
    "some":     {"talker": [["enable_audio_output", true]]}: parts of which a tensor must be there, if ..
    "defaults": {"tie_word_embeddings": false}: the truth of keys that config.json need not say
    "parts":    {"vision_config": "siglip_vision_model"}: the model types of parts that may be other models
    "derived":  {"head_dim": "hidden_size/num_attention_heads"}: sizes of keys that config.json need not say
    "aliases":  {"num_experts": "num_local_experts"}: other names of keys
    "built":    true: whether transformers builds all of it

A size is a sum of products of keys and numbers, where "#key" is the length of a key's list, or "?1": one that no key
says, which is the same wherever it stands. A number in a name is `*` where config.json counts it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

# A size that is not compared.
ANY = "*"
PATH = Path(__file__).with_suffix(".jsonl")
# The package may lie in an archive, as on the page that plans in a browser.
_FILE = files(__package__) / PATH.name


class TensorRule(NamedTuple):
    """What a class says of the tensors with one name template.

    Attributes:
        shape: the size of each axis.
        repeats: how many there are, of experts and the like; None if there is one.
        conditions: keys of config.json, each with the truth that it must have for the tensor to be there.
    """

    shape: tuple[str, ...]
    repeats: str | None
    conditions: tuple[tuple[str, bool], ...]


class LayerList(NamedTuple):
    """A list of layers.

    Attributes:
        length: the size that counts its layers.
        kinds: for each kind of layer, its tensors by their names below the layer.
        choices: for children of a layer, such as "mlp", a key that says something of each layer, and the places in
            `kinds` of those that each value goes with. "layer_types" is a list with a value for each layer,
            "moe_layers@1" one of the numbers of some, from 1 on, "dense_layers<" the number of those that come first,
            and "frequency%" the distance between some.
        occurrences: for tensors that not all layers have, the size that counts the layers that do.
    """

    length: str
    kinds: tuple[dict[str, TensorRule], ...]
    choices: dict[str, tuple[str, dict[str, list[int]]]]
    occurrences: dict[str, str]


class ClassTensors(NamedTuple):
    """The tensors of a class.

    Attributes:
        name: the class.
        outside: tensors outside of all lists, by name.
        lists: lists of layers, by the prefix of their names: "model.layers".
        some: prefixes below which there must be tensors that are not known by name, each with its conditions.
        defaults: the truth of keys that config.json need not say.
        parts: the model types of the parts of config.json, which may be other models, by the part's key.
        derived: sizes of keys that config.json need not say.
        aliases: other names of keys.
        is_built: whether transformers builds the class. If not, some of its tensors are only known by name.
    """

    name: str
    outside: dict[str, TensorRule]
    lists: dict[str, LayerList]
    some: dict[str, tuple[tuple[str, bool], ...]]
    defaults: dict[str, bool]
    parts: dict[str, str]
    derived: dict[str, str]
    aliases: dict[str, str]
    is_built: bool


@cache
def find_class_tensors(name: str) -> ClassTensors | None:
    """Return the tensors of a class; None if the file has none of that name."""
    start = f'{{"class":"{name}",'
    # The file has all classes, and only one of its lines is parsed.
    with _FILE.open(encoding="utf-8") as file:
        line = next((line for line in file if line.startswith(start)), None)
    if line is None:
        return None
    data = json.loads(line)
    sizes: list[str] = data["sizes"]

    def rules(entries: dict[str, Any]) -> dict[str, TensorRule]:
        return {
            name: TensorRule(
                tuple(sizes[size] for size in shape),
                None if repeats is None else sizes[repeats],
                tuple((key, truth) for key, truth in conditions),
            )
            for name, (shape, repeats, conditions) in entries.items()
        }

    lists = {
        prefix: LayerList(
            sizes[length], tuple(map(rules, kinds)), choices, {name: sizes[count] for name, count in counts.items()}
        )
        for prefix, (length, kinds, choices, counts) in data["lists"].items()
    }
    return ClassTensors(
        name,
        rules(data["outside"]),
        lists,
        some={prefix: tuple(map(tuple, conditions)) for prefix, conditions in data["some"].items()},
        defaults=data["defaults"],
        parts=data["parts"],
        derived=data["derived"],
        aliases=data["aliases"],
        is_built=data["built"],
    )
