"""Reads model cards (README.md): their YAML metadata, and the part that openquant writes.

That part stands first. A link to the source's card or, where its repository is not known, its text follows under
SOURCE_HEADING. So nothing in the source's text can pass for ours or swallow it.

Reads eval.json, the result of `openquant eval`.

evaluation = read_evaluation(Path("Qwen3-8B-FP8"))
evaluation["kl"]["mean"]            # 0.00129
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Container, Mapping
from html import unescape
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import yaml

from ..errors import SourceError
from .checkpoint import Checkpoint, Fingerprint, readable
from .destination import FileKind
from .model_files import CARD_FILE, EVAL_FILE, EVAL_PAGE, EVAL_PICTURE, MAX_SMALL, parse_json, read_small

# Metadata that describes the source and would be wrong for the output, or that openquant sets itself.
REPLACED = ("base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "model-index", "new_version")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:^|\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
# Headings of the part that openquant writes (report/card.jinja and evaluation.jinja): over what was done, over the
# evaluation, and over the source's own card.
MADE_HEADING = "## How it was made"
EVALUATION_HEADING = "## Measured against the source"
SOURCE_HEADING = "## Model card of the source"
# First cell of the table below MADE_HEADING: for an output of compress with quantized weights, and for any other.
QUANTIZED_FROM = "source"
WEIGHTS_OF = "weights of"
_MADE = re.compile(rf"^{MADE_HEADING}\n\n\| \| \|\n\|---\|---\|\n\| ({QUANTIZED_FROM}|{WEIGHTS_OF}) \|", re.MULTILINE)
_SOURCE = re.compile(rf"^{SOURCE_HEADING}$", re.MULTILINE)
# An evaluation ends with the command that repeats it.
_EVALUATION = re.compile(
    rf"^{EVALUATION_HEADING}\n(?:(?!#)[^\n]*\n)*?"
    r"```\n(?:openquant verify [^\n]*\n)?openquant eval [^\n]*\n```\n(?:\n|\Z)",
    re.MULTILINE,
)
# The first commands in that part, and the command that starts each engine.
_BLOCK = re.compile(r"^```\n.*?^```$", re.DOTALL | re.MULTILINE)
# The option of each engine for the longest sequence.
CONTEXT = {"vLLM": "--max-model-len", "SGLang": "--context-length"}
# The option of each engine for a model without an output head.
POOLING = {"vLLM": "--runner pooling", "SGLang": "--is-embedding"}
# Flags that may follow a command (formats/numbers.py).
_FLAGS = rf"(?: (?:{'|'.join(POOLING.values())}))?(?: --kv-cache-dtype fp8)?(?: (?:{'|'.join(CONTEXT.values())}) \d+)?"
COMMANDS = {"vLLM": "vllm serve", "SGLang": "python -m sglang.launch_server --model-path"}
# libyaml's parser is ten times as fast, but not always installed.
_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Errors of PyYAML for text that is not YAML.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


def card_of(checkpoint: Checkpoint) -> str:
    """Return the text of README.md in a checkpoint's directory, its model card, YAML metadata included.

    Args:
        checkpoint: the opened checkpoint.

    Returns:
        The text; "" if the file is missing, empty, or too large.

    Raises:
        SourceError: the file cannot be read.
    """
    if not 0 < checkpoint.files.get(CARD_FILE, 0) <= MAX_SMALL or not (checkpoint.root / CARD_FILE).is_file():
        return ""
    with readable():
        return read_small(checkpoint.root / CARD_FILE, CARD_FILE).decode(errors="replace")


def source_of(card: str) -> str | None:
    """Return the table row of a model card that names the model which openquant quantized.

    Args:
        card: the text of README.md.

    Returns:
        A line such as "| source | [org/name](https://..) |"; None if openquant did not write the card, or did not
        quantize the model.
    """
    part = _own_part(card)
    return next((line for line in part.splitlines() if line.startswith(f"| {QUANTIZED_FROM} |")), None)


def find_notes(card: str) -> list[str]:
    """Return the notes on the model in a card that openquant wrote, such as "the source lacks model.layers.1".

    Args:
        card: the text of README.md.
    """
    return [unescape(note) for note in re.findall(r"^> Note: (.*)", _own_part(card), re.MULTILINE)]


def source_commit(card: str, repo: str) -> str | None:
    """Return the commit of the source that a model card of openquant names; None if it names none.

    Args:
        card: the text of README.md.
        repo: the source's repository; the commit of another one is not returned.
    """
    link = re.escape(f"[{repo}](https://huggingface.co/{repo}/tree/")
    row = rf"^\| (?:{QUANTIZED_FROM}|{WEIGHTS_OF}) \| {link}([\w.-]+)\) at "
    found = re.search(row, _own_part(card), re.ASCII | re.MULTILINE)
    return found and found[1]


def _own_part(card: str) -> str:
    """Return the part of a card that openquant wrote; "" if there is none."""
    start, end = _own_span(card) or (0, 0)
    return card[start:end]


def _own_span(card: str) -> tuple[int, int] | None:
    """Return where the part of a card that openquant wrote begins and ends; None if there is none.

    It ends at the first line that is SOURCE_HEADING. The metadata are skipped, because their comments are the source's.
    """
    front_matter = _FRONT_MATTER.match(card)
    start = front_matter.end() if front_matter else 0
    heading = _SOURCE.search(card, start)
    end = heading.start() if heading else len(card)
    if not _MADE.search(card, start, end):
        return None
    return start, end


def source_text(card: str) -> str:
    """Return the text of a card without metadata and without what openquant wrote: the source's, if it is an output's.

    Args:
        card: the text of README.md.
    """
    span = _own_span(card)
    if span is None:
        return split_card(card)[2]
    return card[span[1] :].removeprefix(SOURCE_HEADING)


def with_evaluation(card: str, evaluation: str) -> str:
    """Put an evaluation into a card, in place of an earlier one.

    Args:
        card: the text of README.md.
        evaluation: lines that begin with EVALUATION_HEADING and end with the command of the evaluation and a newline.

    Returns:
        The text of the new README.md. The evaluation stands before SOURCE_HEADING, or else at the end.
    """
    start, end = _own_span(card) or (0, len(card))
    part = _EVALUATION.sub("", card[start:end]).rstrip()
    if "\n| folded |" in part:
        # What verify needs to smooth the source is in the journal, which is not published.
        evaluation = re.sub(r"(?m)^openquant verify .*\n", "", evaluation)
    own = evaluation
    if part:
        own = f"{part}\n\n{evaluation}"
    if end < len(card):
        own += "\n"
    return card[:start] + own + card[end:]


# Scalars that YAML reads as null.
_NULLS = ("", "~", "null", "Null", "NULL")


def split_card(card: str) -> tuple[str, dict[str, Any], str]:
    """Split a model card into metadata and text. Metadata that is not a simple YAML mapping counts as text.

    Args:
        card: the text of README.md.

    Returns:
        The YAML text of the metadata without the keys of REPLACED, without the "---" lines; all metadata by key, with
        scalars as strings; and the text after the metadata.
    """
    front_matter = _FRONT_MATTER.match(card)
    if not front_matter:
        return "", {}, card
    if not front_matter.group(1).strip():
        return "", {}, card[front_matter.end() :]
    metadata = front_matter.group(1).replace("\r\n", "\n").strip("\n") + "\n"
    mapping = _compose(metadata)
    kept = None if mapping is None else _without(metadata, mapping)
    if mapping is None or kept is None:
        return "", {}, card
    return kept, _text_of(mapping), card[front_matter.end() :]


def metadata_notes(keys: Container[str], path: str) -> list[str]:
    """Say what the Hub shows beside a model and its card does not give.

    Args:
        keys: the keys of the card's metadata.
        path: how the file is called.

    Returns:
        A list of one sentence; empty if license and base_model are there.
    """
    absent = [key for key in ("license", "base_model") if key not in keys]
    if not absent:
        return []

    lines = " and ".join(f'"{key}: .."' for key in absent)
    named = f"the card names no {' and no '.join(absent)}"
    return [f"{named}: add {lines} to the metadata at the top of {path}"]


def _compose(metadata: str) -> yaml.MappingNode | None:
    """Parse a YAML text; None if it is not a simple mapping.

    Aliases are refused, because a few lines of them expand to gigabytes.
    """
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(metadata, Loader=_LOADER)):
            return None
        node = yaml.compose(metadata, Loader=_LOADER)
    except _NOT_YAML:
        return None
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return None
    return node


def _text_of(node: yaml.Node) -> Any:
    """Return a node's value with scalars as strings, because YAML reads the language code "no" as a boolean."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _text_of(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_text_of(value) for value in node.value]
    return node.value


