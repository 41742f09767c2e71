"""Train the quickstart's model by a plain PyTorch loop on one device.

    python examples/plain_loop.py

Model, batches, optimizer and learning rate are the package's; the loop is all here. It has the same
losses and weights as `nanogpt-hf pretrain quickstart`, on a CPU bit for bit. The package's own loop
(nanogpt_hf/training/loop.py) adds what needs more lines: checkpoints, resuming, metrics, reports,
dropout that can be repeated, other methods, and several processes.
"""

import numpy as np
import torch

from nanogpt_hf import load_config, prepare
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.optim.optimizer import build_optimizer, learning_rate_at, set_learning_rate

# Or a recipe of your own. Knobs may follow it: load_config("quickstart", {"model.n_layer": 6}).
config = load_config("quickstart")
size = config.train.min_micro_batch_size
device = "cuda" if torch.cuda.is_available() else "cpu"

# Tokenize the text, unless that was done before, and map the tokens into memory.
prepare(config)
data = load_prepared(config)
batches = Batches(
    data.train,
    order=config.data.order,
    seed=config.train.seed,
    micro_batch_size=size,
    accumulation=config.train.tokens_per_step // (size * config.data.block_size),
)

model_config = build_config(config.model, data.vocab_size, data.end_of_text_id)
model = build_model(model_config, config.train.seed, config.model.init).to(device)
optimizer = build_optimizer(model, config.optim)


def summed_loss(batch):
    """Cross-entropy of the next token, summed over the targets of a batch."""
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    return model(**batch, num_items_in_batch=1).loss


@torch.no_grad()
def validation_loss():
    """Mean loss of a target of the validation text."""
    model.eval()
    indices = np.arange(len(data.validation))
    chunks = [indices[first : first + size] for first in indices[::size]]
    total = sum(summed_loss(data.validation.batch(chunk)).item() for chunk in chunks)
    model.train()
    return total / data.validation.num_targets(indices)


losses = []
model.train()
for step in range(config.train.max_steps):
    if step % config.eval.every == 0:
        print(f"step {step}: validation loss {validation_loss():.4f}")

    set_learning_rate(optimizer, learning_rate_at(step, config.optim, config.train.max_steps))
    # Each micro-batch adds its gradients. The sum is divided once by the targets of the whole step.
    num_targets = batches.num_targets(step)
    step_loss = torch.zeros((), device=device)
    for batch in batches.micro_batches(step):
        loss = summed_loss(batch) / num_targets
        loss.backward()
        step_loss += loss.detach()
    if config.optim.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()

    losses.append(step_loss.item())
    if (step + 1) % config.tracking.every == 0:
        print(f"step {step + 1}: loss {losses[-1]:.4f}")

final_loss = validation_loss()
print(f"step {config.train.max_steps}: validation loss {final_loss:.4f}")
prompt = data.tokenizer("The ", return_tensors="pt").input_ids.to(device)
text = model.generate(prompt, max_new_tokens=100, do_sample=True)[0]
print(data.tokenizer.decode(text))
