"""Addresses survive the wire, and nothing else is taken for one."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.address import PoolAddress, decode_group, encode_group
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
    for decode in (PoolAddress.decode, decode_group):
        with pytest.raises(AddressRefused):
            decode(data)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_a_groups_address_is_that_of_each_rank_in_order(addresses):
    assert list(decode_group(encode_group(addresses))) == addresses


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=3), st.data())
def test_a_groups_address_with_any_byte_changed_or_lost_is_refused(addresses, data):
    address = encode_group(addresses)
    at = data.draw(st.integers(0, len(address) - 1))
    for wrong in (address[:at], address[:at] + bytes([address[at] ^ 1]) + address[at + 1 :], address + b"0"):
        with pytest.raises(AddressRefused):
            decode_group(wrong)


@pytest.mark.parametrize("body", ["00000000", "01000000", "0100000005000000aa", "ffffffff00000000"])
def test_a_groups_address_that_does_not_add_up_is_refused(body):
    data = bytes.fromhex(body)
    with pytest.raises(AddressRefused, match="ranks"):
        decode_group(b"KVG1" + zlib.crc32(data).to_bytes(4, "little") + data)
