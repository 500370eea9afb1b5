"""`RLiteCLI`: LightningCLI with the defaults of a run, nearest-key errors, and a config file saved beside the results."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from rlite.callbacks import ConsoleProgress, GracefulPreemption, HealthWarnings, RolloutCheckpoint, SampleLog
from rlite.callbacks.preemption import EXIT_CODE
from rlite.cli.console import quiet_console, user_errors
from rlite.cli.nearest import add_nearest_key
from rlite.data import PromptDataModule
from rlite.loggers import RunLogger
from rlite.modules import PolicyModule

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_RUN_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,  # one epoch is the run; limit_train_batches counts its rollout steps
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "inference_mode": False,  # inference tensors would poison later in-place weight updates
    "use_distributed_sampler": False,
    "enable_model_summary": False,
}


class RLiteTrainer(pl.Trainer):
    """Lightning's Trainer with the defaults that a run needs: one epoch is the run, data samplers are ours.

    `RLiteTrainer(...)` takes the arguments of `lightning.pytorch.Trainer` and adds `ConsoleProgress`, `HealthWarnings`,
    `SampleLog`, `RolloutCheckpoint` and `GracefulPreemption` when `callbacks` has none of them.
    """

    def __init__(self, *, callbacks: list[pl.Callback] | pl.Callback | None = None, **kwargs: Any) -> None:
        quiet_console()
        given = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks or [])
        wanted: list[type[pl.Callback]] = [HealthWarnings, SampleLog, GracefulPreemption]
        if kwargs.get("enable_progress_bar") is not False:
            wanted.insert(0, ConsoleProgress)
        if kwargs.get("enable_checkpointing") is not False:
            wanted.append(RolloutCheckpoint)
        given += [kind() for kind in wanted if not any(isinstance(c, kind) for c in given)]
        if kwargs.get("logger") in (None, True):
            kwargs["logger"] = RunLogger()
        # Lightning's own ModelCheckpoint default would count optimizer steps.
        for name, value in _RUN_DEFAULTS.items():
            kwargs.setdefault(name, value)
        super().__init__(callbacks=given, **kwargs)


class RLiteParser(LightningArgumentParser):
    """Argument parser whose errors name the nearest existing key."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> Any:
        return super().error(add_nearest_key(message, self), ex)


class SaveRunConfig(SaveConfigCallback):
    """Writes `config.yaml` into the run directory, whatever the logger."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "save_to_log_dir": False, "overwrite": True})

    @override
    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        directory = Path(trainer.loggers[0].log_dir if trainer.loggers and trainer.loggers[0].log_dir else "runs")
        directory.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, directory / "config.yaml", skip_none=False, overwrite=True, multifile=False)


class RLiteCLI(LightningCLI):
    """The `rlite` command."""

    def __init__(self) -> None:
        super().__init__(
            PolicyModule,
            PromptDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=RLiteTrainer,
            trainer_defaults=_RUN_DEFAULTS,
            save_config_callback=SaveRunConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_class=RLiteParser,
            parser_kwargs={"prog": "rlite", "allow_abbrev": False},
            load_from_checkpoint_support=False,
        )

    @override
    def instantiate_classes(self) -> None:
        with user_errors():
            self._find_last_checkpoint()
            super().instantiate_classes()

    def _find_last_checkpoint(self) -> None:
        """`--ckpt_path last` means the newest run of this config's logger, and `fit` goes on in that directory."""
        config = self.config[self.subcommand]
        if config.get("ckpt_path") != "last":
            return
        if config.trainer.logger in (None, True):
            config.trainer.logger = Namespace(class_path="rlite.loggers.RunLogger", init_args=Namespace())
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
        ours = [entry for entry in loggers if getattr(entry, "class_path", "").endswith("RunLogger")]
        if not ours:
            raise ValueError(
                "--ckpt_path last: it looks among the runs of trainer.logger = rlite.loggers.RunLogger, and this config has "
                "none; give the path of the checkpoint"
            )
        logger = RunLogger(**ours[0].init_args.as_dict())
        found = logger.last_checkpoint()
        if found is None:
            raise FileNotFoundError(
                f"--ckpt_path last: no run under {logger.root_dir} has a complete checkpoint; leave it out to start anew"
            )
        config.ckpt_path = str(found)
        if self.subcommand == "fit" and ours[0].init_args.get("version") is None:
            ours[0].init_args.version = found.parent.parent.name

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        with user_errors(unless=lambda: progress.current.ready > 0):
            super()._run_subcommand(subcommand)

    @override
    def _parse_ckpt_path(self) -> None:
        pass  # the config is the truth: hyper-parameters inside a checkpoint must not override it silently


class ConfigOnlyCLI(RLiteCLI):
    """Parses a configuration and builds nothing from it."""

    @classmethod
    def parse(cls, arguments: list[str]) -> dict[str, Any]:
        """The configuration of `rlite fit` with these arguments, as a plain mapping."""
        sys.argv = [sys.argv[0], "fit", *arguments]
        return cls().config["fit"].as_dict()

    @override
    def _set_seed(self) -> None:
        pass

    @override
    def instantiate_classes(self) -> None:
        pass

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        pass


def run(arguments: list[str]) -> None:
    """Runs the command; exits with 143 after a preempted run, 1 after an error of the user's."""
    quiet_console()
    if arguments[:1] == ["generate"]:
        arguments = ["predict", *arguments[1:]]
    sys.argv = [sys.argv[0], *arguments]  # the launcher starts the other ranks with the same command line
    cli = RLiteCLI()
    if any(isinstance(c, GracefulPreemption) and c.stopped for c in cli.trainer.callbacks):
        sys.exit(EXIT_CODE)
