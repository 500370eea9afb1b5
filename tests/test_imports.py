"""Who may import whom, and what starting the command line may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "rlite"
PURE = ["types.py", "config.py", "layout", "algorithms", "reshard/plan.py", "reshard/routes.py", "reshard/moves.py",
        "reshard/pieces.py", "plan", "rollout/engine.py", "rollout/config.py"]  # fmt: skip


def files(place: str) -> list[Path]:
    path = SOURCE / place
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def importers(module: str) -> set[str]:
    return {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(name == module or name.startswith(module + ".") for name in imported(path))
    }


@pytest.mark.parametrize("path", [path for place in PURE for path in files(place)], ids=lambda p: p.name)
def test_pure_parts_import_no_engine_and_no_lightning(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imported(path)} & {"lightning", "megatron", "vllm", "transformers"}
    assert not heavy


def test_only_the_megatron_package_imports_megatron_core() -> None:
    outside = {path for path in importers("megatron.core") if not path.startswith("megatron/")}
    assert outside == {"strategies/policy.py"}, "it asks whether groups exist"


def test_only_the_vllm_files_import_vllm() -> None:
    assert all(path.startswith("rollout/vllm") for path in importers("vllm")), importers("vllm")


def test_modules_know_neither_strategies_nor_callbacks() -> None:
    for path in files("modules"):
        known = {
            name for name in imported(path) if name.startswith(("rlite.strategies", "rlite.callbacks", "rlite.cli"))
        }
        assert not known, (path.name, known)


def test_nobody_imports_the_command_line() -> None:
    outside = {path for path in importers("rlite.cli") if not path.startswith(("cli/", "__main__"))}
    assert not outside


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import rlite", {"torch", "lightning", "vllm", "megatron"}),
        ("import rlite.cli.app", {"vllm", "megatron.core", "reasoning_gym", "wandb"}),
        ("import rlite.plan", {"vllm", "megatron.core", "lightning"}),
    ],
)
def test_importing_does_not_load(code: str, forbidden: set[str]) -> None:
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not forbidden & set(loaded)
