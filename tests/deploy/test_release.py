"""What a release consists of: the source distribution, its metadata, bills of materials, the audit."""

import email
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dragoman import __version__

ROOT = Path(__file__).parents[2]
# Files that setuptools adds.
_ADDED = {"PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path]:
    """The files of the repository, and the source distribution that is built from a copy of them."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        target = folder / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    code = "import setuptools.build_meta as b; print(b.build_sdist('../built'))"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "copy", check=True, capture_output=True)
    (built,) = (folder / "built").iterdir()
    return names, built


def test_the_source_distribution_is_complete(source: tuple[set[str], Path]) -> None:
    names, built = source
    with tarfile.open(built) as archive:
        top = f"dragoman-{__version__}/"
        found = {name.removeprefix(top) for name in archive.getnames() if archive.getmember(name).isfile()}
    added = {name for name in found if name in _ADDED or ".egg-info/" in name}
    assert found - added == names


def test_metadata(source: tuple[set[str], Path]) -> None:
    with tarfile.open(source[1]) as archive:
        file = archive.extractfile(f"dragoman-{__version__}/PKG-INFO")
        assert file is not None
        metadata = email.message_from_bytes(file.read())
    assert (metadata["Name"], metadata["Version"]) == ("dragoman", __version__)
    assert (metadata["Author"], metadata["License-Expression"]) == ("The Dragoman maintainers", "Apache-2.0")
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL") or ())
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    versions = ("3.11", "3.12", "3.13", "3.14", "3.15")
    assert {f"Programming Language :: Python :: {v}" for v in versions} <= set(classifiers)


def check_cyclonedx(document: Any) -> None:
    """Raise ValidationError if a document is no CycloneDX 1.6. The tool's own check takes five seconds for the URLs."""
    from jsonschema import Draft7Validator
    from referencing import Registry
    from referencing.jsonschema import DRAFT7

    folder = Path(str(distribution("cyclonedx-python-lib").locate_file("cyclonedx/schema/_res")))
    files = [f"{name}.SNAPSHOT.schema.json" for name in ("bom-1.6", "spdx", "jsf-0.82", "cryptography-defs")]
    schemas = [json.loads((folder / file).read_text()) for file in files]
    registry: Any = Registry().with_resources(
        (f"http://cyclonedx.org/schema/{file}", DRAFT7.create_resource(schema))
        for file, schema in zip(files, schemas, strict=True)
    )
    Draft7Validator(schemas[0], registry=registry).validate(document)


def test_bills_of_materials(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "sbom", "--no-validate", tmp_path], check=True, capture_output=True)
    for name in ("container", "container-torch"):
        document = json.loads((tmp_path / f"dragoman-{name}.cdx.json").read_text())
        check_cyclonedx(document)
        assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
        root = document["metadata"]["component"]
        assert (root["name"], root["version"]) == ("dragoman", __version__)
        packages = {each["name"]: each for each in document["components"]}
        assert packages["numpy"]["purl"] == f"pkg:pypi/numpy@{packages['numpy']['version']}"
        assert packages["numpy"]["externalReferences"][0]["hashes"][0]["alg"] == "SHA-256"
        assert ("torch" in packages) == (name == "container-torch")


@contextmanager
def osv(vulnerable: str) -> Iterator[str]:
    """Serve a vulnerability database in the format of OSV, with one vulnerable package; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            is_vulnerable = request["package"]["name"] == vulnerable
            found = {"id": "TEST-1", "summary": "s", "details": "d", "modified": "2026-01-01T00:00:00Z", "affected": []}
            body = json.dumps({"vulns": [found]} if is_vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("vulnerable", "status"), [("nothing", 0), ("orjson", 1)])
def test_the_audit_finds_vulnerable_packages(vulnerable: str, status: int) -> None:
    with osv(vulnerable) as url:
        command: list[str] = [str(ROOT / "scripts" / "audit"), "--vulnerability-service", "osv", "--osv-url", url]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("TEST-1" in done.stdout) == bool(status)


def test_two_source_archives_are_equal(source: tuple[set[str], Path], tmp_path: Path) -> None:
    """Whatever the times, the order and the owners of the files are."""
    archives = [tmp_path / "first.tar.gz", tmp_path / "second.tar.gz"]
    shutil.copy(source[1], archives[0])
    plain = io.BytesIO(gzip.decompress(source[1].read_bytes()))
    with tarfile.open(fileobj=plain) as before, tarfile.open(archives[1], "w:gz", compresslevel=1) as after:
        for member in reversed(before.getmembers()):
            content = before.extractfile(member) if member.isfile() else None
            mode = member.mode & ~0o077  # of another umask
            after.addfile(member.replace(mtime=1, uid=7, gid=7, uname="other", gname="other", mode=mode), content)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1790000000"}
    for each in archives:
        subprocess.run([sys.executable, ROOT / "scripts" / "repack", each], env=environment, check=True)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as repacked, tarfile.open(source[1]) as original:
        assert {each.name for each in repacked} == {each.name for each in original}
        script = repacked.getmember(next(name for name in repacked.getnames() if name.endswith("/scripts/wheels")))
        assert (script.mode, script.mtime) == (0o755, 1790000000)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_release_is_verified_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "releases.md").read_text()
    verify = page.partition("## Verify a release")[2].partition("```text\n")[2].partition("```")[0]
    sign = page.partition("ssh-keygen -Y sign -f ~/.ssh/dragoman-release ")[2].partition("`")[0]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "a.whl").write_text("wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    (tmp_path / "dist" / "SHA256SUMS").write_text(f"{digest}  a.whl\n{digest}  not-downloaded.whl\n")

    def run(command: str, folder: Path) -> int:
        return subprocess.run(["bash", "-ec", command], cwd=folder, capture_output=True, check=False).returncode

    for name in ("key", "other"):
        assert run(f"ssh-keygen -q -t ed25519 -N '' -C '' -f {name}", tmp_path) == 0
    assert run(f"ssh-keygen -Y sign -f key {sign}", tmp_path) == 0
    allowed = tmp_path / "dist" / "allowed_signers"
    allowed.write_text(f"dragoman {(tmp_path / 'key.pub').read_text()}")
    assert run(verify, tmp_path / "dist") == 0
    (tmp_path / "dist" / "a.whl").write_text("other")
    assert run(verify, tmp_path / "dist") != 0
    (tmp_path / "dist" / "a.whl").write_text("wheel")
    allowed.write_text(f"dragoman {(tmp_path / 'other.pub').read_text()}")
    assert run(verify, tmp_path / "dist") != 0
