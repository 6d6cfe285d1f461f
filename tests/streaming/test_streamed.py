"""The streamed forward pass: bit for bit what an ordinary one gives, with one unit's weights in memory."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from greenlet import getcurrent, greenlet

from conftest import EXAMPLE, change_json
from openquant import dequantize
from openquant.errors import OpenQuantError
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming import interleaved
from openquant.streaming import model as module
from openquant.streaming.interleaved import ForwardPass, run_interleaved
from openquant.streaming.meta_model import LazyTensors
from openquant.streaming.model import StreamedModel, limited_threads
from openquant.streaming.offload import HiddenStateStore, OffloadedTensors, OffloadFile
from support import quantized_checkpoints, small_checkpoints
from support.conversions import Shelf
from support.streamed_logits import all_equal, forward, plain_logits, streamed_logits

BATCHES = [
    torch.randint(10, 500, (2, length), generator=torch.Generator().manual_seed(length)) for length in (48, 33, 48)
]


@pytest.fixture
def model(shelf: Shelf) -> StreamedModel:
    return StreamedModel(open_checkpoint(shelf.source("Qwen3ForCausalLM")))


def passes_left() -> list[greenlet]:
    """Greenlets that are suspended, whoever refers to them."""
    return [each for each in gc.get_objects() if type(each) is greenlet and each and each is not getcurrent()]


def test_a_quantized_checkpoint_computes_what_its_dequantized_weights_do(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for kind, (make, config, _) in quantized_checkpoints.SOURCES.items():
        with subtests.test(kind=kind):
            source = quantized_checkpoints.store(tmp_path / kind / "source", make, config, shards=2)
            plain = Path(dequantize(source, tmp_path / kind / "plain").output)
            model = StreamedModel(open_checkpoint(source))
            found = streamed_logits(model, BATCHES[:1])
            assert all_equal(found, plain_logits(plain, type(model.model), BATCHES[:1]))
            assert len(model.quantized) == 7 * small_checkpoints.LAYERS
            assert model.quantized["model.layers.0.mlp.up_proj"].format is not None


def test_every_weight_is_read_once(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    original = LazyTensors.select

    def select(self, names):
        names = list(names)
        read.update(names)
        return original(self, names)

    monkeypatch.setattr(LazyTensors, "select", select)
    streamed_logits(model, BATCHES)
    assert set(read) == set(model.checkpoint.tensors)
    assert set(read.values()) == {1}


def test_weights_are_there_only_while_their_unit_is_computed(model: StreamedModel) -> None:
    def loaded() -> set[str]:
        return {name for name, value in model.model.named_parameters() if not value.isnan().any()}

    seen = {}
    run_interleaved(
        [[forward(model, batch)] for batch in BATCHES],
        finished=lambda *_: None,
        after_unit=lambda unit, *_: seen.__setitem__(unit, loaded()),
    )
    layers = [f"model.layers.{number}" for number in range(small_checkpoints.LAYERS)]
    assert list(seen) == ["model.embed_tokens", *layers, "lm_head"]
    for unit, names in seen.items():
        assert {name.rpartition(".")[0] for name in names if not name.startswith(unit)} == {"model.norm"}
    assert loaded() == set()


def test_hidden_states_in_a_file_change_nothing(model: StreamedModel, tmp_path: Path) -> None:
    batches = [torch.randint(10, 500, (2, 256), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = streamed_logits(model, batches)
    for budget in (0, 300_000):
        with OffloadFile(tmp_path, budget) as scratch:
            assert all_equal(streamed_logits(model, batches, scratch=scratch), expected), budget
            assert scratch._end > 0


def test_a_pass_ends_with_its_last_unit_and_holds_nothing(model: StreamedModel, tmp_path: Path) -> None:
    left: list[int] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def after(unit: str, group: int, number: int, hidden: torch.Tensor) -> None:
        del number
        if unit == "model.layers.0":
            held.append(weakref.ref(hidden))
        if unit == "model.layers.1":
            left.append(len(passes_left()))
            # What came back from the file is gone before all others are through, without the collector.
            assert [each() is None for each in held[:group]] == [True] * group

    gc.disable()
    try:
        with OffloadFile(tmp_path, 0) as scratch:
            passes = [[forward(model, ids)] for ids in BATCHES]
            run_interleaved(passes, finished=lambda *_: None, after_unit=after, until="model.layers.1", scratch=scratch)
    finally:
        gc.enable()
    assert left == [3, 2, 1]


class Waiting:
    """A pass that waits with its hidden states, and after a unit with as many more: embeddings that are used again."""

    done = False

    def __init__(self) -> None:
        self.call: list[torch.Tensor] = [torch.randn(64, 1024)]
        self.offloaded = OffloadedTensors()

    @property
    def in_memory(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in self.call)


def test_what_waits_before_a_unit_counts_beside_what_waits_after_it(tmp_path: Path) -> None:
    groups = [[Waiting()] for _ in range(8)]
    budget = 10 * groups[0][0].in_memory
    with OffloadFile(tmp_path, budget) as scratch:
        store = HiddenStateStore(scratch)
        for group in groups:
            store.offload(group)
        assert scratch._end == 0
        for unit in range(3):
            for group in groups:
                store.restore(group)
                group[0].call = [group[0].call[0], torch.randn(64, 1024)]
                store.offload(group)
                assert sum(each.in_memory for [each] in groups) <= budget
            # No more is put away than must be.
            assert sum(each.in_memory for [each] in groups) > budget - groups[0][0].call[0].numel() * 8, unit


def resident_files() -> int:
    """Kilobytes of files in this process's memory."""
    return sum(map(int, re.findall(r"Rss(?:File|Shmem):\s+(\d+)", Path("/proc/self/status").read_text())))


