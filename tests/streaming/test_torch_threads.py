"""How many threads torch gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conftest import EXAMPLE
from openquant.files.checkpoint import open_checkpoint
from openquant.streaming import model as model_module
from openquant.streaming.model import StreamedModel, limited_threads, threads_for


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
        monkeypatch.setattr(model_module, "available_cpus", lambda cpus=cpus: cpus)
        assert threads_for(model, tokens) == threads, (tokens, cpus)


@pytest.mark.usefixtures("same_threads")
def test_the_number_is_as_before_afterwards() -> None:
    torch.set_num_threads(3)
    with pytest.raises(KeyError), limited_threads(2):
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == 3
