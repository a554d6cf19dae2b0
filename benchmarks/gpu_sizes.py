"""The sizes of each part of benchmarks/gpu.py: on one GPU, and as the small copy that a CPU runs in a
minute.

Both run the same code. Only these sizes differ. Imports nothing but the standard library.
"""

from __future__ import annotations

from typing import Any

ORDER = ("machine", "tests", "methods", "calibration", "llama", "ladder", "rivals", "largest", "kernels")
"""Most important first; benchmarks/gpu.py numbers them from 1."""

LIMIT_S = {
    "machine": 40,
    "tests": 190,
    "methods": 190,
    "calibration": 160,
    "llama": 150,
    "ladder": 80,
    "rivals": 240,
    "largest": 90,
    "kernels": 20,
}
"""Seconds that a part may take, at most; less where the budget of all ends before."""

NO_DROPOUT_GPT2 = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(
    hidden: int, layers: int, heads: int, inner: int, vocabulary: int, length: int, kv: int = 8
) -> dict[str, Any]:
    """A Llama of these dimensions. inner: width of the MLP; kv: key/value heads."""
    return {
        "architecture": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(kv, heads),
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }


def net_specs(width: int, layers: int) -> dict[str, dict[str, Any]]:
    """The nets of the part `methods` that transformers makes."""
    heads = max(width // 32, 2)
    return {
        "llama": llama(width, layers, heads, 2 * width, 512, 64, kv=2),
        "bert": {
            "architecture": "bert", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": 2 * width, "vocab_size": 512, "max_position_embeddings": 64, **NO_DROPOUT_BERT,
        },
        "vit": {
            "architecture": "vit", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": 2 * width, "image_size": 32, "patch_size": 8, "num_labels": 10,
        },
    }  # fmt: skip


GPU: dict[str, dict[str, Any]] = {
    "machine": {},
    "tests": {
        "workers": 8,
        "arguments": [
            "-m", "gpu and not slow", "tests/contract", "tests/engine/checkpoint/test_checkpoint.py", "tests/measure",
            "tests/methods/test_float8.py",
            *(f"tests/methods/test_{name}.py" for name in ("allocator", "context_parallel", "loader", "materialize", "offload")),
        ],
    },
    "methods": {"specs": net_specs(256, 4), "length": 64, "batch": 8, "steps": 3, "every": 1, "compiled": ["llama"]},
    "calibration": {"how": "calibrate"},
    "llama": {
        "family": [
            ("llama-3-8b", {"preset": "llama-3-8b"}),
            ("llama-3.2-3b", {"preset": "llama-3.2-3b"}),
            ("llama-3.2-1b", {"preset": "llama-3.2-1b"}),
            ("llama of 0.3B", llama(1024, 16, 16, 4096, 32000, 4096)),
        ],
        "length": 4096,
        "batch": 8,
        "planned_steps": 1000,
        "steps": 8,
        "profiled": 1,
        "attempts": [
            {},
            {"precision": "bf16-true", "rounding": "nearest", "compile": "none"},
            {"precision": "bf16-true", "rounding": "nearest", "compile": "none", "recompute": "full", "micro_batch": 1},
        ],
    },
    "ladder": {"model": {"preset": "vit-l-16", "num_labels": 10}, "steps": 4, "published": True},
    "rivals": {
        "models": {
            "gpt2": {
                "model": {"preset": "gpt2", **NO_DROPOUT_GPT2},
                "length": 1024,
                "batch": 32,
                "micro_batches": [32],
                "steps": 16,
            },
            "bert-base": {
                "model": {"preset": "bert-base", **NO_DROPOUT_BERT},
                "length": 512,
                "batch": 64,
                "micro_batches": [64],
                "steps": 16,
            },
        },
        "rounds": 3,
        "tried": 4,
        "compile": True,
        "pins": {},
        "planned_steps": 100_000,
        "profiled": 2,
        "ready_s": 110,
    },
    "largest": {
        "widths": [
            (2048, 16, 16, 8192), (3072, 28, 24, 8192), (4096, 32, 32, 14336), (5120, 32, 40, 13824),
            (5120, 40, 40, 13824), (5120, 48, 40, 13824), (5120, 48, 40, 17920), (5120, 56, 40, 17920),
            (6144, 48, 48, 20480), (6144, 56, 48, 20480), (6144, 64, 48, 20480), (7168, 56, 56, 20480),
            (7168, 64, 56, 20480), (7168, 72, 56, 20480), (8192, 64, 64, 22528), (8192, 64, 64, 28672),
            (8192, 72, 64, 28672), (8192, 80, 64, 28672), (9216, 80, 72, 28672), (10240, 88, 80, 28672),
        ],
        "vocabulary": 32000,
        "length": 2048,
        "steps": 4,
        "ways": {
            "AdamW": {},
            "AdamW, 8-bit states": {"states": "8-bit"},
            "AdamW, offload": {"offload": ["states", "gradients", "parameters"], "update_in_backward": False},
        },
        "trained": ["AdamW", "AdamW, 8-bit states"],
        "lean": {
            "precision": "bf16-true", "micro_batch": 1, "recompute": "full", "chunked_loss": 1024,
            "update_in_backward": True, "materialize": "device", "allocator": "tuned",
        },
    },
    "kernels": {"shown": 15},
}  # fmt: skip

CPU: dict[str, dict[str, Any]] = {
    "machine": {},
    "tests": {
        "workers": 0,
        "arguments": [
            "-m", "not gpu and not slow",
            "tests/contract/test_contract.py::test_reference_plan_is_plain_pytorch[llama-cpu]",
            "tests/contract/test_contract.py::test_reference_plan_is_plain_pytorch[batchnorm-cpu]",
        ],
    },
    "methods": {"specs": net_specs(32, 4), "length": 16, "batch": 4, "steps": 2, "every": 8, "compiled": []},
    "calibration": {"how": "quick"},
    "llama": {
        "family": [
            ("llama that does not fit", llama(8192, 80, 64, 28672, 128256, 32)),
            ("llama of 0.1M", llama(32, 4, 4, 64, 256, 32)),
        ],
        "length": 32,
        "batch": 4,
        "planned_steps": 20,
        "steps": 5,
        "profiled": 1,
        "attempts": [{"compile": "none", "update_in_backward": False, "recompute": "none"}],
    },
    "ladder": {
        "model": {
            "preset": "vit-b-16", "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 96,
            "num_attention_heads": 3, "image_size": 32,
        },
        "steps": 4,
        "published": False,
        "rungs": 2,
    },
    "rivals": {
        "models": {
            "gpt2": {
                "model": {
                    "architecture": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32,
                    **NO_DROPOUT_GPT2,
                },
                "length": 32,
                "batch": 4,
                "micro_batches": [4, 2],
                "steps": 2,
            },
        },
        "rounds": 2,
        "tried": 2,
        "compile": False,
        "pins": {"compile": "none", "recompute": "none", "update_in_backward": False},
        "planned_steps": 20,
        "profiled": 1,
        "ready_s": 600,
    },
    "largest": {
        "widths": [(32, 4, 4, 64), (64, 4, 4, 128), (65536, 80, 512, 262144)],
        "vocabulary": 256,
        "length": 32,
        "steps": 4,
        "ways": {
            "AdamW": {},
            "AdamW, 16-bit states": {"states": "bf16"},  # a processor updates 8-bit states in parts: traces take long
            "AdamW, offload": {"offload": ["states"], "offload_to": "disk", "update_in_backward": False},
        },
        "trained": ["AdamW", "AdamW, 16-bit states"],
        "lean": {
            "precision": "bf16-true", "micro_batch": 1, "recompute": "full", "chunked_loss": 64,
            "update_in_backward": True, "materialize": "device",
        },
    },
    "kernels": {"shown": 15},
}  # fmt: skip
