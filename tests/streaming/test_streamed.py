"""The streamed forward pass: bit for bit what an ordinary one gives, with one unit's weights in memory."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from openquant.streaming.model import PassProgress, StreamedModel, layer_costs, limited_threads, threads_for
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


def test_what_a_file_holds_takes_no_memory(tmp_path: Path) -> None:
    hidden = torch.randn(64, 1024)
    view, value = hidden.view(-1), hidden.clone()
    held = OffloadedTensors()
    with OffloadFile(tmp_path, 0) as scratch:
        assert held.track(((hidden, torch.zeros(3)), {"again": view})) == hidden.nbytes
        held.offload(scratch)
        assert hidden.untyped_storage().nbytes() == 0
        held.restore(scratch)
    assert torch.equal(view, value.view(-1))


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


def test_a_large_embedding_table_is_looked_into_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_TABLE", 1 << 20)
    weights = small_checkpoints.tensors("Qwen3ForCausalLM", vocab=65536)
    model = StreamedModel(open_checkpoint(small_checkpoints.write(tmp_path / "source", weights=weights, vocab=65536)))
    ids = torch.randint(65536, (2, 2048), generator=torch.Generator().manual_seed(0))
    hidden: list[torch.Tensor] = []
    grown: list[int] = []

    def note(_unit: str, _group: int, _number: int, value: torch.Tensor) -> None:
        hidden.append(value)
        grown.append(resident_files())

    before = resident_files()
    run_interleaved([[forward(model, ids)]], finished=lambda *_: None, after_unit=note, until="model.embed_tokens")
    assert torch.equal(hidden[0], weights["model.embed_tokens.weight"][ids])
    # Of 33 MB, of which looking up so many tokens at once brings in most.
    assert grown[0] - before < 8_000


def test_a_large_output_head_is_multiplied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM", vocab=65536)
    model = StreamedModel(open_checkpoint(small_checkpoints.write(tmp_path / "source", weights=weights, vocab=65536)))
    ids = torch.randint(65536, (1, 8), generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []
    lets_go: list[int] = []

    def finished(_group: int, _number: int, value: torch.Tensor) -> None:
        found.append(value)

    run_interleaved([[forward(model, ids)]], finished=finished)
    monkeypatch.setattr(module, "LARGE_TABLE", 1 << 20)
    release_pages = LazyTensors.release_pages

    def counted(self: LazyTensors) -> None:
        lets_go.append(resident_files())
        release_pages(self)

    monkeypatch.setattr(LazyTensors, "release_pages", counted)
    run_interleaved([[forward(model, ids)]], finished=finished)
    # Of 33 MB, half a megabyte at a time; the embedding table is let go once.
    assert len(lets_go) == 65
    assert max(lets_go[1:]) - min(lets_go[1:]) < 8_000
    torch.testing.assert_close(found[1], found[0])


def test_passes_of_a_group_go_side_by_side(model: StreamedModel) -> None:
    other = StreamedModel(model.checkpoint)
    order, entered = [], []

    @contextmanager
    def around():
        entered.append(1)
        yield

    groups = [[forward(model, batch), forward(other, batch, around=around)] for batch in BATCHES[:2]]
    ends = []
    run_interleaved(
        groups,
        finished=lambda group, number, _: ends.append((group, number)),
        after_unit=lambda unit, group, number, _: order.append((unit, group, number)),
    )
    units = list(dict.fromkeys(unit for unit, _, _ in order))
    everyone = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert order == [(unit, *each) for unit in units for each in everyone]
    assert ends == everyone
    assert len(entered) == 2 * len(units)


def test_a_forward_of_the_callers_own_stays(model: StreamedModel) -> None:
    layer = model.units["model.layers.0"]
    original, calls = layer.forward, []

    def own(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = own
    streamed_logits(model, BATCHES)
    streamed_logits(model, BATCHES)
    assert len(calls) == 6
    assert layer.forward is own


def test_the_next_unit_is_read_ahead(model: StreamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(LazyTensors, "prefetch", lambda _, names: asked.append(set(names)))
    streamed_logits(model, BATCHES[:1])
    assert asked[:2] == [{name for name in model.checkpoint.tensors if f"layers.{n}." in name} for n in (0, 1)]
    assert asked[2] == {"lm_head.weight"}


def test_reading_ahead_asks_for_what_a_unit_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, config, _ = quantized_checkpoints.SOURCES["fp8 blocks"]
    model = StreamedModel(open_checkpoint(quantized_checkpoints.store(tmp_path / "source", make, config)))
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, nbytes, _advice: asked.append((offset, nbytes)))
    model.prefetch("model.layers.0")
    names = [name for name in model.checkpoint.tensors if name.startswith("model.layers.0.")]
    tensors, where = model.checkpoint.tensors, model.checkpoint.where
    assert sorted(asked) == sorted((where[name].offset, tensors[name].nbytes) for name in names)


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


@pytest.mark.parametrize("function", ["resume", "call", "abandon"])
def test_an_interrupt_at_any_bytecode_of_the_hand_over_ends_all_passes(model: StreamedModel, function: str) -> None:
    at, count = 1, 1

    def opcode(frame, event, argument):
        nonlocal count
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return opcode

    def call(frame, event, argument):
        if frame.f_code.co_filename != interleaved.__file__ or frame.f_code.co_name != function:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return opcode

    short = [batch[:1, :4] for batch in BATCHES[:2]]
    expected = streamed_logits(model, short)
    traced = sys.gettrace()
    while count >= at:
        at, count = at + 1, 0
        sys.settrace(call)
        try:
            streamed_logits(model, short)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
        assert passes_left() == []
        # A few calls of each function are enough.
        if at >= 60:
            break
    assert at > 20
    assert all_equal(streamed_logits(model, short), expected)


def test_resident_models_generate(model: StreamedModel) -> None:
    from transformers import AutoModelForCausalLM

    with model.resident() as resident:
        found = resident.generate(BATCHES[0], max_new_tokens=8, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = AutoModelForCausalLM.from_pretrained(model.checkpoint.root, dtype=torch.bfloat16)
    assert torch.equal(found, plain.generate(BATCHES[0], max_new_tokens=8, do_sample=False))
    assert all(value.isnan().all() for value in model.model.parameters())


HOSTILE: list[tuple[dict, str]] = [
    ({"architectures": ["pipeline"]}, "has no language model pipeline"),
    ({"architectures": ["os.system"]}, r"has no language model os\.system"),
    ({"architectures": ["PreTrainedModel"]}, "has no language model PreTrainedModel"),
    ({"architectures": ["MyForCausalLM"]}, "has no language model MyForCausalLM"),
    ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, "has no language model Bert"),
    ({"model_type": "llama"}, "model_type 'llama', but Qwen3ForCausalLM is of 'qwen3'"),
    ({"model_type": ["qwen3"]}, "has model_type"),
    ({"num_hidden_layers": 10**9}, "has 1000000000 layers, the checkpoint only"),
    ({"num_hidden_layers": "two"}, "refuses config.json: .*num_hidden_layers': .*int"),
    ({"num_hidden_layers": 3}, "layers.2.* is missing from the checkpoint"),
    ({"hidden_size": 128}, r"model.norm.weight is \[256\], but by config.json it must be \[128\]"),
    ({"hidden_act": "os.system"}, "cannot make Qwen3ForCausalLM"),
    ({"head_dim": 10**10}, "config.json has head_dim 10000000000, more than 4,194,304"),
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


def test_draft_layers_are_left_out(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Glm4MoeForCausalLM")
    model = StreamedModel(open_checkpoint(source))
    assert model.unexpected
    assert all(name.startswith("model.layers.2.") for name in model.unexpected)


def test_weights_that_are_nan_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    make, config, _ = quantized_checkpoints.SOURCES["fp8 blocks"]
    coded = quantized_checkpoints.store(tmp_path / "coded", make, config)
    small_checkpoints.change_weights(coded, lambda weights: weights[name].view(torch.uint8)[0].fill_(0x7F))
    with pytest.raises(OpenQuantError, match=f"{name} in model.safetensors holds NaN"):
        streamed_logits(StreamedModel(open_checkpoint(coded)), BATCHES)
    assert passes_left() == []


def mapped(directory: Path) -> int:
    """Bytes of a directory's files that this process has in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:") and inside:
            total += int(line.split()[1]) * 1024
        elif not line.split()[0].endswith(":"):
            inside = str(directory) in line
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what of a file is in memory")
def test_while_a_model_computes_no_file_of_the_other_is_in_memory(model: StreamedModel, tmp_path: Path) -> None:
    # Files that no other test has in memory.
    copies = [shutil.copytree(model.checkpoint.root, tmp_path / name, copy_function=shutil.copyfile) for name in "ab"]
    one, other = (StreamedModel(open_checkpoint(copy)) for copy in copies)
    own, others = [], []

    def noting(mine: StreamedModel, theirs: StreamedModel):
        @contextmanager
        def around():
            others.append(mapped(theirs.checkpoint.root))
            yield
            own.append(mapped(mine.checkpoint.root))

        return around

    run_interleaved(
        [
            [forward(one, batch, around=noting(one, other)), forward(other, batch, around=noting(other, one))]
            for batch in BATCHES
        ],
        finished=lambda *_: None,
    )
    assert min(own) > 0
    assert max(others) == 0


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


