"""What all tasks do in training: sum and log losses, refuse NaN, optimiser, schedule, average."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tasks.engine.batch_norm import share_statistics
from tasks.engine.batches import Batch, batch_size, batches_of_step
from tasks.engine.ema import ScheduleFreeAverage, WeightEMA
from tasks.engine.gather import refuse_together
from tasks.engine.optim import SCHEDULE_FREE, build_optimizer, learning_rate_factor, scaled_lr
from tasks.engine.param_groups import schedule_rate

say = rank_zero_only(logging.getLogger(__name__).info)


class Training(LightningModule):
    """The part of a ``BaseTask`` that trains; the attributes are the task's own."""

    model: Any
    optimizer_options: dict[str, Any]
    schedule_options: dict[str, Any]
    ema: WeightEMA | None
    latest_loss: Tensor | None
    _rules: Any

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser, and a schedule that moves at every step."""
        options = dict(self.optimizer_options)
        if options["name"] == "adamw" and not options.keys() & {"fused", "foreach"}:
            # On a CPU torch loops over the parameters unless asked, which takes three times as
            # long. Lightning clips no gradients of a fused optimiser in mixed precision.
            options["fused"] = self.device.type == "cpu" and self.trainer.precision == "32-true"
        self.trainer.fit_loop.setup_data()  # without an end by epochs the estimate does not ask it
        batch = self._images_per_step() if options.get("reference_batch") else None
        self.check_training(self.trainer.strategy, batch or 1)
        optimizer = build_optimizer(self.model, self._rules, batch, **options)
        if options["name"] in SCHEDULE_FREE:
            self.ema = ScheduleFreeAverage(optimizer, self.model)
        steps = int(self.trainer.estimated_stepping_batches)
        slow = None if self.ema is None else self.ema.slow_for(steps)
        if slow is not None:
            say(slow)
        batches, accumulated = (
            self.trainer.num_training_batches,
            self.trainer.accumulate_grad_batches,
        )
        factor = learning_rate_factor(
            steps,
            math.ceil(batches / accumulated),
            scaled_lr(options["lr"], options.get("reference_batch"), batch or 1),
            **self.schedule_options,
        )
        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def check_training(self, strategy: Any, batch: int) -> None:
        """Refuse what the task and the trainer have to be known for, before anything is written.

        Args:
            strategy: The trainer's.
            batch: Images of an optimiser step, over all processes and accumulated batches.

        Raises:
            ValueError: An average of sharded weights, or a rate above the one for this batch.
        """
        options = self.optimizer_options
        free = options["name"] in SCHEDULE_FREE
        if isinstance(strategy, FSDPStrategy) and (free or self.ema is not None):
            remedy = "another optimizer.name" if free else "task.ema=null"
            raise ValueError(
                f"sharded weights have no average: pass {remedy}, or trainer=ddp to keep it"
            )
        if free and self.schedule_options["name"] != "constant":
            raise ValueError(
                f"optimizer.name={options['name']} averages the weights instead of lowering the "
                "rate: pass schedule.name=constant, with a warm-up or without"
            )
        if free and type(self.ema) is WeightEMA:
            raise ValueError(
                f"optimizer.name={options['name']} keeps its own average of the weights: pass "
                "task.ema=null"
            )
        rate = scaled_lr(options["lr"], options.get("reference_batch"), batch)
        learning_rate_factor(1, 1, rate, **self.schedule_options)

    def _images_per_step(self) -> int:
        trainer: Any = self.trainer
        source = trainer.datamodule or trainer.train_dataloader
        if getattr(source, "batch_size", None) is None:
            raise ValueError(
                "optimizer.reference_batch needs the size of a batch, which these data do not "
                "tell; pass a datamodule, or leave reference_batch out"
            )
        return int(source.batch_size * trainer.world_size * batches_of_step(trainer, 0))

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """A step of the optimiser, then one of the average: before anything is saved."""
        super().optimizer_step(*args, **options)
        if self.trainer.world_size > 1:
            share_statistics(self.model, self.trainer.strategy.reduce)
        if self.ema is not None:
            self.ema.update(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sum the losses of a batch."""
        try:
            losses = self.model.loss(self.prepare_batch(batch))
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                "a batch norm of this model has one value a channel to normalise by, with which "
                f"nothing trains: the batch is of {batch_size(batch)}; pass data.batch_size=2 or "
                "more, or to UperNet head.group_norm=true"
            ) from error
        total = torch.stack([value for name, value in losses.items() if "loss" in name]).sum()
        self._refuse_nan(total)
        self.latest_loss = total.detach()
        if not self._is_shown(batch_idx):
            return total  # Lightning takes half a millisecond to log what nobody would read
        size = batch_size(batch)
        shown = {f"train/{name}": value.detach() for name, value in losses.items()}
        shown["train/loss"] = total.detach()
        if self.trainer.world_size > 1:
            shown = self._mean_over_processes(shown)
        self.latest_loss = loss = shown.pop("train/loss")
        rate = schedule_rate(self.trainer.optimizers[0].param_groups[0])
        self.log_dict({**shown, "train/lr": rate}, batch_size=size)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        return total

    def _is_shown(self, batch_idx: int) -> bool:
        """Whether the losses of a batch are written down, or looked at when it is over.

        Other batches are not logged and need not wait for each other's losses; what progress shows
        of them is ``latest_loss``. All processes must come to the same answer.
        """
        trainer: Any = self.trainer
        every, step = trainer.log_every_n_steps, self.global_step + 1
        if every and step % every == 0:
            return True
        if batch_idx + 1 == trainer.num_training_batches or step == trainer.max_steps:
            return True
        validated = trainer.val_check_batch  # None where validation goes by the clock
        return validated is None or (batch_idx + 1) % validated == 0

    def _mean_over_processes(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stacked = torch.stack([value.float() for value in values.values()])
        means = self.trainer.strategy.reduce(stacked, reduce_op="mean")
        return dict(zip(values, means.unbind(), strict=True))

    def prepare_training(self, datamodule: Any) -> None:
        """Load what only training needs, before anything is trained; nothing by default.

        Args:
            datamodule: Of the training, set up.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Change a training batch on its device, before the loss; nothing by default."""
        return batch

    def _refuse_nan(self, loss: Tensor) -> None:
        # A look at a CUDA scalar waits for the device, so there only every 20th step pays for it.
        if loss.device.type != "cpu" and self.global_step % 20:
            return
        problem = None
        if not math.isfinite(loss.item()):  # a twentieth of the time of torch's
            left = "the last checkpoint stays" if self._is_saved() else "there is no checkpoint yet"
            problem = (
                f"the loss is {loss.item()} at step {self.global_step}; training stops here, "
                f"{left}. Lower optimizer.lr, lengthen schedule.warmup, or set "
                "trainer.gradient_clip_val"
            )
        refuse_together(problem)

    def _is_saved(self) -> bool:
        """Whether the run folder has a checkpoint, also one of before it was resumed."""
        if self._trainer is None:
            return False
        folder = Path(self._trainer.default_root_dir) / "checkpoints"
        return any(folder.glob("*.ckpt"))
