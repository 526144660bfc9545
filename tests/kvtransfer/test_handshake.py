"""Two workers that do not fit are told so by the field that differs, with both values; others may meet."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from baton.kvtransfer.handshake import Party, mismatch
from baton.proto.messages import KvGeometry

GEOMETRY = KvGeometry("demo@1", "0.1.0", "bfloat16", block_size=16, num_layers=2, num_kv_heads=4, head_dim=8)
LENDER = Party("prefill-0", "nixl", GEOMETRY)
OTHERS = {
    "model": "demo@2",
    "version": "0.2.0",
    "dtype": "float16",
    "block_size": 32,
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 16,
    "layout": "layer,block",
}


def reader(connector: str = "nixl", **changes: object) -> Party:
    return Party("decode-0", connector, replace(GEOMETRY, **changes))


def test_two_that_are_alike_fit() -> None:
    assert mismatch(LENDER, reader()) == ""


def test_every_field_of_the_geometry_is_compared() -> None:
    assert {field.name for field in fields(KvGeometry)} == OTHERS.keys() | {"tp_size"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_differs_is_named_with_both_values(name: str) -> None:
    said = mismatch(LENDER, reader(**{name: OTHERS[name]}))
    assert said == f"{name} is {getattr(GEOMETRY, name)!r} on prefill-0 and {OTHERS[name]!r} on decode-0"


def test_another_version_is_the_reason_whatever_else_differs() -> None:
    assert mismatch(LENDER, reader(**OTHERS)).startswith("version is '0.1.0' on prefill-0 and '0.2.0' on decode-0")


def test_another_connector_does_not_fit() -> None:
    assert mismatch(LENDER, reader("nccl")) == "connector is 'nixl' on prefill-0 and 'nccl' on decode-0"


def test_unequal_tensor_parallel_fits_where_heads_can_be_shared_out() -> None:
    assert mismatch(LENDER, reader(tp_size=2)) == ""
    assert mismatch(LENDER, reader(tp_size=8)) == ""
    assert mismatch(LENDER, reader(tp_size=3)).startswith("tensor_parallel is 1 on prefill-0 and 3 on decode-0: ")


def test_unequal_tensor_parallel_does_not_fit_a_connector_that_reads_whole_blocks() -> None:
    lender, two_ranks = replace(LENDER, connector="nccl"), reader("nccl", tp_size=2)
    assert "tensor_parallel is 1 on prefill-0 and 2 on decode-0: the connector nccl" in mismatch(lender, two_ranks)
