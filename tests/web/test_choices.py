"""What a visitor may ask for: options of an allow list, and paths below the directories that are named."""

import pytest

from openquant.cli.arguments import verb_parser
from openquant.errors import UsageError
from openquant.web.choices import ADVANCED, Chosen, Roots, push_words


def test_no_option_of_the_page_names_a_file():
    assert [name for name, option in ADVANCED.items() if option.completes] == []


def test_values_stay_values(tmp_path):
    chosen = Chosen(
        "org/name@v1",
        "int4",
        gptq=True,
        output="made",
        push="you/made",
        private=True,
        create_pr=True,
        advanced={"ignore": "--overwrite\n**.up_proj", "kv_cache": "fp8", "awq": "1", "max_memory": "--help"},
    )
    words = chosen.compress(Roots((tmp_path,)))
    words[words.index("--max-memory=--help")] = "--max-memory=2GB"
    given = vars(verb_parser(words).parse_args(words))
    assert given["ignore"] == ["--overwrite", "**.up_proj"]
    assert (given["model"], given["scheme"], given["name"]) == ("org/name@v1", "int4", "you/made")
    assert given["output"] == "made"
    assert (
        given["gptq"] and given["awq"] and given["stream"] and given["only"] and given["private"] and given["create_pr"]
    )
    assert "overwrite" not in given


def test_other_names_are_no_models_or_repositories(subtests, tmp_path):
    for model in ("", "name", "-m/x", "a/b/c", "org/na me", "https://host/x", "org/name\x1b", "a/b --x"):
        with subtests.test(model=model), pytest.raises(UsageError):
            Chosen(model).compress(Roots((tmp_path,)))
    for name in ("..", ".hidden", "-o", "a/b", "/tmp/x"):
        with subtests.test(output=name), pytest.raises(UsageError, match="is no name of a directory"):
            Chosen("org/name", output=name)
    for name in ("", "-x", "--private", "a/b/c", "a b"):
        with subtests.test(name=name), pytest.raises(UsageError):
            push_words(tmp_path, name, False, False)


def test_paths_stay_below_the_roots(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for path in (root / "model", outside):
        path.mkdir(parents=True)
    (outside / "secret.json").write_text("{}")
    roots = Roots((root,))
    assert Chosen("./model").compress(roots)[2] == str(root / "model")
    (root / "link").symlink_to(outside)
    for directory in (root / "model", root / ".hidden", outside):
        directory.mkdir(exist_ok=True)
        (directory / "model.safetensors").touch()
    assert roots.models() == ["model"]
    for path in (str(outside), "../outside", "./link", "./model/../../outside", "/", "./nothing"):
        with pytest.raises(UsageError):
            Chosen(path).compress(roots)
