"""What reinforcement learning has in place of prepared data: the questions of a task, and the
model's tokenizer.
"""

import logging

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.prepared import PreparedData, in_memory
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.evaluation.answers import AnswerSampler
from nanogpt_hf.rl.rollouts import Rollouts
from nanogpt_hf.tasks.load import load_task
from nanogpt_hf.tasks.reward import RewardFunction

logger = logging.getLogger(__name__)


def load_questions(config: Config) -> PreparedData:
    """The data of a run of reinforcement learning: blocks that are sampled at each step, and a
    manifest of the task.

    Raises UserError if the task, its questions, the reward or the tokenizer cannot be used.
    """
    rl, name = config.rl, config.rl.task
    assert name is not None  # the `rl` command requires it
    task = load_task(
        name, config.data, reward=rl.reward, options=rl.options, seed=config.train.seed
    )
    tokenizer = build_tokenizer(config.data.tokenizer, ()).hf
    chat = ChatFormat(tokenizer, fixed_day=True) if tokenizer.chat_template else None
    sampler = AnswerSampler(
        tokenizer,
        RewardFunction(task.score, rl.reward_seconds, rl.reward_errors),
        max_new_tokens=rl.max_new_tokens,
        temperature=rl.temperature,
        batch_size=rl.batch_size or config.train.min_micro_batch_size,
        positions=config.data.block_size,
    )
    for question in (task.train[0], task.held_out[0]):
        sampler.encode(chat, question)
    rollouts = Rollouts(config, task, sampler)
    prompt = tokenizer.decode(sampler.encode(chat, task.train[0]))
    logger.info(
        f"{task.name}: {len(task.train):,} questions, {len(task.held_out):,} held out; the "
        f"first: {prompt!r:.200}"
    )
    return in_memory(
        rollouts,
        rollouts,
        tokenizer,
        source=config.data.source,
        revision=task.revision,
        end_of_turn_id=chat and chat.end_of_turn_id(),
        documents=(len(task.train), len(task.held_out)),
    )