def test_tokens_count_once_they_are_through_all_layers() -> None:
    told: list[tuple[int, int]] = []
    progress = PassProgress({"tower": 1.0, "a": 1.0, "b": 3.0}, 100, lambda *step: told.append(step), more=7)
    # An embedding, then two texts in each layer, of which the first goes through once before; a tower has none.
    for unit, group in (("embedding", 2), ("a", 0), ("a", 1), ("a", 2), ("b", 1), ("b", 2)):
        progress.layer_done(unit, group, 2)
    progress.more_done(7)
    assert told == [(0, 107), (0, 107), (12, 107), (25, 107), (62, 107), (100, 107), (107, 107)]


@pytest.fixture
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
def test_threads_are_as_many_as_there_is_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    model = StreamedModel(open_checkpoint(EXAMPLE))
    for tokens, cpus, threads in ((512, 64, 1), (10**6, 64, 3), (10**6, 2, 2)):
        monkeypatch.setattr(module, "available_cpus", lambda cpus=cpus: cpus)
        assert threads_for(model, tokens) == threads, (tokens, cpus)


@pytest.mark.usefixtures("same_threads")
def test_the_number_is_as_before_afterwards() -> None:
    torch.set_num_threads(3)
    with pytest.raises(KeyError), limited_threads(2):
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == 3


def test_layers_of_one_size_are_of_one_kind() -> None:
    model = StreamedModel(open_checkpoint(EXAMPLE))
    layers = [unit for unit in model.units if ".layers." in unit]
    costs = layer_costs(model, layers)
    assert list(costs) == layers
    assert len(set(costs.values())) == 1 and len(costs) == 4
