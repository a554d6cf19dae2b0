"""Generates a sample of text with the trained language model: a short prompt and the continuation
that the model writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.engine.metrics import full_logits
from tightfit.engine.rng import evaluating
from tightfit.models import is_transformers_model, position_count
from tightfit.models.objective import TASKS
from tightfit.runtime.activity import note_activity
from tightfit.runtime.run import Run

PROMPT = "def "
TOKENS = 60
TEMPERATURE = 0.8
TOP = 40


def sample_text(run: Run, prompt: str = PROMPT, tokens: int = TOKENS) -> str | None:
    """Return `prompt` followed by up to `tokens` sampled tokens (temperature 0.8, top 40). The same
    weights give the same text.

    This function is a collective: all devices must call it, and all take part in every forward, as
    in training. Rank 0 draws each token, and all devices append it.

    Returns None if the model is not a transformers model that generates text from a prompt alone,
    if the data has no tokenizer, or if the prompt already fills the model's positions. Also returns
    None if no device runs the whole forward (pipelines and parameter servers).
    """
    tokenizer = run.data.tokenizer
    if tokenizer is None or not is_transformers_model(run.model) or run.executor is not None:
        return None
    config = run.model.config
    if not run.model.can_generate() or config.is_encoder_decoder:  # type: ignore[operator, union-attr]
        return None
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=run.device)
    positions = position_count(config)
    room = tokens if positions is None else min(tokens, positions - ids.shape[1])
    if room < 1:
        return None
    generator = torch.Generator().manual_seed(run.job.train.seed)
    with _forwards_alone(run):
        for number in range(room):
            note_activity(f"sample text, token {number + 1}")
            token = _drawn(_next_logits(run, ids), generator).to(run.device)
            if run.mesh is not None:
                dist.broadcast(token, src=0)
            ids = torch.cat([ids, token.view(1, 1)], 1)
            if int(token) == tokenizer.eos_token_id:
                break
    return tokenizer.decode(ids[0], skip_special_tokens=True)


@contextmanager
def _forwards_alone(run: Run) -> Iterator[None]:
    """A context manager, inside which the model runs forwards without a loss, without gradients, in
    evaluation mode and uncompiled. With context parallelism, each device computes the full
    sequence, without ring attention."""
    with ExitStack() as entered:
        entered.enter_context(evaluating(run.model))
        entered.enter_context(torch.no_grad())
        entered.enter_context(torch.compiler.set_stance("force_eager"))
        if run.plan.precision.endswith("-mixed"):
            dtype = torch.bfloat16 if run.plan.precision == "bf16-mixed" else torch.float16
            entered.enter_context(torch.autocast(run.device.type, dtype))
        if run.plan.cp > 1:
            ring = run.model.config._attn_implementation  # type: ignore[union-attr]
            run.model.set_attn_implementation("sdpa")  # type: ignore[operator]
            entered.callback(run.model.set_attn_implementation, ring)  # type: ignore[arg-type]
        yield


def _next_logits(run: Run, ids: Tensor) -> Tensor:
    """Return the logits of the next token, shape (vocabulary,). With tensor parallelism, the
    devices' shards of the vocabulary are gathered.

    ids  the tokens so far, shape (1, length)
    """
    logits_of = TASKS["causal-lm"].logits
    assert logits_of is not None
    logits = logits_of(run.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return full_logits(run, logits[0, -1].float())


def _drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one of the 40 most likely tokens at temperature 0.8. Return it as a tensor of shape
    (1,).

    logits  logits of the next token, shape (vocabulary,)
    """
    values, tokens = (logits.cpu() / TEMPERATURE).topk(min(TOP, len(logits)))
    return tokens[torch.multinomial(values.softmax(-1), 1, generator=generator)]
