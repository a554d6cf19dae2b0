"""Writes a tiny Llama with random weights, and its tokenizer, with save_pretrained.

It stands in for a model that you have downloaded, so that the example runs anywhere in seconds:

    python examples/fine_tuning/make_tiny_model.py

writes examples/fine_tuning/model. Any folder with config.json, safetensors files and a tokenizer
can take its place.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
END = "<|endoftext|>"


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on this example's texts."""
    lines = (HERE / "questions.jsonl").read_text().splitlines()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.loads(line)["text"] for line in lines], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def make_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Llama and its tokenizer.")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "model")
    folder = parser.parse_args().folder
    make_tokenizer(512).save_pretrained(folder)
    make_model(512).save_pretrained(folder)
    print(folder)


if __name__ == "__main__":
    main()