def _without(metadata: str, mapping: yaml.MappingNode) -> str | None:
    """Return the metadata without the keys of REPLACED, as it is written if possible, else serialized anew.

    None if neither gives the same values.
    """
    pairs = [(key, value) for key, value in mapping.value if key.value not in REPLACED]
    if not pairs:
        return ""

    starts = [(key.start_mark.index, key.value) for key, _ in mapping.value]
    kept = metadata[: starts[0][0]]
    for (start, key), (end, _) in zip(starts, [*starts[1:], (len(metadata), "")], strict=True):
        if key not in REPLACED:
            kept += metadata[start:end]
    if not kept.endswith("\n"):
        kept += "\n"

    # Cut text is not valid YAML after braces around the mapping or an end marker. Then it is serialized anew.
    expected = {**_text_of(yaml.MappingNode(mapping.tag, pairs)), "openquant": "x"}
    for text in (kept, yaml.serialize(yaml.MappingNode(mapping.tag, pairs, flow_style=False), allow_unicode=True)):
        with_another = _compose(f"{text}openquant: x\n")
        if with_another is not None and _text_of(with_another) == expected:
            return text
    return None


def shell_word(path: str) -> str:
    """Return a path as it is typed in a shell: quoted if necessary, and never read as an option.

    Args:
        path: path, repository or other argument of a command.
    """
    if path.startswith("-"):
        path = f"./{path}"
    return shlex.quote(path)


