"""Model directories, made once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import make_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_dir(name, seed=0, **config overrides)`: a tiny random model, made once a session."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(name: str, seed: int = 0, **overrides: Any) -> Path:
        key = f"{name}_{seed}_{sorted(overrides.items())}"
        if key not in made:
            made[key] = make_model_dir(root / str(len(made)), name, seed=seed, **overrides)
        return made[key]

    return get
