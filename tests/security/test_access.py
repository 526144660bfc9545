"""How a client is let in: where its token may come from, what its options mean, and that no token is ever shown."""

from __future__ import annotations

import argparse
import ssl
import stat
from pathlib import Path

import pytest
from certificates import Certificates

from baton.client import access
from baton.client.certs import CertsError, make_certificates
from baton.client.cli import build_parser, main
from baton.proto.credentials import ClientTls

TOKEN = "sk-0123456789abcdef"


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["status", *words])


def test_a_token_comes_from_a_file_or_else_from_the_environment(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.delenv(access.VARIABLE, raising=False)
    assert access.token_of(parsed()) is None
    monkeypatch.setenv(access.VARIABLE, "from-the-environment")
    assert access.token_of(parsed()) == "from-the-environment"
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert access.token_of(parsed("--token-file", str(file))) == TOKEN
    assert capsys.readouterr().err == ""


def test_a_token_on_the_command_line_is_warned_of_and_not_advertised(capsys) -> None:
    assert access.token_of(parsed("--token", TOKEN)) == TOKEN
    said = capsys.readouterr().err
    assert "--token-file" in said
    assert TOKEN not in said
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    shown = capsys.readouterr().out
    assert "--token-file" in shown
    assert "--token " not in shown.replace("--token-file ", "")


@pytest.mark.parametrize("content", ["", "\n", "two words", "two\nlines", "umläut-token", "\x00\x01"])
def test_what_is_no_token_is_refused_and_not_shown(monkeypatch, tmp_path, content, capsys) -> None:
    monkeypatch.delenv(access.VARIABLE, raising=False)
    file = tmp_path / "token"
    file.write_text(content)
    assert main(["status", "--token-file", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not content.strip() or content.strip() not in said


def test_a_token_file_that_is_not_there_is_named(tmp_path, capsys) -> None:
    assert main(["status", "--token-file", str(tmp_path / "nothing")]) == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err


def test_a_command_line_is_shown_without_its_token() -> None:
    words = ["sweep", "--token", TOKEN, "--rates", "1", f"--token={TOKEN}", "--token"]
    assert access.without_token(words) == ["sweep", "--token", "...", "--rates", "1", "--token=...", "--token"]


@pytest.mark.parametrize(
    ("words", "tls"),
    [
        ((), None),
        (("--tls",), ClientTls()),
        (("--tls-ca", "ca.pem"), ClientTls("ca.pem")),
        (("--tls", "--tls-name", "router"), ClientTls(name="router")),
        (("--tls-cert", "a.pem", "--tls-key", "a-key.pem"), ClientTls("", "a.pem", "a-key.pem")),
    ],
)
def test_options_of_tls_mean_tls(words, tls) -> None:
    assert access.tls_of(parsed(*words)) == tls


def test_a_certificate_without_its_key_is_refused(capsys) -> None:
    assert main(["status", "--tls-cert", "a.pem"]) == 1
    assert "--tls-key" in capsys.readouterr().err


def test_certificates_that_are_not_there_are_named(tmp_path, capsys) -> None:
    assert main(["status", "--tls-ca", str(tmp_path / "ca.pem")]) == 1
    assert f"{tmp_path / 'ca.pem'} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "tls", "target", "warns"),
    [
        (TOKEN, None, "10.0.0.1:50051", True),
        (TOKEN, None, "router.example:50051", True),
        (TOKEN, None, "127.0.0.1:50051", False),
        (TOKEN, None, "localhost:50051", False),
        (TOKEN, None, "[::1]:50051", False),
        (TOKEN, ClientTls(), "10.0.0.1:50051", False),
        (None, None, "10.0.0.1:50051", False),
    ],
)
def test_a_token_that_leaves_the_machine_in_plain_text_is_warned_of(token, tls, target, warns, capsys) -> None:
    access.warn_of_plain_text(token, tls, target)
    assert ("in plain text" in capsys.readouterr().err) is warns


# --- baton certs ---


def test_keys_are_readable_by_their_owner_alone_and_no_file_is_overwritten(tmp_path, capsys) -> None:
    assert main(["certs", str(tmp_path / "certs"), "--host", "10.0.0.1", "--client", "bob"]) == 0
    assert "cluster_tls" in capsys.readouterr().out
    files = sorted(path for path in (tmp_path / "certs").rglob("*.pem"))
    assert len(files) == 10
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.stem.endswith("-key") else 0o644)
    before = [path.read_bytes() for path in files]
    assert main(["certs", str(tmp_path / "certs")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize(
    ("hosts", "clients", "days", "says"),
    [
        (["host:80"], [], 1, "without a port"),
        (["a b"], [], 1, "without a port"),
        ([""], [], 1, "without a port"),
        ([], ["../evil"], 1, "--client"),
        ([], ["router"], 1, "--client"),
        ([], [], 1_000_000, "--days"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_written(tmp_path, hosts, clients, days, says) -> None:
    with pytest.raises(CertsError, match=says):
        make_certificates(tmp_path / "certs", hosts, clients, days)
    assert not (tmp_path / "certs").exists()


def test_a_client_of_the_router_is_no_member_of_the_cluster(tmp_path) -> None:
    made = Certificates.make(tmp_path / "certs")
    assert verified(made.alice.cert_file, made.file("ca.pem"))
    assert verified(made.cluster_tls.cert_file, made.cluster_tls.ca_file)
    assert not verified(made.alice.cert_file, made.cluster_tls.ca_file)
    assert not verified(made.tls.cert_file, made.cluster_tls.ca_file)
    assert not verified(made.cluster_tls.cert_file, made.file("ca.pem"))


def verified(cert_file: str, ca_file: str) -> bool:
    """Whether a server that trusts `ca_file` takes a client with this certificate, by OpenSSL's own judgement."""
    key_file = str(Path(cert_file).with_name(Path(cert_file).stem + "-key.pem"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file)
    server.load_verify_locations(ca_file)
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.load_cert_chain(cert_file, key_file)
    near, far = (ssl.MemoryBIO(), ssl.MemoryBIO()), (ssl.MemoryBIO(), ssl.MemoryBIO())
    ends = [client.wrap_bio(near[0], near[1]), server.wrap_bio(far[0], far[1], server_side=True)]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
        far[0].write(near[1].read())
        near[0].write(far[1].read())
    return ends[1].getpeercert() is not None