def published_card(card: str, repo: str, revision: str | None) -> str:
    """Return the card of an output as it is published: its commands serve the repository instead of the directory.

    Args:
        card: the text of README.md in the output directory.
        repo: the repository, such as "org/name".
        revision: revision of a pull request, such as "refs/pr/1"; None for main.

    Returns:
        The text of README.md for the repository.
    """
    start, end = _own_span(card) or (0, 0)
    block = _BLOCK.search(card, start, end)
    if not block:
        return card

    pattern = re.compile(f"(?m)^({'|'.join(map(re.escape, COMMANDS.values()))}) (.*?)({_FLAGS})$")
    first = pattern.search(block[0])
    commands = pattern.sub(lambda match: f"{match[1]} {serve_argument(repo, revision)}{match[3]}", block[0])

    before = card[start : block.start()]
    if first is not None:
        # The title is the directory's name, unless somebody changed it.
        name = first[2].partition(" --revision ")[0].strip("'").rpartition("/")[2]
        title = rf"\A(\s*# ){re.escape(name)}$"
        before = re.sub(title, lambda match: f"{match[1]}{repo.rpartition('/')[2]}", before, flags=re.MULTILINE)

    return card[:start] + before + commands + card[block.end() :]


def commands_in(card: str) -> str:
    """Return the commands of a card that serve its output, as lines for a shell; "" if openquant did not write it.

    Args:
        card: the text of README.md.
    """
    block = _BLOCK.search(_own_part(card))
    if block is None:
        return ""
    return block[0].strip("`\n")


def serve_argument(output: str, revision: str | None) -> str:
    """Return the arguments of an engine's command: "Qwen3-8B-FP8", "'./my model'", "org/name --revision refs/pr/1".

    Args:
        output: directory or repository.
        revision: revision of the repository; None for main or a directory.
    """
    if not revision:
        return shell_word(output)
    return f"{shell_word(output)} --revision {shell_word(revision)}"


def base_models(card: str) -> list[str]:
    """Return the repositories that a card names as its base models.

    Args:
        card: the text of README.md.

    Returns:
        The `base_model` of its metadata: ["org/name"]; empty if it has none.
    """
    names = split_card(card)[1].get("base_model", [])
    if isinstance(names, str):
        names = [names]
    return [name for name in names if isinstance(name, str) and name not in _NULLS]


AGAIN = "run openquant eval again, or remove it"
# The keys of every eval.json.
KEYS = (
    "kl", "kl_by_confidence", "kl_by_position", "kl_by_domain", "kl_histogram", "top1", "top5", "perplexity", "rms_dp",
    "weights_only", "floor", "layers", "texts", "verdict", "reasons", "suspects", "sizes", "text", "source", "output",
)  # fmt: skip


def read_evaluation(directory: Path) -> dict[str, Any]:
    """Read the eval.json of a directory.

    Args:
        directory: the directory of a model.

    Returns:
        The parsed JSON object, which has all keys of KEYS.

    Raises:
        SourceError: it is damaged, too large, or not an evaluation.
        OSError: it is missing or cannot be read. Callers convert it with `readable()`.
    """
    data = read_small(directory / EVAL_FILE, EVAL_FILE)
    return check_evaluation(parse_json(data, EVAL_FILE))


def check_evaluation(value: Any) -> dict[str, Any]:
    """Check that a parsed eval.json has the keys that `openquant eval` writes; an earlier version wrote fewer.

    Args:
        value: the parsed JSON.

    Returns:
        `value` itself.

    Raises:
        SourceError: it is no evaluation; the message names the key.
    """
    for key in KEYS:
        if not isinstance(value, dict) or key not in value:
            raise SourceError(f"{EVAL_FILE} has no {key}", AGAIN)
    evaluation: dict[str, Any] = value
    return evaluation


