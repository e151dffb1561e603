"""Who may connect: addresses, tokens, certificates."""

import contextlib
import ipaddress
import os
import resource
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beast.errors import InputError


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address. InputError where it is not `unix:/path` or `host:port`."""
    if address.startswith("unix:"):
        return True
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16) or "," in host:
        remedy = "; put spaces between several addresses" if "," in address else ""
        raise InputError(f"address {address!r} is neither unix:/path nor host:port, as 127.0.0.1:4431 is{remedy}")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def of_env_server(flags, log: Callable[[str], None]) -> dict[str, Any]:
    """The arguments of an EnvServer or a Dialer that protect it. `log` gets what is good to know of them. Raises
    InputError as `security` and `dial_security` do."""
    if not flags.learner:
        if flags.tls_ca:
            raise InputError("--tls_ca checks a learner's certificate, so it goes with --learner: leave it out")
        token, tls = security(flags.address, flags.token_file, flags.tls_cert, flags.tls_key, flags.insecure)
        if not (tls or is_local(flags.address)):
            log(f"--insecure: all who can connect to {flags.address} can read along, and without a token step too")
        return {"token": token, "tls": tls}
    if flags.tls_cert or flags.tls_key:
        raise InputError("with --learner the certificate is the learner's: give --tls_ca, not --tls_cert and --tls_key")
    token, certificates = dial_security(flags.learner, flags.token_file, flags.tls_ca, flags.insecure)
    if not certificates and not all(map(is_local, flags.learner)):
        log("--insecure: all on the way to the learner can read along, the token too, and answer in its place")
    return {"token": token, "root_certificates": certificates}


def security(address: str, token_file="", tls_cert="", tls_key="", insecure=False) -> tuple[str, tuple | None]:
    """The token and the TLS key and certificate for an address, as `EnvServer` takes them. Raises InputError if other
    machines can reach the address and it is not protected, or if a file cannot be used."""
    if bool(tls_cert) != bool(tls_key):
        raise InputError("--tls_cert and --tls_key go together: give both, or neither")
    if tls_cert and address.startswith("unix:"):
        raise InputError(f"{address} needs no TLS, as only its owner can open it: leave out --tls_cert and --tls_key")
    if not (is_local(address) or insecure or (token_file and tls_cert)):
        raise InputError(
            f"other machines can reach {address}: give --token_file, --tls_cert and --tls_key, or take a unix or "
            "loopback address; --insecure lets everyone who can connect step these environments and read along"
        )
    token = read_token(token_file) if token_file else ""
    if not tls_cert:
        return token, None
    return token, (_read(tls_key, "--tls_key", is_secret=True), read_certificates(tls_cert, "--tls_cert"))


def dial_security(addresses: list[str], token_file="", tls_ca="", insecure=False) -> tuple[str, bytes | None]:
    """The token for learners at these addresses, and the certificate (PEM) that theirs must be signed with, or None
    for plain text. Raises InputError if one is on another machine and is not dialed with both, or if a file cannot be
    used."""
    for address in addresses:
        if not (is_local(address) or insecure or (token_file and tls_ca)):
            raise InputError(
                f"other machines are between here and the learner at {address}: give --token_file and --tls_ca; "
                "--insecure lets everyone on the way read along, the token too, and step these environments"
            )
        if tls_ca and address.startswith("unix:"):
            raise InputError(f"{address} needs no TLS, as only its owner can open it: leave out --tls_ca")
    return read_token(token_file) if token_file else "", read_certificates(tls_ca, "--tls_ca") if tls_ca else None


def read_certificates(path: str, flag: str) -> bytes:
    """The certificates (PEM) in a file. Raises InputError if it cannot be read or holds none: gRPC would say no more
    than that it cannot connect."""
    content = _read(path, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"{flag} {path} holds no certificate: give the file that begins with -----BEGIN CERTIFICATE----- ({error})"
        ) from error
    return content


def read_token(path: str) -> str:
    """The secret in a file, without white space around it. Raises InputError if the file cannot be read, holds no
    token, or is open to other users."""
    token = _read(path, "--token_file", is_secret=True).strip()
    remedy = f"write a secret into it (openssl rand -hex 32 > {path})"
    if not token:
        raise InputError(f"--token_file {path} is empty: {remedy}")
    if len(token) > 1000 or not all(0x20 < byte < 0x7F for byte in token):
        raise InputError(f"--token_file {path} must hold at most 1000 characters, ASCII and without spaces: {remedy}")
    return token.decode()


def _read(path: str, flag: str, is_secret: bool = False) -> bytes:
    try:
        content, mode = Path(path).read_bytes(), stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise InputError(f"{flag} {path} cannot be read: {error.strerror}") from error
    if is_secret and mode & 0o077:
        raise InputError(f"{flag} {path} can be read by other users (mode {mode:o}): chmod 600 {path}")
    return content


def allow_many_connections() -> None:
    """Raise this process's limit of descriptors, so that some hundred idle connections do not shut others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
