"""A record says which processor it was measured on."""

from __future__ import annotations

import pytest

from benchmarks import provenance, tables
from benchmarks.record_shapes import SHAPES


def cpu_info(vendor: str, family: int, model: int, flags: str) -> str:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: A CPU\nflags\t\t: {flags}"
    return f"{one}\n\n{one}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (cpu_info("AuthenticAMD", 25, 1, "avx2"), "Zen 3, without bf16 instructions"),
        (cpu_info("AuthenticAMD", 25, 17, "avx2 avx512_bf16"), "Zen 4, with bf16 instructions"),
        (cpu_info("AuthenticAMD", 26, 2, "avx512_bf16"), "Zen 5, with bf16 instructions"),
        (cpu_info("GenuineIntel", 6, 207, "avx512f"), "Emerald Rapids, without bf16 instructions"),
        (cpu_info("GenuineIntel", 6, 1, "avx512f"), "A CPU, without bf16 instructions"),
        (cpu_info("GenuineIntel", 6, 143, "amx_bf16"), "Sapphire Rapids, with bf16 instructions"),
        ("", None),
    ],
)
def test_processor(text: str, said: str | None) -> None:
    assert provenance.processor(text) == said


def test_a_record_begins_with_its_origin() -> None:
    assert {"code", "commit", "date", "machine", "processor"} == provenance.provenance().keys()


def test_records_may_have_an_origin() -> None:
    SHAPES["search"].model_validate({**tables.read("search"), **provenance.provenance()})
