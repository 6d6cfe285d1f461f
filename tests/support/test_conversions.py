"""Which conversions tests share."""

from __future__ import annotations

import pytest

from openquant.formats.schemes import VARIANTS
from openquant.models import MODELS
from support import small_checkpoints
from support.conversions import walks


def test_walks_meet_every_scheme_in_dense_models_and_in_mixtures_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_night in (False, True):
        monkeypatch.setenv("OPENQUANT_ALL", str(int(at_night)))
        walks.cache_clear()
        pairs = [(name, scheme) for name, schemes in walks().items() for scheme in schemes]
        assert all(small_checkpoints.refused(name, scheme) is None for name, scheme in pairs)
        for mixture in (False, True):
            assert {scheme for name, scheme in pairs if bool(MODELS[name].experts) == mixture} == {*VARIANTS}
        # DeepSeek V4 has two.
        served = {name: sum(small_checkpoints.refused(name, scheme) is None for scheme in VARIANTS) for name in walks()}
        assert tuple(walks()) == small_checkpoints.ARCHITECTURES
        assert all(len(schemes) >= (min(served[name], 3) if at_night else 1) for name, schemes in walks().items())
        assert len(set(pairs)) == len(pairs)
    walks.cache_clear()