def _is_evaluation(file: BinaryIO) -> bool:
    """Return whether a file is an evaluation of one output or of several."""
    try:
        value = parse_json(file.read(MAX_SMALL + 1), EVAL_FILE)
        if "outputs" in value:
            value = value["outputs"][0]
        return "openquant" in value["versions"] and "kl" in value
    except (SourceError, LookupError, TypeError):
        return False


EVALUATION = FileKind("an evaluation", _is_evaluation)


def evaluation_digest(evaluation: Mapping[str, Any]) -> str:
    """Return the digest of an evaluation, by which its HTML page and its picture refer to it.

    Args:
        evaluation: the content of an eval.json.

    Returns:
        SHA-256 of the content as JSON with sorted keys, hexadecimal.
    """
    return hashlib.sha256(json.dumps(evaluation, sort_keys=True).encode()).hexdigest()


class FoundEvaluation(NamedTuple):
    """The evaluation in a model's directory.

    Attributes:
        evaluation: the values of eval.json.
        files: names of its files: eval.json, and the page and picture that show it.
    """

    evaluation: dict[str, Any]
    files: list[str]


def evaluation_files(path: Path) -> dict[str, bytes]:
    """Read an evaluation that lies anywhere, and the picture beside it.

    Args:
        path: a file that `openquant eval` wrote, under any name.

    Returns:
        Contents of the files as they are published: eval.json, and eval.png if it is of this evaluation.

    Raises:
        SourceError: it is damaged, too large, or not an evaluation of one output.
    """
    with readable():
        data = read_small(path, EVAL_FILE)
        value = parse_json(data, EVAL_FILE)
        if isinstance(value, dict) and isinstance(value.get("outputs"), list):
            raise SourceError(
                f"{path} has the figures of {len(value['outputs'])} outputs, and a repository holds one",
                "measure that one alone: openquant eval NAME --source SOURCE --out eval.json",
            )

        digest = evaluation_digest(check_evaluation(value)).encode()
        picture_path = path.parent / EVAL_PICTURE
        picture = b""
        if picture_path.is_file():
            picture = read_small(picture_path, EVAL_PICTURE)

    if digest not in picture:
        return {EVAL_FILE: data}
    return {EVAL_FILE: data, EVAL_PICTURE: picture}


def find_evaluation(checkpoint: Checkpoint) -> FoundEvaluation | None:
    """Find the evaluation in a model's directory.

    Args:
        checkpoint: the opened directory.

    Returns:
        The content of its eval.json, and the names of the files that belong to it; None if there is no eval.json.

    Raises:
        SourceError: it is damaged, or of another model or an earlier version of this one; or a shard cannot be
            read.
    """
    with readable():
        if not (checkpoint.root / EVAL_FILE).exists():
            return None
        evaluation = read_evaluation(checkpoint.root)
        output = evaluation["output"]
        if not Fingerprint(checkpoint).matches(output["digest"], output.get("stamp", "")):
            raise SourceError(
                f"{EVAL_FILE} is of another model, or of an earlier version of this one",
                f"{AGAIN}; if you changed nothing, openquant verify --source MODEL --full finds what is damaged",
            )
        shown = _shown(checkpoint.root, evaluation)
        return FoundEvaluation(evaluation, [EVAL_FILE, *(name for name, is_shown in shown.items() if is_shown)])


def _shown(root: Path, evaluation: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the page and the picture in a directory, if they are there, show an evaluation."""
    digest = evaluation_digest(evaluation).encode()
    present = [name for name in (EVAL_PAGE, EVAL_PICTURE) if (root / name).is_file()]
    return {name: digest in read_small(root / name, name) for name in present}


def evaluation_notes(root: Path) -> list[str]:
    """Say what of an evaluation is missing in a model's directory that is published.

    Args:
        root: the directory.

    Returns:
        One sentence if there is no eval.json, else one for each of page and picture that is of another evaluation, and
        one if text of a file is in it.

    Raises:
        SourceError: a file cannot be read, or eval.json is damaged.
    """
    with readable():
        if not (root / EVAL_FILE).is_file():
            command = f"openquant eval {shell_word(os.fspath(root))} --source SOURCE"
            return [f"no figures are added to the card: {command}, then push again"]
        shown = _shown(root, read_evaluation(root))
    names = [name for name, is_shown in shown.items() if not is_shown]
    return [f"{name} is of another evaluation than {EVAL_FILE}, and is left out" for name in names]
