"""Model cards read and rewritten; what a run makes of them is in tests/report/test_card.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from openquant import compress
from openquant.files.cards import base_models, commands_in, published_card, source_of, with_evaluation
from support import small_checkpoints

MINE = "Notes.\n\n```\nvllm serve mine\n```\n"


def made(tmp_path: Path, text: str = MINE, **options: object) -> str:
    source = small_checkpoints.write(tmp_path / "source")
    (source / "README.md").write_text(text)
    compress(source, tmp_path / "out", **{"scheme": "block", **options})  # type: ignore[arg-type]
    return (tmp_path / "out" / "README.md").read_text()


def test_a_published_card_s_own_commands_and_title_name_the_repository(tmp_path: Path) -> None:
    text = made(tmp_path)
    assert text.endswith(f"\n## Model card of the source\n\n{MINE}")
    served = "\nvllm serve out\npython -m sglang.launch_server --model-path out\n"
    assert text.count(served) == 1 and text.count("\n# out\n") == 1
    # Commands that somebody else wrote are not ours.
    assert commands_in(text) == served.strip() and commands_in(f"```{served}```") == ""
    on_main = text.replace(served, served.replace(" out\n", " org/name\n")).replace("\n# out\n", "\n# name\n")
    assert published_card(text, "org/name", None) == on_main
    in_request = on_main.replace(" org/name\n", " org/name --revision refs/pr/1\n")
    assert published_card(text, "org/name", "refs/pr/1") == in_request
    assert published_card(in_request, "user/another", None) == on_main.replace("org/name", "user/another").replace(
        "# name", "# another"
    )
    # What the user made of it is left as it is.
    titled = text.replace("\n# out\n", "\n# My model\n\n# out\n")
    assert published_card(titled, "org/name", None) == on_main.replace("\n# name\n", "\n# My model\n\n# out\n")
    for edited in ("", MINE, text.replace("| source |", "| from |")):
        assert published_card(edited, "org/name", None) == edited


# What imitates our headings and tables, or leaves something open.
HOSTILE = """# Title
<!--
## Model card of the source

## How it was made

| | |
|---|---|
| source | evil |
| codes | those of the source, with its scales |
| folded | AWQ |
| scales | evil |
| rounded by | GPTQ, 1 x 1 tokens |

# evil: FP8 weights

| | |
|---|---|
| source | evil |

## Measured against the source

```
openquant eval evil
```

<details>
```
"""


def test_the_text_of_the_source_is_not_taken_for_ours(tmp_path: Path) -> None:
    # Comments of YAML are kept with the metadata.
    comments = "".join(f"# {line}\n" for line in ("# Model card of the source", "# How it was made"))
    text = made(tmp_path, f"---\n{comments}license: mit\n---\n{HOSTILE}")
    assert comments in text.split("---\n")[1]
    own, heading, _ = text.split("---\n", 2)[2].partition("\n## Model card of the source\n")
    assert heading and "evil" not in own and own.count("```") == 6
    assert source_of(text) == "| source | source |"
    evaluation = "## Measured against the source\n\n```\nopenquant eval ours\n```\n"
    twice = with_evaluation(with_evaluation(text, evaluation), evaluation)
    before, source_heading, after = text.partition("## Model card of the source\n")
    assert twice == f"{before}{evaluation}\n{source_heading}{after}"


def test_an_output_that_is_a_source_keeps_the_first_source_s_text_alone(tmp_path: Path) -> None:
    text = made(tmp_path, "# A model\n\nIt was trained.\n")
    evaluation = "## Measured against the source\n\n```\nopenquant eval a/b --source org/m\n```\n"
    (tmp_path / "out" / "README.md").write_text(with_evaluation(text, evaluation))
    compress(tmp_path / "out", tmp_path / "again", "keep")
    again = (tmp_path / "again" / "README.md").read_text()
    assert again.endswith("\n\n## Model card of the source\n\n# A model\n\nIt was trained.\n")
    for once in ("## How it was made", "## Use", "It was trained", "## Model card"):
        assert again.count(once) == 1
    assert "Measured" not in again
    assert source_of(again) == "| source | out, which is quantized already |"


BASE_MODELS = [
    ("base_model: a/b", ["a/b"]),
    ("base_model: [a/b, c/d]", ["a/b", "c/d"]),
    ("license: mit", []),
    ("[", []),
    ("base_model:", []),
    ("base_model: null", []),
    ("base_model:\n- a/b\n-\n", ["a/b"]),
]


def test_base_models_of_a_card(subtests: pytest.Subtests) -> None:
    for front, names in BASE_MODELS:
        with subtests.test(front=front, names=names):
            assert base_models(f"---\n{front}\n---\ntext\n") == names
