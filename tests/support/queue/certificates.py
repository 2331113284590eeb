"""An authority, and certificates that it signs, for servers and clients in a test."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


class Authority:
    """Writes `NAME.crt` and `NAME.key` into its directory; its own certificate is `ca.crt`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory, self._key = directory, ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        signed = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.file = directory / "ca.crt"
        self._write(self.file, signed)

    def sign(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """A certificate and its key, for these hosts and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(name), key)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False
            )
        certificate, private = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        self._write(certificate, builder)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, private

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        signed = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
