"""Addresses survive the wire, and nothing else is taken for one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.connector import AddressRefused, KvPool
from baton.proto.messages import KvGeometry

GEOMETRY = KvGeometry("demo", "1", "float32", block_size=4, num_layers=2, num_kv_heads=3, head_dim=8)


@given(st.text(max_size=40), st.binary(max_size=600))
def test_an_address_decodes_to_what_was_encoded(name, metadata):
    pool = KvPool(torch.zeros(5, 2, 3, 2, 4, 8), GEOMETRY)
    address = PoolAddress.of(pool, "nixl", name, metadata)
    assert PoolAddress.decode(address.encode()) == address


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(AddressRefused):
        PoolAddress.decode(data)
