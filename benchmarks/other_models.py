"""Other families of models, for `benchmarks/prediction.py --others`.

Most are architectures of transformers. Their steps take a fraction of a second on two cores. The others are small
networks of layers that language models do not have: grouped, transposed and 3-D convolutions, recurrences, graphs,
sorting, Fourier transforms, sampled grids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def _tokens(length: int) -> dict[str, Any]:
    return {"synthetic": "tokens", "sequence_length": length}


IMAGES = {"synthetic": "images", "image_size": 128}
LABELS = {"num_labels": 100}
# name -> model, data, batch
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "albert": (
        {"architecture": "albert", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
         "num_attention_heads": 8, "embedding_size": 128, "vocab_size": 8000},
        _tokens(128), 8,
    ),
    "deberta-v2": (
        {"architecture": "deberta-v2", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 4, "vocab_size": 8000, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        _tokens(128), 8,
    ),
    "fnet": (
        {"architecture": "fnet", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8000},
        _tokens(256), 8,
    ),
    "funnel": (
        {"architecture": "funnel", "d_model": 256, "d_inner": 1024, "block_sizes": [2, 2], "n_head": 4, "vocab_size": 8000},
        _tokens(128), 8,
    ),
    "gemma-3": (
        {"architecture": "gemma3_text", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16000},
        _tokens(256), 4,
    ),
    "mixtral": (
        {"architecture": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 8000},
        _tokens(256), 4,
    ),
    "olmoe": (
        {"architecture": "olmoe", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4,
         "vocab_size": 8000},
        _tokens(256), 4,
    ),
    "opt": (
        {"architecture": "opt", "hidden_size": 384, "ffn_dim": 1536, "num_hidden_layers": 4, "num_attention_heads": 6,
         "word_embed_proj_dim": 384, "vocab_size": 8000},
        _tokens(256), 4,
    ),
    "pegasus": (
        {"architecture": "pegasus", "d_model": 384, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 1536,
         "decoder_ffn_dim": 1536, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "vocab_size": 8000},
        _tokens(128), 8,
    ),
    "xlnet": (
        {"architecture": "xlnet", "d_model": 384, "d_inner": 1536, "n_layer": 4, "n_head": 6, "vocab_size": 8000},
        _tokens(128), 8,
    ),
    "convnext": ({"architecture": "convnext", "depths": [1, 1, 3, 1], **LABELS}, IMAGES, 8),
    "efficientnet": (
        {"architecture": "efficientnet", "width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 1280, **LABELS},
        IMAGES, 4,
    ),
    "mobilenet-v2": ({"architecture": "mobilenet_v2", **LABELS}, IMAGES, 8),
    "mobilevit": ({"architecture": "mobilevit", **LABELS}, IMAGES, 4),
    "poolformer": ({"architecture": "poolformer", "depths": [1, 1, 3, 1], **LABELS}, IMAGES, 8),
    "pvt": ({"architecture": "pvt", "image_size": 128, **LABELS}, IMAGES, 8),
    "regnet": ({"architecture": "regnet", **LABELS}, IMAGES, 8),
    "swin-v2": ({"architecture": "swinv2", "image_size": 128, "window_size": 4, "depths": [1, 1, 3, 1], **LABELS}, IMAGES, 8),
}  # fmt: skip


class Unet(nn.Module):
    """Scales images down by pooling, and up by a transposed convolution and by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.up, self.norm = nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GroupNorm(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        upper = functional.silu(self.norm(self.up(functional.silu(self.first(x)))))
        skipped = functional.interpolate(functional.max_pool2d(x, 2), scale_factor=2, mode="bilinear")
        return self.last(functional.avg_pool2d(upper, 2)) + skipped


class Fourier(nn.Module):
    """Four layers that multiply the Fourier transform of an image by weights (arXiv:2010.08895)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 64, 64, 33) * 0.02)
        self.mix = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight, mix in zip(self.weights, self.mix, strict=True):
            x = functional.gelu(torch.fft.irfft2(torch.fft.rfft2(x.float()) * weight, s=(64, 64)) + mix(x))
        return x


class Graph(nn.Module):
    """The nodes of a fixed graph add up what their neighbours send, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.register_buffer("source", torch.randint(0, 2000, (20000,)))
        self.register_buffer("target", torch.randint(0, 2000, (20000,)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            sent = layer(x)
            received = torch.zeros_like(sent).index_add(1, self.target, sent[:, self.source])
            x = functional.relu(sent + received / 10)
        return x


class Sorted(nn.Module):
    """Linear layers on the sorted inputs and on the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.largest = nn.Linear(512, 512), nn.Linear(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.all(x.sort(-1)[0]) + self.largest(x.topk(64, -1)[0])
        return x


class Warped(nn.Module):
    """Samples images at the points of a learned affine grid (arXiv:1506.02025)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.affine = nn.Conv2d(16, 16, 3, padding=1), nn.Parameter(torch.eye(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.convolution(x)
            grid = functional.affine_grid(self.affine.expand(len(x), 2, 3), list(x.shape), align_corners=False)
            x = functional.grid_sample(x, grid.to(x.dtype), align_corners=False)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(256, 256, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)[0]
        return found


class Prototypes(nn.Module):
    """Returns the mean of learned points, weighted by their distances to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.points = nn.Linear(64, 64), nn.Parameter(torch.randn(512, 64))

    def forward(self, x: Tensor) -> Tensor:
        distances = torch.cdist(self.project(x).float(), self.points.float())
        return torch.softmax(-distances, -1) @ self.points


def temporal() -> nn.Module:
    """1-D convolutions whose windows grow (arXiv:1803.01271)."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv1d(128, 128, 5, padding=2 * 2**at, dilation=2**at), nn.BatchNorm1d(128), nn.GELU())
            for at in range(5)
        )
    )


def volumes() -> nn.Module:
    convolution = nn.Conv3d(32, 32, 3, padding=1)
    first, norm = nn.Conv3d(4, 32, 3, padding=1), nn.BatchNorm3d(32)
    return nn.Sequential(first, norm, nn.ReLU(), convolution, nn.ReLU(), nn.Conv3d(32, 4, 1))


# name -> model, shape of a sample, batch
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "unet": (Unet, (16, 64, 64), 16),
    "fourier": (Fourier, (64, 64, 64), 8),
    "graph": (Graph, (2000, 128), 4),
    "sorted": (Sorted, (256, 512), 16),
    "warped": (Warped, (16, 64, 64), 16),
    "lstm": (Recurrent, (64, 256), 32),
    "prototypes": (Prototypes, (512, 64), 32),
    "temporal": (temporal, (128, 512), 16),
    "volumes": (volumes, (4, 16, 32, 32), 4),
}
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16-mixed", "fused_optimizer": True, "allocator": "tuned"},
)
COMPILED: dict[str, Any] = {**PLANS[1], "compile": "block"}
COMPILED_MODELS = ("albert", "gemma-3", "mixtral", "olmoe", "opt", "pegasus")


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


def job_of(name: str, train: Any) -> Any:
    """The job that trains one of these models."""
    import tightfit

    if name in ARCHITECTURES:
        model, data, _ = ARCHITECTURES[name]
        return tightfit.Job(model=model, data=data, train=train, allow=["bf16"])
    factory, shape, batch = NETWORKS[name]
    samples = [torch.randn(shape) for _ in range(4 * batch)]
    return tightfit.Job(model=factory, data=samples, loss=loss, train=train, allow=["bf16"])


def batch_of(name: str) -> int:
    return (ARCHITECTURES.get(name) or NETWORKS[name])[2]


def pairs() -> list[dict[str, Any]]:
    """Every (model, plan) that is compared."""
    names = [*ARCHITECTURES, *NETWORKS]
    found = [{"model": name, "optimizer": "adamw", "plan": plan} for name in names for plan in PLANS]
    return found + [{"model": name, "optimizer": "adamw", "plan": COMPILED} for name in COMPILED_MODELS]
