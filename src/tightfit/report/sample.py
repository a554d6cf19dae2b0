"""A sample of what a language model learned: a short prompt, continued."""

from __future__ import annotations

import torch

from tightfit.engine.loop import evaluating
from tightfit.engine.randomness import randomness_kept, seed_all
from tightfit.methods.run import Run
from tightfit.models import is_transformers_model

PROMPT = "def "
TOKENS = 60


def sample_text(run: Run, prompt: str = PROMPT, tokens: int = TOKENS) -> str | None:
    """`prompt` and up to `tokens` sampled tokens (temperature 0.8, top 40); the same for the same weights.

    None where the model is not one of transformers' that generates from a prompt alone, or the data has no tokenizer.
    """
    tokenizer = run.data.tokenizer
    if tokenizer is None or not is_transformers_model(run.model):
        return None
    config = run.model.config
    if not run.model.can_generate() or config.is_encoder_decoder:  # type: ignore[operator, union-attr]
        return None
    inputs = torch.tensor([tokenizer(prompt)["input_ids"]], device=run.device)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)  # type: ignore[operator, union-attr]
    room = tokens if positions is None else min(tokens, positions - inputs.shape[1])
    if room < 1:
        return None
    with evaluating(run.model), randomness_kept(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        seed_all(run.job.train.seed)
        output = run.model.generate(  # type: ignore[operator]
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=room,
            do_sample=True,
            temperature=0.8,
            top_k=40,
            pad_token_id=tokenizer.eos_token_id or 0,
            use_cache=True,
        )
    return tokenizer.decode(output[0], skip_special_tokens=True)
