#!/usr/bin/env python3
"""Brings llama.cpp's vocabulary files with their test inputs and expected ids, and its chat templates, and prints their folder.

usage: setup_llama_cpp.py [DIR], by default build/llama_cpp. They come inside the source archive of the package llama-cpp-python,
which is read from pip's own index without being built, and checked by its digest. Returns at once when DIR holds them.
"""
import hashlib
import html.parser
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request

from pip._internal.models.index import PyPI

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
WITHIN = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/"


def index_url():
    """Where pip looks packages up."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or PyPI.simple_url


def archive():
    page = index_url().rstrip("/") + "/llama-cpp-python/"
    links = []

    class Links(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            links.extend(urllib.parse.urljoin(page, value) for name, value in attributes if tag == "a" and name == "href")

    with urllib.request.urlopen(page, timeout=60) as answer:
        Links().feed(answer.read().decode())
    found = [link for link in links if urllib.parse.urlparse(link).path.endswith("/" + ARCHIVE)]
    if not found:
        sys.exit(f"the index has no {ARCHIVE}")
    with urllib.request.urlopen(found[0], timeout=600) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        sys.exit(f"{ARCHIVE} is not the archive it was")
    return data


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "llama_cpp"
    if not (folder / "stamp").exists() or (folder / "stamp").read_text() != SHA256:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / ARCHIVE).write_bytes(archive())
        with tarfile.open(folder / ARCHIVE) as tar:
            for member in tar:
                name = member.name.removeprefix(WITHIN)
                if member.isfile() and name != member.name and "/" not in name.removeprefix("templates/"):
                    target = folder / name
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(tar.extractfile(member).read())
        (folder / ARCHIVE).unlink()
        (folder / "stamp").write_text(SHA256)
    print(folder)


if __name__ == "__main__":
    main()
