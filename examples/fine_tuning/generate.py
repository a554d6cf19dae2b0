"""Continues a text with a model that was fine-tuned.

    python examples/fine_tuning/generate.py runs/fine_tuning "Question: Which command lists files?"

It needs only transformers: a checkpoint is a folder that `from_pretrained` reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a text with a run's newest checkpoint.")
    parser.add_argument("run", type=Path, help="the folder that `tightfit train --out` wrote")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()

    checkpoint = max((arguments.run / "checkpoints").glob("step-*"))  # names sort by step
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    inputs = tokenizer(arguments.prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