def test_a_large_table_and_head_are_taken_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM", vocab=65536)
    model = StreamedModel(open_checkpoint(small_checkpoints.write(tmp_path / "source", weights=weights, vocab=65536)))
    many, few = (torch.randint(65536, (1, count), generator=torch.Generator().manual_seed(0)) for count in (4096, 8))
    [expected] = streamed_logits(model, [few])
    monkeypatch.setattr(module, "LARGE_TABLE", 1 << 20)

    seen: list[tuple[torch.Tensor, int]] = []
    before = resident_files()
    run_interleaved(
        [[forward(model, many)]],
        finished=lambda *_: None,
        after_unit=lambda *given: seen.append((given[-1], resident_files() - before)),
        until="model.embed_tokens",
    )
    [(hidden, grown)] = seen
    assert torch.equal(hidden, weights["model.embed_tokens.weight"][many])
    assert grown < 8_000

    lets_go: list[int] = []
    release_pages = LazyTensors.release_pages

    def counted(self: LazyTensors) -> None:
        lets_go.append(resident_files())
        release_pages(self)

    monkeypatch.setattr(LazyTensors, "release_pages", counted)
    [found] = streamed_logits(model, [few])
    # The embedding table is let go once.
    assert len(lets_go) == 65
    assert max(lets_go[1:]) - min(lets_go[1:]) < 8_000
    torch.testing.assert_close(found, expected)


class Stop(Exception):
    pass


def test_an_error_ends_all_passes(model: StreamedModel) -> None:
    for where in ("body", "around", "after_unit", "finished", "progress"):
        for error in (Stop, KeyboardInterrupt):

            def fail(*_: object, error: type[BaseException] = error) -> None:
                raise error

            @contextmanager
            def around(fail: Callable[[], None] = fail):
                fail()
                yield

            def body(fail: Callable[[], None] = fail) -> None:
                model.model(input_ids=BATCHES[0], use_cache=False)
                fail()

            groups = [[forward(model, batch)] for batch in BATCHES]
            given = {"finished": lambda *_: None}
            if where == "body":
                groups[1] = [ForwardPass(model, body)]
            elif where == "around":
                groups[1] = [forward(model, BATCHES[0], around=around)]
            else:
                given[where] = fail
            with pytest.raises(error):
                run_interleaved(groups, **given)
            assert passes_left() == [], (where, error)
    # The model is as it was.
    assert len(streamed_logits(model, BATCHES)) == 3


HOSTILE: list[tuple[dict, str]] = [
    ({"architectures": ["pipeline"]}, "has no language model pipeline"),
    ({"architectures": ["MyForCausalLM"]}, "has no language model MyForCausalLM"),
    ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, "has no language model Bert"),
    ({"model_type": "llama"}, "model_type 'llama', but Qwen3ForCausalLM is of 'qwen3'"),
    ({"num_hidden_layers": "two"}, "refuses config.json: .*num_hidden_layers': .*int"),
    ({"num_hidden_layers": 3}, "layers.2.* is missing from the checkpoint"),
    ({"hidden_size": 128}, r"model.norm.weight is \[256\], but by config.json it must be \[128\]"),
    ({"rope_parameters": {"rope_type": "__import__"}}, "cannot make Qwen3ForCausalLM|refuses config.json"),
]


