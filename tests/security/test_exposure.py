"""What is open and to whom is said before anything starts, and with `require_auth` nothing starts."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from certificates import Certificates, front_pair, member_pair, stranger

from baton.proto.credentials import CredentialsError
from baton.proto.settings import ClusterTlsSettings, SecuritySettings, TlsSettings
from baton.router.__main__ import StartError, check_access, with_absolute_paths
from baton.router.certificates import check_certificates
from baton.router.config import ClusterConfig, ConfigError, defaults, from_mapping
from baton.router.exposure import openings

PAIR = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}


def cluster(host: str, keys: str = "", security: SecuritySettings | None = None) -> ClusterConfig:
    config = defaults()
    router = replace(config.router, host=host, port=0, http_port=0, api_keys_file=keys)
    return replace(config, router=router, security=security or SecuritySettings())


@pytest.fixture
def keys(tmp_path) -> str:
    file = tmp_path / "keys"
    file.write_text("ci: sk-0123456789abcdef\n")
    return str(file)


def test_each_opening_is_named_with_the_setting_that_closes_it(certificates, keys) -> None:
    """All combinations, against the rule said in other words."""
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.1.2.3", "::", "fd00::1")
    fronts = (TlsSettings(), certificates.tls, certificates.mutual_tls)
    inners = (ClusterTlsSettings(), certificates.cluster_tls)
    for host, file, front, inner, required in product(hosts, ("", keys), fronts, inners, (False, True)):
        remote = host not in ("127.0.0.1", "::1", "localhost")
        found = " / ".join(openings(cluster(host, file, SecuritySettings(required, front, inner))))
        anybody = not file and not front.client_ca_file and (remote or required)
        assert ("router.api_keys_file" in found) == anybody
        assert ("security.tls\b" in found or found.count("set security.tls") > 0) == (remote and not front.cert_file)
        assert ("security.cluster_tls" in found) == (remote and not inner.cert_file)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_on_loopback_nothing_is_said(host, capsys) -> None:
    check_access(cluster(host))
    assert capsys.readouterr().err == ""


def test_beyond_loopback_one_line_says_what_is_open(capsys) -> None:
    check_access(cluster("0.0.0.0"))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: warning: open to whoever reaches 0.0.0.0: ")
    for setting in ("router.api_keys_file", "security.tls", "security.cluster_tls"):
        assert setting in line


def test_with_keys_and_certificates_nothing_is_said(certificates, keys, capsys) -> None:
    check_access(cluster("0.0.0.0", keys, replace(certificates.security, require_auth=True)))
    assert "open to" not in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_require_auth_nothing_starts_that_is_open(host) -> None:
    with pytest.raises(StartError, match=r"require_auth.*router\.api_keys_file"):
        check_access(cluster(host).requiring_auth())


def test_half_of_what_goes_together_is_refused_by_name() -> None:
    for section, given, missing in (
        ("tls", {"cert_file": "a"}, "tls.key_file"),
        ("tls", {"key_file": "a"}, "tls.cert_file"),
        ("tls", {"client_ca_file": "a"}, "tls.cert_file"),
        ("cluster_tls", {"cert_file": "a", "key_file": "b"}, "cluster_tls.ca_file"),
        ("cluster_tls", {"ca_file": "a"}, "cluster_tls.cert_file"),
        ("tsl", {}, "tsl"),
        ("tls", {"cert": "a"}, "tls.cert"),
    ):
        with pytest.raises(ConfigError) as caught:
            from_mapping({"metadata": {"baton": {"pools": PAIR, "security": {section: given}}}})
        assert caught.value.key == f"metadata.baton.security.{missing}"


def test_a_file_of_settings_becomes_settings(certificates) -> None:
    tls, inner = certificates.mutual_tls, certificates.cluster_tls
    section = {
        "require_auth": True,
        "tls": {"cert_file": tls.cert_file, "key_file": tls.key_file, "client_ca_file": tls.client_ca_file},
        "cluster_tls": {"ca_file": inner.ca_file, "cert_file": inner.cert_file, "key_file": inner.key_file},
    }
    config = from_mapping({"metadata": {"baton": {"pools": PAIR, "security": section}}})
    assert config.security == SecuritySettings(True, tls, inner)


def test_files_are_found_from_other_directories_and_homes_stay_each_machines_own(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    config = cluster("127.0.0.1", "keys", SecuritySettings(tls=TlsSettings("a.pem", "~/a-key.pem")))
    found = with_absolute_paths(config)
    assert found.security.tls == TlsSettings(str(tmp_path / "a.pem"), "~/a-key.pem")
    assert found.router.api_keys_file == str(tmp_path / "keys")


# --- certificates ---


def test_certificates_that_are_made_are_good_and_their_end_is_announced(certificates) -> None:
    now = datetime.now(UTC)
    assert check_certificates(replace(certificates.security, tls=certificates.mutual_tls), now) == []
    soon = check_certificates(certificates.security, now + timedelta(days=20))
    assert soon
    assert all("expires on" in line for line in soon)
    with pytest.raises(CredentialsError, match="expired on"):
        check_certificates(certificates.security, now + timedelta(days=31))
    with pytest.raises(CredentialsError, match="not valid before"):
        check_certificates(certificates.security, now - timedelta(days=1))


def test_a_key_that_others_may_read_is_announced(tmp_path) -> None:
    made = Certificates.make(tmp_path / "certs")
    os.chmod(made.tls.key_file, 0o644)
    [line] = check_certificates(made.security, datetime.now(UTC))
    assert "chmod 600" in line
    assert made.tls.key_file in line


def test_a_certificate_that_no_member_would_accept_stops_the_start(certificates, tmp_path) -> None:
    ca = certificates.cluster_tls.ca_file
    for pair, says in (
        (member_pair(tmp_path / "name", certificates.cluster(), name="other"), r"must be for baton\.internal"),
        (member_pair(tmp_path / "strange", stranger()), "not signed by"),
        (member_pair(tmp_path / "late", certificates.cluster(), days=-1), "expired"),
    ):
        security = SecuritySettings(cluster_tls=ClusterTlsSettings(ca, pair.cert_file, pair.key_file))
        with pytest.raises(StartError, match=says) as caught:
            check_access(cluster("127.0.0.1", security=security))
        assert pair.cert_file in str(caught.value)


def test_an_expired_certificate_for_clients_stops_the_start(certificates, tmp_path) -> None:
    pair = front_pair(tmp_path / "router", certificates.front(), days=-1)
    security = SecuritySettings(tls=TlsSettings(pair.cert_file, pair.key_file))
    with pytest.raises(StartError, match="expired on"):
        check_access(cluster("127.0.0.1", security=security))
