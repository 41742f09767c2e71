"""Training loss of each source of a mixture, at the steps that are logged."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import numpy as np
import torch

from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.model.loss_gpt import Head
from nanogpt_hf.training.run import Run


class SourceLosses:
    """Computes the loss of each source's rows from the head's input, a second time, at the steps
    that are logged.

    The step's numbers stay as they are, and the host does not wait: the sums stay on the device
    until the step's loss is read. The last stage of a pipeline measures. Not measured with a
    head that is not ours, such as an adapter's.
    """

    def __init__(self, run: Run):
        self.run, self.every = run, run.config.tracking.every
        self.names = [source.name for source in sources_of(run.config.data)]
        self._is_mixture = is_mixture(run.config.data)
        self._sums: torch.Tensor | None = None
        self._step = 0  # the step of the batches

    @contextmanager
    def measured_step(self, step: int, data_step: int) -> Iterator[None]:
        """Context for the step that ends at `step`, on the batches of `data_step`."""
        run, self._sums = self.run, None
        if not self._is_mixture or step % self.every:
            yield
            return
        model: Any = run.accelerator.unwrap_model(run.model)
        head, pipeline = model.get_output_embeddings(), run.pipeline
        if not (
            isinstance(head, Head) if pipeline is None else pipeline.stage.computes_loss_in_head
        ):
            yield
            return
        owners = run.batches.blocks.owners(run.batches.indices(data_step))
        owners = owners.reshape(-1, run.batches.micro_batch_size)
        sums = torch.zeros(run.batches.accumulation, len(self.names), device=run.accelerator.device)
        indices = count()

        @torch.no_grad()
        def add(head: Head, inputs: tuple[Any, ...]) -> None:
            hidden, targets, vocab_size = inputs
            index = next(indices) if pipeline is None else pipeline.micro_batch
            sources, own_sums = owners[run.batches.micro_batch_number(index)], sums[index].zero_()
            hidden, targets = (
                tensor.unflatten(0, (len(sources), -1)) for tensor in (hidden, targets)
            )
            for source in np.unique(sources):
                own = torch.from_numpy(np.flatnonzero(sources == source)).to(
                    hidden.device, non_blocking=True
                )
                own_sums[source] += head.forward(
                    hidden[own].flatten(0, 1), targets[own].flatten(), vocab_size
                )

        handle = head.register_forward_pre_hook(add)
        try:
            yield
        finally:
            handle.remove()
        if run.config.train.gradient_groups and sums.device.type != "mps":  # it has no float64
            sums = sums.double()  # exact, so that the order does not matter
        self._sums, self._step = cast(torch.Tensor, sum(sums)), data_step  # one after the other

    def report(self) -> dict[str, float]:
        """The mean losses of the last `measured_step`, of the sources that it drew from.

        All processes call it.
        """
        if self._sums is None:
            return {}
        sums = sum_over_ranks(self.run.accelerator, self.run.mesh, self._sums).tolist()
        batches = self.run.batches
        targets = batches.blocks.targets_by_source(batches.indices(self._step))
        names = zip(self.names, sums, targets, strict=True)
        return {f"train/loss/{name}": total / count for name, total, count in names if count}
