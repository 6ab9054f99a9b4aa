"""Installs other servers and engines of texts, each into an environment of its own below benchmarks/results/venvs.

usage: python -m benchmarks.peers install mlserver litserve vllm openvino-genai ...
       python -m benchmarks.peers list
"""

import argparse

from benchmarks.peers import PEERS, install, installed, installed_engines, version
from benchmarks.peers.engines import ENGINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("install", "list"))
    parser.add_argument("names", nargs="*", choices=[*PEERS, *ENGINES, []], help="all servers where none is named")
    given = parser.parse_args()
    if given.what == "install":
        for name in given.names or PEERS:
            install(name)
    for name in [*installed(), *installed_engines()]:
        print(f"{name} {version(name)}")


if __name__ == "__main__":
    main()
