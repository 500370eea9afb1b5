"""How a model is cut over ranks: `ParallelLayout` for training (Megatron), `EngineLayout` for generation (vLLM).

Pure integers: no torch, no process groups. Mesh axes are always `tp pp ep etp cp dp`. Every check of a layout lives
here and prints the equation that does not hold.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Where a rank stands on the training mesh."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Training layout. Data parallelism takes what is left: `dp = world_size / (tp * pp * cp)`."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    ep: int = 1
    """Expert parallel size: experts are spread over this many ranks."""
    etp: int = 1
    """Tensor parallel size inside an expert."""
    cp: int = 1
    """Context parallel size."""
    vpp: int = 1
    """Model chunks on each pipeline rank (interleaved schedule); 1 switches it off."""
    first_stage_layers: int | None = None
    """Layers on the first pipeline stage, when the split is uneven."""
    last_stage_layers: int | None = None
    """Layers on the last pipeline stage, when the split is uneven."""

    @property
    def sequence_parallel(self) -> bool:
        """Always with tensor parallelism: MoE and MLA gradients need it."""
        return self.tp > 1

    @property
    def model_parallel_size(self) -> int:
        return self.tp * self.pp * self.cp

    def dp(self, world_size: int) -> int:
        return world_size // self.model_parallel_size

    def edp(self, world_size: int) -> int:
        return world_size // (self.etp * self.ep * self.pp)

    def validate(self, world_size: int) -> None:
        """Raises ValueError with the equation when the layout cannot cover `world_size` ranks."""
        for axis in ("tp", "pp", "ep", "etp", "cp", "vpp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"trainer.strategy.layout.{axis} = {getattr(self, axis)}: must be at least 1")
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"trainer.strategy.layout: tp*pp*cp = {self.tp}*{self.pp}*{self.cp} = {self.model_parallel_size} does not "
                f"divide world size {world_size} (devices * num_nodes). Change one of them so that tp*pp*cp*dp = world size."
            )
        expert_size = self.etp * self.ep * self.pp
        if world_size % expert_size:
            raise ValueError(
                f"trainer.strategy.layout: etp*ep*pp = {self.etp}*{self.ep}*{self.pp} = {expert_size} does not divide "
                f"world size {world_size} (devices * num_nodes). Change one of them so that etp*ep*pp*edp = world size."
            )
        if self.ep == 1 and self.etp != self.tp:
            raise ValueError(
                f"trainer.strategy.layout: etp = {self.etp} != tp = {self.tp} with ep = 1: Megatron-core would reduce expert "
                f"gradients over the wrong ranks. Set etp = {self.tp}, or ep > 1."
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"trainer.strategy.layout.vpp = {self.vpp} needs pp > 1 (pp = 1)")

    def coordinates(self, rank: int, world_size: int) -> RankCoordinates:
        """Megatron-core's order: dense ranks count tp, cp, dp, pp; expert ranks count etp, ep, edp, pp."""
        dp, edp = self.dp(world_size), self.edp(world_size)
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp_rank, pp = rest % dp, rest // dp
        etp, rest = rank % self.etp, rank // self.etp
        ep, rest = rest % self.ep, rest // self.ep
        return RankCoordinates(tp=tp, cp=cp, dp=dp_rank, pp=pp, etp=etp, ep=ep, edp=rest % edp)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Generation layout: `world_size / tp` independent replicas of `tp` consecutive ranks."""

    tp: int = 1
    """Tensor parallel size of one engine."""
    expert_parallel: bool = False
    """Experts whole on their rank of the engine, instead of sliced by tensor parallelism."""

    def replicas(self, world_size: int) -> int:
        return world_size // self.tp

    def replica_ranks(self, rank: int) -> range:
        """Global ranks of the engine that `rank` belongs to."""
        first = rank - rank % self.tp
        return range(first, first + self.tp)

    def validate(self, world_size: int) -> None:
        if self.tp < 1 or world_size % self.tp:
            raise ValueError(
                f"engine tp = {self.tp} does not divide world size {world_size}: set the rollout's engine.tp so that "
                "tp*replicas = world size"
            )
