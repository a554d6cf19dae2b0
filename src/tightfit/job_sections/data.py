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
FORMAT_SETTINGS = ("fields", "chat_template", "loss_on")  # fields of a DataSpec that need a format
TEXT_SOURCES = ("text", "jsonl", "parquet", "dataset")  # of a SourceSpec
SOURCES = (*TEXT_SOURCES, "sources", "images", "synthetic", "python")  # of a DataSpec


class SourceSpec(Value):
    """One of several sources of text: exactly one of text, jsonl, parquet, dataset.

    weight  how often samples of this source are drawn, in proportion to the weights of the other
            sources. Example: with the weights 3 and 1, 3 of 4 training samples are of the first
            source, whatever the sizes of the sources
    field, target_field, label_field, format, fields
            as in DataSpec, if this source has fields other than those of the data
    """

    weight: float = Field(1.0, gt=0)
    text: str | list[str] | None = None
    jsonl: str | list[str] | None = None
    parquet: str | list[str] | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    field: str | None = None
    target_field: str | None = None
    label_field: str | None = None
    format: Format | None = None
    fields: dict[str, str] | None = None

    def __str__(self) -> str:
        return str(self.text or self.jsonl or self.parquet or self.dataset)


class DataSpec(Value):
    """Describes the data of a training. Exactly one source must be given: text, jsonl, parquet,
    dataset, sources, images, synthetic or python. The other fields say how samples are made from
    this source.

    With `sources`, samples of several sources of text are drawn in proportion to their weights. All
    other fields hold for each of the sources that does not set them itself.

    With a `format`, the rows of the source are conversations for fine-tuning, and by default only
    the responses count in the loss. Each sequence then has one conversation (packing: padded), or
    several that do not attend to one another (packing: separate).
    """

    text: str | list[str] | None = Field(None, description="a file, a folder, a glob, a URL, or python-stdlib")
    jsonl: str | list[str] | None = Field(None, description="a file, a folder, a glob, or a URL that fsspec reads")
    parquet: str | list[str] | None = Field(None, description="the same, of parquet files")
    dataset: str | None = Field(
        None,
        description="a folder written by datasets.save_to_disk, a folder of data files, or a data set of the Hub, such as org/name",
    )
    subset: str | None = Field(None, description="dataset: the name of a subset (a configuration) of the data set")
    split: str | None = Field(None, description="dataset: the split, such as train[:10%]; the default is train")
    sources: tuple[SourceSpec, ...] | None = Field(
        None, description="several sources of text, drawn by weight: [{jsonl: a, weight: 3}, {jsonl: b}]"
    )
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
    held_out: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the samples kept for evaluation; null: 0.01 if the job evaluates on them, else 0",
    )
    skip_damaged: bool = False
    streaming: bool = Field(
        False, description="tokenize text while training reads it, in the order of the source, with a shuffle buffer"
    )
    shuffle_buffer: int = Field(
        1000, gt=0, description="streaming: how many samples the shuffle buffer holds; 1 keeps the order of the source"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        check_one_source("data", {name: getattr(self, name) for name in SOURCES})
        _check_split("data", self)
        if self.streaming and not any(getattr(self, name) for name in (*TEXT_SOURCES, "sources")):
            raise InputError(
                "job: data.streaming",
                "reads text, and this data has none",
                "leave out data.streaming, or use data.text, data.jsonl, data.parquet, data.dataset or data.sources",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _pad_conversations(cls, content: Any) -> Any:
        """Set packing to padded if the section or one of its sources has a format, and no packing."""
        if isinstance(content, dict) and content.get("packing") is None and _has_format(content):
            return {**content, "packing": "padded"}
        return content

    @model_validator(mode="after")
    def _consistent_format(self) -> Self:
        rows = self.jsonl or self.parquet or self.dataset or self.sources
        if self.packing == "separate" and not (rows or self.text):
            raise InputError(
                "job: data.packing=separate",
                "packs texts, and this data has none",
                "leave out data.packing, or use data.text, data.jsonl, data.parquet or data.dataset",
            )
        if self.format is None:
            if any(source.format for source in self.sources or ()):
                return self
            for name in FORMAT_SETTINGS:
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

    @model_validator(mode="after")
    def _consistent_sources(self) -> Self:
        for number, source in enumerate(self.sources or ()):
            section = f"data.sources[{number}]"
            check_one_source(section, {name: getattr(source, name) for name in TEXT_SOURCES})
            _check_split(section, source)
            if source.target_field is not None and self.target_field is None:
                raise InputError(
                    f"job: {section}.target_field={source.target_field}",
                    "the sources without a field of their own have no target text",
                    f"set data.target_field: {source.target_field}, which holds for all sources",
                )
            try:
                self._part(source)
            except InputError as error:
                asked = error.asked.replace("job: data", f"job: {section}", 1)
                raise InputError(asked, error.found, error.fix) from None
        return self

    def without_effect(self, task: str | None) -> list[str]:
        """Return one sentence for each field that has a value other than its default, and that is not
        read for this data and this task. The fields of `sources` are not examined."""
        pairs = task == "seq2seq-lm" and (self.target_field is not None or self.synthetic is not None)
        masks = task == "masked-lm" or (task == "seq2seq-lm" and self.target_field is None)
        images = self.images or self.synthetic == "images" or (self.dataset and task == "classification")
        unread = {
            "samples": ""
            if self.synthetic
            else "is for synthetic data; data.split, such as train[:1000], takes some rows",
            "shuffle_buffer": "" if self.streaming else "is for data.streaming",
            "image_size": "" if images or self.python else "is for images",
            "label_field": "" if task in ("classification", None) else "is for the task classification",
            "target_length": "" if pairs else "is for the target texts of the task seq2seq-lm",
            "mask_probability": "" if masks else "is for masked-lm and for the spans of seq2seq-lm",
            "field": "is for rows with fields"
            if self.text
            else "is not read with data.format; name fields in data.fields"
            if self.format
            else "",
        }
        return [
            f"data.{name}={getattr(self, name)} has no effect: it {why}"
            for name, why in unread.items()
            if why and getattr(self, name) != type(self).model_fields[name].default
        ]

    def parts(self) -> list[DataSpec]:
        """Return a DataSpec for each of the sources, with the other fields of this one. Without
        `sources`, return only this DataSpec."""
        return [self._part(source) for source in self.sources] if self.sources else [self]

    def _part(self, source: SourceSpec) -> DataSpec:
        own = {name: value for name, value in source if name != "weight" and value is not None}
        kind = own.get("format", self.format)
        if kind is None:  # settings of formats hold for the sources that have one
            own |= dict.fromkeys(FORMAT_SETTINGS)
        elif kind != self.format:  # other formats have other fields
            own.setdefault("fields", None)
        return self.replace(sources=None, **own)

    def __str__(self) -> str:
        return str(
            self.text
            or self.jsonl
            or self.parquet
            or self.dataset
            or ", ".join(map(str, self.sources or ()))
            or self.images
            or self.python
            or f"synthetic {self.synthetic}"
        )


def _check_split(section: str, data: DataSpec | SourceSpec) -> None:
    for name in ("subset", "split"):
        if data.dataset is None and getattr(data, name) is not None:
            raise InputError(
                f"job: {section}.{name}", f"is given without {section}.dataset", f"leave out {section}.{name}"
            )


def _has_format(content: dict[str, Any]) -> bool:
    """Return whether a DataSpec's content, or one of its sources, has a format."""
    sources = content.get("sources")
    sections = [content, *(sources if isinstance(sources, list | tuple) else ())]
    found = (
        section.get("format") if isinstance(section, dict) else getattr(section, "format", None) for section in sections
    )
    return any(one is not None for one in found)
