"""Defines the section `data` of a job: where samples come from, and how they are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tightfit.errors import InputError
from tightfit.job_sections.checks import check_one_source
from tightfit.values import Value, nearest

Format = Literal["prompt-response", "messages", "alpaca", "sharegpt"]
FORMAT_FIELDS: dict[Format, tuple[str, ...]] = {
    "prompt-response": ("prompt", "response"),
    "messages": ("messages",),
    "alpaca": ("instruction", "input", "output"),
    "sharegpt": ("conversations",),
}  # the fields of a row in each format
SOURCES = ("text", "jsonl", "parquet", "dataset", "images", "synthetic", "python")  # of a DataSpec


class DataSpec(Value):
    """Describes the data of a training. Exactly one source must be given: text, jsonl, parquet,
    dataset, images, synthetic or python. The other fields say how samples are made from this
    source.

    With a `format`, the rows of the source are conversations for fine-tuning, and by default only
    the responses count in the loss. Each sequence then has one conversation (packing: padded), or
    several that do not attend to one another (packing: separate).
    """

    text: str | list[str] | None = Field(None, description="a file, a folder, a glob, or python-stdlib")
    jsonl: str | list[str] | None = None
    parquet: str | list[str] | None = None
    dataset: str | None = Field(None, description="a folder written by datasets.save_to_disk")
    images: str | None = Field(None, description="a folder with one sub-folder per class, or digits")
    synthetic: Literal["tokens", "images"] | None = None
    python: str | None = None
    field: str = "text"
    target_field: str | None = Field(None, description="seq2seq: the field of the target text")
    label_field: str = "label"
    format: Format | None = Field(None, description="what a row of jsonl, parquet or dataset holds for fine-tuning")
    fields: dict[str, str] | None = Field(
        None, description="names of the format's fields in the rows: {prompt: question, response: answer}"
    )
    chat_template: str | None = Field(
        None,
        description="a file with a Jinja template, chatml, or tokenizer: the tokenizer's own, which messages and sharegpt use "
        "by default",
    )
    loss_on: Literal["response", "all"] | Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="with a format: response (the default), all, or the roles whose tokens count in the loss"
    )
    tokenizer: str | None = Field(
        None,
        description="a folder, a tokenizer.json or a model on the Hub; if left out, the tokenizer in the folder of model.from; "
        "without one, a byte-level BPE is trained on the data",
    )
    vocabulary_size: int | None = Field(
        None,
        gt=0,
        description="train a BPE of so many tokens; if left out, a BPE has the size of the model's vocabulary",
    )
    sequence_length: int = Field(256, gt=1, le=2**24)
    target_length: int | None = Field(None, gt=1, le=2**24)
    packing: Literal["packed", "padded", "separate"] = Field(
        "packed",
        description="packed: texts are joined and cut; padded: one text in each sequence; separate: several whole texts in each "
        "sequence, which do not attend to one another. With a format, padded is the default",
    )
    mask_probability: float = Field(0.15, gt=0, lt=1)
    image_size: int | None = Field(None, gt=0)
    samples: int = Field(4096, gt=0, description="how many synthetic samples")
    held_out: float = Field(0.01, ge=0, lt=1, description="share of the samples kept for evaluation")
    skip_damaged: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        check_one_source("data", {name: getattr(self, name) for name in SOURCES})
        return self

    @model_validator(mode="before")
    @classmethod
    def _pad_conversations(cls, content: Any) -> Any:
        """Set packing to padded if the section has a format and no packing."""
        if isinstance(content, dict) and content.get("format") is not None and content.get("packing") is None:
            return {**content, "packing": "padded"}
        return content

    @model_validator(mode="after")
    def _consistent_format(self) -> Self:
        rows = self.jsonl or self.parquet or self.dataset
        if self.packing == "separate" and not (rows or self.text):
            raise InputError(
                "job: data.packing=separate",
                "packs texts, and this data has none",
                "leave out data.packing, or use data.text, data.jsonl, data.parquet or data.dataset",
            )
        if self.format is None:
            for name in ("fields", "chat_template", "loss_on"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"job: data.{name}",
                        "is given without data.format",
                        f"add data.format ({', '.join(FORMAT_FIELDS)}), or leave out data.{name}",
                    )
            return self
        if not rows:
            raise InputError(
                f"job: data.format={self.format}",
                "needs rows with fields",
                "use data.jsonl, data.parquet or data.dataset, or leave out data.format",
            )
        if self.packing == "packed":
            raise InputError(
                "job: data.packing=packed",
                f"cuts texts anywhere, and data.format={self.format} keeps prompts and responses together",
                "use data.packing: separate, or padded",
            )
        known = FORMAT_FIELDS[self.format]
        for name in self.fields or {}:
            if name not in known:
                raise InputError(
                    f"job: data.fields.{name}", f"is no field of the format {self.format}", nearest(name, list(known))
                )
        return self

    def __str__(self) -> str:
        return str(
            self.text
            or self.jsonl
            or self.parquet
            or self.dataset
            or self.images
            or self.python
            or f"synthetic {self.synthetic}"
        )
