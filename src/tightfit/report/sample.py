"""A sample of what a language model learned: a short prompt, continued."""

from __future__ import annotations

import torch

from tightfit.methods.run import Run
from tightfit.models import task_of

PROMPT = "def "
TOKENS = 60


def sample_text(run: Run, prompt: str = PROMPT, tokens: int = TOKENS) -> str | None:
    """`prompt` and up to `tokens` sampled tokens (temperature 0.8, top 40), None where the model is no causal language
    model of transformers or the data has no tokenizer. The draw is the same for the same weights."""
    tokenizer = run.data.tokenizer
    if tokenizer is None or task_of(run.job.model) != "causal-lm":
        return None
    inputs = torch.tensor([tokenizer(prompt)["input_ids"]], device=run.device)
    run.model.eval()
    try:
        with (
            torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            torch.manual_seed(run.job.train.seed)
            output = run.model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=tokens,
                do_sample=True,
                temperature=0.8,
                top_k=40,
                pad_token_id=tokenizer.eos_token_id or 0,
                use_cache=True,
            )
    finally:
        run.model.train()
    return tokenizer.decode(output[0], skip_special_tokens=True)
