"""`quire serve` with access control as an operator starts it: keys from a file, TLS, a public address, JSON logs."""

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests import children
from tests.server.server_process import QUIRE

CERTIFY = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
           "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_a_server_with_keys_and_a_certificate(tmp_path: Path, default_model_path: Path) -> None:
    keys, admin, certificate, private = (tmp_path / name for name in ("keys", "admin", "cert.pem", "key.pem"))
    keys.write_text("sk-served name=somebody\n")
    admin.write_text("sk-admin\n")
    children.run([*CERTIFY, "-keyout", private, "-out", certificate], check=True, capture_output=True)
    access = ("--api-key-file", str(keys), "--admin-key-file", str(admin), "--log-format", "json", "--ssl-certfile",
            str(certificate), "--ssl-keyfile", str(private), "--max-body", "1KiB")  # fmt: skip
    (tmp_path / "script.jsonl").write_text('{"say": "Hello there."}')
    command = [QUIRE, "serve", "--script", str(tmp_path / "script.jsonl"), "--host", "0.0.0.0", "--port", "0", *access]
    with children.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("Ready"))
        url = ready.split()[5].replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=url, verify=trust, timeout=60, headers={"x-request-id": "mine"}) as client:
            bearer = {"authorization": "Bearer sk-served"}
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=body).status_code == 401
            response = client.post("/v1/completions", json=body, headers=bearer)
            assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
            assert client.post("/pause", headers=bearer).status_code == 403
            assert client.post("/resume", headers={"authorization": "Bearer sk-admin"}).status_code == 200
            assert client.post("/v1/completions", content=b" " * 1025, headers=bearer).status_code == 413
        process.terminate()
        output, _ = process.communicate(timeout=60)
    lines = [fields for line in output.splitlines() if "route" in (fields := json.loads(line))]
    assert [(line["route"], line["status"], line["key"], line["client_id"]) for line in lines] == [
        ("/v1/completions", 401, "nobody", "mine"),
        ("/v1/completions", 200, "somebody", "mine"),
        ("/pause", 403, "nobody", "mine"),
        ("/resume", 200, "admin", "mine"),
        ("/v1/completions", 413, "somebody", "mine"),
    ]
    assert "sk-" not in output
    assert process.returncode == 0