def test_configs_that_name_no_model_are_refused(source: Path, subtests: pytest.Subtests) -> None:
    sound = (source / "config.json").read_text()
    for change, says in HOSTILE:
        with subtests.test(change=change):
            (source / "config.json").write_text(sound)
            change_json(source / "config.json", lambda found, change=change: found.update(change))
            with pytest.raises(OpenQuantError, match=says):
                streamed_logits(StreamedModel(open_checkpoint(source)), BATCHES[:1])
            assert passes_left() == []


def test_what_config_asks_to_run_or_fetch_is_ignored(source: Path) -> None:
    expected = streamed_logits(StreamedModel(open_checkpoint(source)), BATCHES[:1])
    fetched = "kernels-community/flash-attn3"
    asked = {
        "auto_map": {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"},
        "attn_implementation": fetched,
        "_attn_implementation": fetched,
        "_attn_implementation_internal": fetched,
        "experts_implementation": fetched,
        "use_kernels": True,
        "fusion_config": {"patch_embeddings": True},
        "transformers_weights": "weights.bin",
        "return_dict": False,
        "output_attentions": True,
        "torch_dtype": "float16",
        # Labels of a classifier, each of which would be made a name.
        "num_labels": 10**12,
    }
    change_json(source / "config.json", lambda found: found.update(asked))
    (source / "code.py").write_text("raise SystemExit('executed')\n")
    again = StreamedModel(open_checkpoint(source))
    assert all_equal(streamed_logits(again, BATCHES[:1]), expected)


def test_weights_that_are_nan_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    make, config, _ = quantized_checkpoints.SOURCES["fp8 blocks"]
    coded = quantized_checkpoints.store(tmp_path / "coded", make, config)
    small_checkpoints.change_weights(coded, lambda weights: weights[name].view(torch.uint8)[0].fill_(0x7F))
    with pytest.raises(OpenQuantError, match=f"{name} in model.safetensors holds NaN"):
        streamed_logits(StreamedModel(open_checkpoint(coded)), BATCHES)
    assert passes_left() == []


def test_what_was_freed_is_given_back_after_each_unit(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[None] = []
    monkeypatch.setattr(interleaved, "give_memory_back", lambda: given.append(None))
    streamed_logits(model, BATCHES)
    assert len(given) == len(model.units)


def test_loading_a_layer_takes_no_more_in_a_model_of_more_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' loader walks all of the model that it is given."""
    visited: Counter[int] = Counter()
    original = torch.nn.Module._save_to_state_dict
    for layers in (2, 6):
        streamed = StreamedModel(open_checkpoint(small_checkpoints.write_layers(tmp_path / str(layers), layers)))

        def counted(self: torch.nn.Module, *args: object, layers: int = layers) -> None:
            visited[layers] += 1
            original(self, *args)

        monkeypatch.setattr(torch.nn.Module, "_save_to_state_dict", counted)
        streamed.load("model.layers.1")
        monkeypatch.undo()
        assert not streamed.model.get_submodule("model.layers.1.mlp.up_proj").weight.isnan().any()
        assert len(streamed.model.model.layers) == layers
    assert visited[2] == visited[6] > 0


def test_threads_are_as_many_as_there_is_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model = StreamedModel(open_checkpoint(EXAMPLE))
        for tokens, cpus, threads in ((512, 64, 1), (10**6, 64, 3), (10**6, 2, 2)):
            monkeypatch.setattr(module, "available_cpus", lambda cpus=cpus: cpus)
            with pytest.raises(KeyError), limited_threads(model, tokens):
                assert torch.get_num_threads() == threads, (tokens, cpus)
                raise KeyError
            # As many as before afterwards.
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_while_a_model_computes_no_page_of_the_other_is_in_memory(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StreamedModel(model.checkpoint)
    released: list[StreamedModel] = []
    release = StreamedModel.release_pages
    monkeypatch.setattr(StreamedModel, "release_pages", lambda self: (released.append(self), release(self)))

    @contextmanager
    def around(theirs: StreamedModel) -> Iterator[None]:
        assert released[-1] is theirs
        yield

    both = [
        forward(one, BATCHES[0], around=partial(around, theirs)) for one, theirs in ((model, other), (other, model))
    ]
    run_interleaved([both], finished=lambda *_: None)
