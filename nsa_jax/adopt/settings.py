"""The settings of a run: everything that decides its numbers, some of them to rounding alone."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from nsa_jax.adopt.command_line import InputError, in_options
from nsa_jax.adopt.files import digests
from nsa_jax.config import NSAConfig
from nsa_jax.nn.distillation import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Model, data order and schedule of one run.

    Attributes:
      source: what `nsa_jax.pretrained.load` reads.
      ignore: fields of its configuration that change nothing.
      field: of a JSONL file or dataset, which holds the text.
      selector: "importance" or "indexer".
      attention: kinds of the layers, one for all or one for each; none for those that `to_nsa` chooses.
      branches: of NSA layers.
      compression: "mlp" or "mean".
      l, d, block, n, w: sizes of the compression blocks, their stride, size and number of selected blocks,
        and the window.
      length: tokens of a row.
      rope_base: base of the rotary embedding; None for that of the source.
      batch: rows of a step.
      distil_steps: optimizer steps of the first stage.
      sparse_steps: of the second.
      train_dense: whether the dense model is trained on the text of the second stage, too.
      learning_rate: peak for parameters of the dense model.
      new_learning_rate: peak for new parameters.
      warmup: steps in which the rates rise.
      selection_weight: of the selection loss in the second stage.
      selection_target: of the same: "selected", attention in the chosen blocks, or "dense", all of it.
      logit_weight: of the divergence from the dense model's distributions there; 0 for none.
      dtype: of the computation. Parameters are float32.
      remat: "none", "attention" or "layer".
      held_out: share of the text that is not trained on.
      rows: most held-out rows to measure losses on.
      needles: questions for each depth, 0 for none.
      needle_lengths: tokens of their prompts.
      seed: of new parameters and the order of the text.
    """

    source: str
    ignore: tuple[str, ...] = ()
    field: str = "text"
    selector: str = "indexer"
    attention: tuple[str, ...] = ()
    branches: tuple[str, ...] = ("slc",)
    compression: str = "mlp"
    l: int = NSAConfig().compression_block_size  # noqa: E741 (the paper's name)
    d: int = NSAConfig().compression_stride
    block: int = 128
    n: int = NSAConfig().num_selected_blocks
    w: int = NSAConfig().window_size
    length: int = 8192
    batch: int = 4
    distil_steps: int = 0
    sparse_steps: int = 1500
    train_dense: bool = False
    learning_rate: float = 1e-4
    new_learning_rate: float = 3e-4
    warmup: int = 20
    rope_base: float | None = None
    selection_weight: float = 1.0
    selection_target: Target = "selected"
    logit_weight: float = 0.0
    dtype: str = "bfloat16"
    remat: str = "attention"
    held_out: float = 0.05
    rows: int = 16
    needles: int = 8
    needle_lengths: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        if self.length <= self.n * self.block:
            raise InputError(
                f"--length must be longer than the selected blocks, got {self.length} for {self.n} blocks of "
                f"{self.block} tokens. Pass longer rows, or smaller or fewer blocks."
            )
        if self.distil_steps and not self.can_be_taught:
            raise InputError(
                "--distil-steps must be 0 where no parameter chooses the blocks, got "
                f"{self.distil_steps} for --compression mean. Pass --compression mlp or --selector indexer."
            )

    @property
    def nsa(self) -> NSAConfig:
        """The block structure. Raises InputError where there is none of these sizes."""
        try:
            return NSAConfig(
                compression_block_size=self.l,
                compression_stride=self.d,
                selection_block_size=self.block,
                num_selected_blocks=self.n,
                window_size=self.w,
            )
        except ValueError as error:
            raise InputError(in_options(error)) from error

    @property
    def can_be_taught(self) -> bool:
        """Whether the choice of blocks has parameters."""
        return self.selector == "indexer" or self.compression == "mlp"

    @property
    def conversion(self) -> dict[str, Any]:
        """Arguments of `to_nsa`."""
        several = len(self.attention) > 1
        return dict(
            nsa=self.nsa,
            attention=self.attention if several else "".join(self.attention) or None,
            selector=self.selector,
            branches=self.branches,
            compression=self.compression,
        )

    @property
    def training(self) -> dict[str, Any]:
        """Fields of a `TransformerConfig` that say how it is trained."""
        remat = {"none": False, "layer": True, "attention": "attention"}[self.remat]
        return dict(remat=remat, scan_layers=True)

    def identity(self, files: Sequence[pathlib.Path]) -> dict[str, Any]:
        """What two runs must share to be the same run, as JSON reads it back.

        It lacks what changes rounding alone, as a mesh does: a run may go on with another `remat`.
        """
        shared = dataclasses.asdict(self) | {"files": digests(files)}
        del shared["remat"]
        return json.loads(json.dumps(shared))
