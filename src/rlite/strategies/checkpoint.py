"""`RunCheckpoint`: a checkpoint directory, written beside its final name and renamed when it is whole.

```
rollout-50.ckpt/
  sharded/      weights and optimizer state, Megatron's distributed checkpoint: loads under another layout too
  critic/       the same of PPO's critic
  trainer.pt    Lightning's part: loops, data position, callbacks, learning-rate schedule
  COMPLETE      written last: without it the directory is not a checkpoint
```
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlite.strategies.pending import PendingSave, put_in_place, remove_directory

if TYPE_CHECKING:
    from rlite.strategies.policy import PolicyState

FORMAT = 1


class RunCheckpoint:
    """One checkpoint directory. `begin_save`, `load` and `load_weights` are collective."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def find(cls, directory: Path) -> "RunCheckpoint":
        """The checkpoint `directory` is, or the last one of the run it is, or of the newest of the runs in it.

        Raises:
            ValueError: it is none of these.
        """
        of_runs = sorted(directory.glob("*/checkpoints/*.ckpt/COMPLETE"), key=_written_s)
        candidates = [directory, newest_checkpoint(directory), newest_checkpoint(directory / "checkpoints")]
        for candidate in [*candidates, *(marker.parent for marker in of_runs[-1:])]:
            if candidate is not None and (candidate / "COMPLETE").is_file():
                return cls(candidate.resolve())
        raise ValueError(
            f"{directory} is neither a Hugging Face directory with *.safetensors, nor a complete rlite checkpoint, nor a "
            "run directory with checkpoints/last.ckpt, nor a directory of such runs"
        )

    def begin_save(self, trainer_state: dict[str, Any], *, asynchronous: bool = False) -> PendingSave:
        """A save that the caller adds the sharded parts to, starts, and commits. Collective.

        Everything is written under a temporary name that is changed at the end: a save that dies leaves what was there.
        """
        facts = {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "global_step": trainer_state.get("global_step"),
        }
        return PendingSave(self.path, trainer_state, facts=facts, asynchronous=asynchronous)

    def load(self, policy: "PolicyState") -> dict[str, Any]:
        """Restores weights and optimizer state; returns Lightning's part."""
        from rlite.megatron.checkpoint import load_sharded

        self._check()
        load_sharded(self.path / "sharded", list(policy.chunks), policy.optimizer)
        return torch.load(self.path / "trainer.pt", weights_only=False, map_location="cpu")

    def load_weights(self, chunks: torch.nn.ModuleList) -> None:
        """Restores only the weights, as the start of another run."""
        from rlite.megatron.checkpoint import load_sharded

        self._check()
        load_sharded(self.path / "sharded", list(chunks), None)

    def remove(self) -> None:
        """Removes the directory, or the link."""
        if self.path.is_symlink():
            self.path.unlink()
        else:
            remove_directory(self.path)

    def link_to(self, target: Path) -> None:
        """Makes this name a link to `target`, in the place of what it was."""
        link = self.path.with_name(f".{self.path.name}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, self.path.parent))
        put_in_place(link, self.path)

    def _check(self) -> None:
        marker = self.path / "COMPLETE"
        if not self.path.is_dir():
            raise FileNotFoundError(f"checkpoint {self.path}: no such directory")
        if not marker.is_file():
            raise ValueError(
                f"checkpoint {self.path} is incomplete or not one of rlite's: it has no COMPLETE marker. A save that was "
                "interrupted leaves none; use an earlier checkpoint"
            )
        written = json.loads(marker.read_text()).get("format")
        if written != FORMAT:
            raise ValueError(f"checkpoint {self.path} has format {written}, this version reads {FORMAT}")


def newest_checkpoint(directory: Path) -> Path | None:
    """`last.ckpt`, or where a save was killed before it was linked, the complete checkpoint that was written last."""
    last = directory / "last.ckpt"
    if (last / "COMPLETE").is_file():
        return last
    # `.*.ckpt.partial` and `.*.ckpt.old` have the marker when a save was killed while it changed names: both are whole.
    markers = sorted(directory.glob("*.ckpt*/COMPLETE"), key=_written_s)
    return markers[-1].parent if markers else None


def _written_s(marker: Path) -> float:
    return marker.stat().st_mtime
