"""Sources of each kind over both HTTP clients."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import pytest

from qreward_plugins.sources.openai import OpenAISource
from qreward_plugins.sources.service import HTTPSource

from .wire import KEY


@pytest.fixture(params=["aiohttp", "httpx"])
def client(request):
    """The HTTP client of the sources; every test over HTTP runs with both."""
    return str(request.param)


@pytest.fixture
def open_source(client):
    def make(*base_urls, **settings):
        node = {"kind": "openai", "base_url": base_urls, "model": "judge", "client": client, "api_key": KEY}
        return OpenAISource("fast", OpenAISource.Config.model_validate({**node, **settings}))

    return make


@pytest.fixture
def open_service(client):
    def make(*urls, **settings):
        node = {"kind": "http", "url": urls, "client": client, "api_key": KEY}
        return HTTPSource("rm", HTTPSource.Config.model_validate({**node, **settings}))

    return make


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A folder with self-signed certificates of a server and of a client."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    for who in ("server", "client"):
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command = [openssl, "req", "-x509", *curve, *name, "-days", "2"]
        out = ["-keyout", folder / f"{who}.key", "-out", folder / f"{who}.pem"]
        subprocess.run([*command, *out], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def self_signed(certificates):
    """The settings of a server whose certificate no client trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context
