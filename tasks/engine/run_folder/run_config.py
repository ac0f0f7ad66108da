"""The typed config of a run: what every command composes and every part of a run reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Options = dict[str, Any]


class RunConfig(BaseModel):
    """Config of a run.

    Options of groups follow the signatures of what they build, and are checked against them.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    task_name: str
    mode: Literal["fit", "validate", "test", "predict"] = "fit"
    ckpt: str | None = None
    resume: bool = False
    input: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    output_dir: str = "outputs"
    checkpoints: Literal["all", "best", "last"] = "all"
    start: Literal["own", "host"] = "own"
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    checkpoint_every: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    require_pretrained: bool = False
    keep_memory: bool = True
    report: bool = False
    paper: Options | None = None
    optimizer: Options = {}
    logger: Options = {}
    callbacks: Options = {}
    backbone: Options
    trainer: Options = {}
    head: Options
    keep_classifier: bool | None = None
    keep_head: bool = False
    task: Options
    data: Options
    schedule: Options = {}
    protocol: str | None = None
    choices: Options = {}
    overrides: list[str] = []
    automatic: Options = {}

    @property
    def checkpoint(self) -> str:
        """Return ``ckpt``, which every evaluation has."""
        assert self.ckpt is not None
        return self.ckpt

    def plain(self) -> dict[str, Any]:
        """Return the config as plain values, without options that were left out."""
        return self.model_dump(exclude_unset=True)
