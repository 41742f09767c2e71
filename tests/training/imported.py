"""Imported by the programs of tests that fork: what a run imports, so that it is imported once.

Libraries that others import if they are installed are here, too: accelerate imports DeepSpeed to
unwrap a model.
"""

import functools
import gc
import importlib.util
import os
from importlib import metadata

os.environ["DS_ACCELERATOR"] = "cpu"  # read by DeepSpeed when it is imported

import datasets  # noqa: F401  (with pandas: seconds of each fork)
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.run
import torch.utils.cpp_extension
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
from accelerate.commands import launch  # noqa: F401

from nanogpt_hf.commands import train  # noqa: F401
from nanogpt_hf.evaluation import table  # noqa: F401
from nanogpt_hf.export import card
from nanogpt_hf.model import lora  # noqa: F401
from nanogpt_hf.reports import page
from nanogpt_hf.training import loop, start  # noqa: F401

if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed.runtime.engine
    import deepspeed.runtime.zero.muon.original_muon  # imports inductor
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401
    import torch._functorch.aot_autograd

torch.set_num_threads(1)  # a thread pool does not survive a fork; a process sets its own number
# conftest.py does the same two.
os.fsync = lambda descriptor: None
metadata.metadata = functools.cache(metadata.metadata)
for template in (card._template, page._template):
    template()  # compiled once, and not in each fork
gc.freeze()  # a collection in a fork would copy all pages of what was imported
